"""Sketches: recipes without stream positions. Recipes that differ only in those have equal sketches, compiled once.

A sketch is a tree of tuples that can be hashed: it is the key under which one function of a module, or one executable,
serves all weights alike. Most recipes go element by element (fills, arithmetic, a row that is zeroed), and such a
sketch can be evaluated for any box of the weight alone; the others are evaluated whole and cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...lower.program import Template, View
from ...rng.stream import Stream


class RandomFill(NamedTuple):
    """A random fill of the whole weight. `draw` numbers the recipe's places in the stream."""

    draw: int
    name: str
    arguments: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    words: int  # drawn in all; 0 under the counter policy, which has no use for it


class Truncated(NamedTuple):
    """Normals drawn anew until they lie inside the bounds: the fill is its first round."""

    fill: RandomFill
    low: float
    high: float


class Constant(NamedTuple):
    """One number everywhere. Its kind tells 1 from 1.0 and True."""

    kind: type
    value: Any
    dtype: torch.dtype


class Data(NamedTuple):
    """Values known at capture, by their digest; see `Sketch.data`."""

    digest: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Apply(NamedTuple):
    """An operation that goes element by element."""

    op: Any
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype


class Masked(NamedTuple):
    """`new` at the elements [begin, end), as they lie in memory; elsewhere `old`."""

    begin: int
    end: int
    new: Any
    old: Any


class SketchStep(NamedTuple):
    """One operation of a `WholeSketch`: a node's template and its operands, which are numbers of earlier results."""

    template: Template
    inputs: tuple[int, ...]
    fill: Any  # of a draw: a RandomFill, and the view that is filled
    size: tuple[int, ...]
    view: View | None


class WholeSketch(NamedTuple):
    """A recipe that is evaluated whole: its constants (or unwritten memory), its operations, and what is shown."""

    inputs: tuple[Any, ...]
    steps: tuple[SketchStep, ...]
    result: int
    view: View | None
    dtype: torch.dtype


class DrawOrigin(NamedTuple):
    """Where a draw begins: a word of a stream, or the number of a draw under the counter policy."""

    stream: Stream
    position: int


class Sketch:
    """One recipe's sketch, with what is its own.

    Attributes:
        tree: what it does: equal for recipes alike.
        shape: of the weight in memory, where it lies row-major.
        order: how the weight's dimensions are ordered in memory, the slowest first.
        places: where its draws begin.
        data: the arrays that `Data` in the tree names.
    """

    def __init__(
        self, tree: Any, shape: tuple[int, ...], order: tuple[int, ...], places: list[DrawOrigin], data
    ) -> None:
        self.tree = tree
        self.shape = shape
        self.order = order
        self.places = places
        self.data: dict[str, np.ndarray] = data

    @property
    def whole(self) -> bool:
        """Whether shards of it cannot be made alone."""
        return type(self.tree) is WholeSketch

    @property
    def pure(self) -> bool:
        """Whether it is a fill or a number, with nothing else to it."""
        return type(self.tree) in (RandomFill, Truncated, Constant)
