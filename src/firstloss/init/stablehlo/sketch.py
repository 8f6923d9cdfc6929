"""Sketches: recipes without stream positions. Recipes that differ only in these have equal sketches, compiled once.

A sketch is a hashable tree of tuples: the key of a function of a module, or of an executable, that all such weights
share. Most recipes are elementwise (fills, arithmetic, a row that is zeroed); their sketches can be evaluated for any
box of the weight. The others are evaluated as a whole and sliced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...lower.program import Template, View
from ...rng.stream import Stream


class RandomFill(NamedTuple):
    """A random fill of the whole weight. `draw` is an index of `Sketch.origins`."""

    draw: int
    name: str
    arguments: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    words: int  # drawn in total; 0 under the counter policy


class Truncated(NamedTuple):
    """Normals drawn by rejection: redrawn until they are within the bounds. `fill` is the first round."""

    fill: RandomFill
    low: float
    high: float


class Constant(NamedTuple):
    """A constant fill. `kind` distinguishes 1 from 1.0 and True."""

    kind: type
    value: Any
    dtype: torch.dtype


class Data(NamedTuple):
    """Values known at capture, by digest: see `Sketch.data`."""

    digest: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Apply(NamedTuple):
    """An elementwise operation."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype


class Masked(NamedTuple):
    """`new` for elements [begin, end) in memory order, else `old`."""

    begin: int
    end: int
    new: Any
    old: Any


class SketchStep(NamedTuple):
    """One operation of a `WholeSketch`: a node's template, and its operands as indices of earlier results."""

    template: Template
    inputs: tuple[int, ...]
    fill: Any  # for a draw: a RandomFill or Truncated of the view
    size: tuple[int, ...]
    view: View | None


class WholeSketch(NamedTuple):
    """A recipe that is evaluated as a whole: its constants (or uninitialized memory), operations, and result."""

    inputs: tuple[Any, ...]
    steps: tuple[SketchStep, ...]
    result: int
    view: View | None
    dtype: torch.dtype


class DrawOrigin(NamedTuple):
    """The beginning of a draw: a word of a stream, or the number of a draw under the counter policy."""

    stream: Stream
    position: int


class Sketch:
    """The sketch of one recipe, with its own origins and data.

    Attributes:
        tree: the operations.
        shape: of the weight in memory, where it is row-major.
        order: of the weight's dimensions in memory, from major to minor.
        origins: the origins of its draws.
        data: the arrays of the tree's `Data`, by digest.
    """

    def __init__(
        self, tree: Any, shape: tuple[int, ...], order: tuple[int, ...], origins: list[DrawOrigin], data
    ) -> None:
        self.tree = tree
        self.shape = shape
        self.order = order
        self.origins = origins
        self.data: dict[str, np.ndarray] = data

    @property
    def whole(self) -> bool:
        """Whether it can only be evaluated as a whole."""
        return type(self.tree) is WholeSketch

    @property
    def pure(self) -> bool:
        """Whether it is only a fill."""
        return type(self.tree) in (RandomFill, Truncated, Constant)
