"""Shardings of the values that cross between a step's segments."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...lower.gathers import Gathers, gathers_of
from ...lower.segments import Cut, Segment
from ...lower.sharding import ArraySharding, Spec, propagate, read_rules
from ...program.graph import Value
from ..jax_support import x64
from .mesh import Mesh, MeshSharding, named


class Edges:
    """The sharding of each array that goes from one segment to another.

    Attributes:
        cut: the segments; those of one number compute the same, and their inputs and outputs are sharded alike.
    """

    def __init__(
        self,
        cut: Cut,
        mesh: Mesh,
        given: Mapping[Value, MeshSharding | NamedSharding],
        batch: Container[Value],
        wanted: Mapping[Value, MeshSharding | NamedSharding],
    ) -> None:
        """
        Args:
            given: the shardings of the inputs.
            batch: those of them that are the batch.
            wanted: the shardings that outputs have to have; the others are as they come.
        """
        self.whole = mesh.whole.named
        self._axes = mesh.axes
        # Where a step is one segment, its weights would be whole from the forward pass to the backward pass.
        self._gathers = len(cut.segments) > 1 and not mesh.scatters
        places = {value: named(where) for value, where in given.items()}
        ends = {value: named(where) for value, where in wanted.items()}
        placed = {v: ArraySharding(spec_of(where, len(v.shape)), v in batch) for v, where in places.items()}
        specs = {value: spec_of(where, len(value.shape)) for value, where in ends.items()}
        read_rules(cut.segments, self.whole)
        found = propagate(cut.segments, placed, specs, mesh.axes)
        cut_so: dict[Spec, NamedSharding] = {}

        def sharding(spec: Spec) -> NamedSharding:
            while spec and not spec[-1]:
                spec = spec[:-1]
            if not spec:
                return self.whole
            if spec not in cut_so:
                entries = (None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec)
                cut_so[spec] = NamedSharding(mesh.devices, PartitionSpec(*entries))
            return cut_so[spec]

        self._where = {**{value: sharding(placed.spec) for value, placed in found.items()}, **places, **ends}
        self._of_batch = {value for value, placed in found.items() if placed.of_batch}
        numbers: dict[Hashable, int] = {}
        segments = []
        for segment in cut.segments:
            kind = segment.function, *map(self.of, segment.inputs), *map(self.of, segment.outputs)
            segments.append(segment._replace(function=numbers.setdefault(kind, len(numbers))))
        self.cut = cut._replace(segments=segments)

    def of(self, value: Value | int) -> NamedSharding:
        """The sharding of a value; the number of a draw, and what the step's code holds, are on every device."""
        return self.whole if isinstance(value, int) else self._where.get(value, self.whole)

    def placed(self, value: Value) -> ArraySharding:
        """The same, by dimensions."""
        return ArraySharding(spec_of(self.of(value), len(value.shape)), value in self._of_batch)

    def gathers(self, segment: Segment) -> Gathers | None:
        """What a segment gathers of its weights, where that is not left to XLA."""
        if not self._gathers:
            return None
        known = {value: self.placed(value) for value in (*segment.inputs, *segment.outputs) if isinstance(value, Value)}
        return gathers_of(segment, known, self._axes)

    def described(self, segment: Segment) -> tuple:
        """All that decides how a segment is partitioned, besides what it computes and the mesh."""
        crossing = (*segment.inputs, *segment.outputs)
        return self._gathers, tuple(None if isinstance(value, int) else self.placed(value) for value in crossing)

    def put(self, values: np.ndarray) -> Any:
        """A copy of `values`, which every process has, on every device."""
        values = np.asarray(values)
        with x64():
            return jax.make_array_from_callback(values.shape, self.whole, lambda index: values[index])


def spec_of(where: MeshSharding | NamedSharding, dims: int) -> Spec:
    """For each of `dims` dimensions the axes that cut it."""
    spec = named(where).spec
    entries = (*spec, *(None,) * (dims - len(spec)))
    return tuple(() if not e else (e,) if isinstance(e, str) else tuple(e) for e in entries)
