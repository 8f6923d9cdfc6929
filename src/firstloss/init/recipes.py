"""Recipes of a module, and a report of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..program.graph import Node, Ref, dtype_name, slice_for
from ..program.program import Program
from ..rng.counter_stream import CounterStream, number_and_word
from ..rng.stream import Stream
from .recipe_text import in_words
from .shardings import ShardingMark


@dataclass(frozen=True, eq=False)
class Recipe:
    """The slice of a constructor's Program that makes one weight.

    Attributes:
        name: the weight's qualified name in the module; if it is tied, the first of its names.
        ref: the weight's view of its Value.
        kind: "parameter", "buffer" or "attribute".
        dead_fills: fills of the whole weight that are overwritten before they are read, and never computed.
    """

    name: str
    ref: Ref
    kind: str
    dead_fills: int
    aliases: list[str] = field(default_factory=list)  # its other names
    mark: ShardingMark | None = None  # by `mark_sharding` or `shard`

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.ref.size

    @property
    def dtype(self) -> torch.dtype:
        """The weight's dtype."""
        return self.ref.dtype

    @property
    def numel(self) -> int:
        """The weight's number of elements."""
        return math.prod(self.ref.size)

    @property
    def nbytes(self) -> int:
        """The weight's bytes."""
        return self.numel * self.ref.dtype.itemsize

    @cached_property
    def nodes(self) -> list[Node]:
        """The operations of the recipe, in the order of recording."""
        return slice_for([self.ref.value])

    @property
    def program(self) -> Program:
        """The recipe as a Program: `print(recipe.program)` prints Python that computes this weight."""
        return Program({}, {self.name: self.ref})

    @property
    def draws(self) -> list[Node]:
        """Those of `nodes` that draw random numbers."""
        return [node for node in self.nodes if node.draw is not None]

    def __str__(self) -> str:
        return in_words(self.ref)


@dataclass(frozen=True)
class ReportRow:
    """One row of a report: a weight; tied ones once."""

    weight: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    recipe: str
    stream: int | None  # numbered in the order of first use
    position: int | None  # the 32-bit word at which the first draw begins; under the counter policy, the draw's number
    dead_fills: int
    tied: tuple[str, ...]  # other names of the same weight


class Report:
    """The weights that a constructor would make, as plain data; `str()` formats a table."""

    def __init__(self, rows: list[ReportRow]) -> None:
        self.rows = rows

    @property
    def bytes(self) -> int:
        """The total size of all weights."""
        return sum(row.bytes for row in self.rows)

    @property
    def parameters(self) -> int:
        """The total number of elements of all parameters."""
        return sum(math.prod(row.shape) for row in self.rows if row.kind == "parameter")

    @property
    def dead_fills(self) -> int:
        """The total number of dead fills."""
        return sum(row.dead_fills for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON-serializable dict."""
        return {
            "weights": [asdict(row) for row in self.rows],
            "parameters": self.parameters,
            "bytes": self.bytes,
            "dead_fills": self.dead_fills,
        }

    def __str__(self) -> str:
        return self.table()

    def table(self, more: Mapping[str, tuple[str, ...]] | None = None, heads: tuple[str, ...] = ()) -> str:
        """The table, with `more` cells for each weight under further `heads`."""
        several = any(row.stream for row in self.rows)
        lines: list[tuple[str, ...]] = [("weight", "shape", "dtype", "recipe", "position", "dead fills", *heads)]
        for row in self.rows:
            at = "" if row.position is None else f"{row.stream}:{row.position}" if several else str(row.position)
            tied = f" (= {', '.join(row.tied)})" if row.tied else ""
            shape = "x".join(map(str, row.shape)) or "()"
            cells = more[row.weight] if more is not None else ()
            lines.append((row.weight + tied, shape, row.dtype, row.recipe, at, str(row.dead_fills or ""), *cells))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        aligned = (str.ljust, str.rjust, str.ljust, str.ljust, *[str.rjust] * (2 + len(heads)))
        text = [
            "  ".join(align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)).rstrip()
            for line in lines
        ]
        text.append(
            f"{len(self.rows)} weights, {self.parameters:,} parameters, {self.bytes:,} bytes, "
            f"{self.dead_fills} dead fills dropped"
        )
        return "\n".join(text)


class Recipes:
    """The recipes of a module's weights, as data.

    Attributes:
        recipes: by qualified name. A tied weight has its recipe under each of its names.
        without: weights that cannot have a recipe, such as sparse ones, with a description of each.
    """

    def __init__(self, recipes: dict[str, Recipe], without: Mapping[str, str]) -> None:
        self.recipes = recipes
        self.without = without

    @cached_property
    def program(self) -> Program:
        """All recipes as one Program, whose outputs have the names of the weights."""
        return Program({}, {name: recipe.ref for name, recipe in self.recipes.items()})

    def report(self) -> Report:
        """A table of weight, shape, dtype, recipe in words, stream position and dead fills."""
        streams: dict[Stream, int] = {}
        rows = []
        for name, recipe in self.recipes.items():
            if name != recipe.name:
                continue
            draws = recipe.draws
            at = _stream_position(draws[0]) if draws else None
            rows.append(
                ReportRow(
                    weight=name,
                    kind=recipe.kind,
                    shape=recipe.shape,
                    dtype=dtype_name(recipe.dtype),
                    bytes=recipe.nbytes,
                    recipe=str(recipe),
                    stream=None if at is None else streams.setdefault(at[0], len(streams)),
                    position=None if at is None else at[1],
                    dead_fills=recipe.dead_fills,
                    tied=tuple(recipe.aliases),
                )
            )
        return Report(rows)

    def __len__(self) -> int:
        return len(self.program)

    def __str__(self) -> str:
        """Python that computes all weights: see `Program`."""
        return str(self.program)


def _stream_position(node: Node) -> tuple[Stream, int]:
    """The stream that an operation draws from, and the position in it."""
    assert node.draw is not None
    stream, position = node.draw.stream.absolute(node.draw.position)
    return stream, number_and_word(position)[0] if isinstance(stream, CounterStream) else position.words
