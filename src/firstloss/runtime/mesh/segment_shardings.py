"""Shardings of the values that cross between a step's segments."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...lower.gathers import Gathers, gathers_of
from ...lower.segments import Cut, Segment
from ...lower.sharding import ArraySharding, Spec, propagate, read_rules
from ...program.graph import Value
from ..jax_support import x64
from .mesh import Mesh, MeshSharding, axes_of_dims, named

Compute = Callable[..., tuple[Any, ...]]  # of a seed, two uint32, and arrays


class Edges:
    """The sharding of each array that is passed between segments: a base class, whose subclasses say how a segment is
    divided over the devices.

    Attributes:
        cut: the segments; those of the same function have equally sharded inputs and outputs.
        same_run: whether it computes by logical shards; see `same_run.py`.
    """

    same_run = False

    def __init__(
        self, cut: Cut, mesh: Mesh, shardings: Mapping[Value, NamedSharding], of_batch: Container[Value] = ()
    ) -> None:
        """
        Args:
            shardings: those of all values that are not replicated.
            of_batch: the values that are cut along the batch.
        """
        self.cut: Cut = cut
        self.whole: NamedSharding = mesh.whole.named
        self._shardings = dict(shardings)
        self._of_batch = of_batch

    def of(self, value: Value | int) -> NamedSharding:
        """The sharding of a value; constants and numbers of draws are replicated."""
        return self.whole if isinstance(value, int) else self._shardings.get(value, self.whole)

    def placed(self, value: Value) -> ArraySharding:
        """The sharding of a value by dimension."""
        return ArraySharding(spec_of(self.of(value), len(value.shape)), value in self._of_batch)

    def gathers(self, segment: Segment) -> Gathers | None:
        """The weights that a segment gathers explicitly, if that is not left to XLA."""
        return None

    def divided(
        self, segment: Segment, run: Compute, inputs: Sequence[Value | int], outputs: Sequence[Value]
    ) -> Compute:
        """`run`, which computes `outputs` of a segment from a seed and its `inputs`, as it is divided over the
        devices."""
        raise NotImplementedError

    def described(self, segment: Segment) -> tuple[Any, ...]:
        """All that decides how a segment is divided, besides what it computes and the mesh."""
        crossing = (*segment.inputs, *segment.outputs)
        return tuple(None if isinstance(value, int) else self.placed(value) for value in crossing)

    def put(self, values: np.ndarray) -> Any:
        """Replicate `values`, which every process has."""
        values = np.asarray(values)
        with x64():
            return jax.make_array_from_callback(values.shape, self.whole, lambda index: values[index])


class PartitionedEdges(Edges):
    """Those of segments that XLA's partitioner divides."""

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
            batch: the inputs that are the batch.
            wanted: the required shardings of outputs; others are left to XLA.
        """
        whole = mesh.whole.named
        self._axes = mesh.axes
        # If the step is a single segment, gathered weights would live from the forward pass to the backward pass.
        self._gathers = len(cut.segments) > 1 and not mesh.scatters
        inputs = {value: named(sharding) for value, sharding in given.items()}
        outputs = {value: named(sharding) for value, sharding in wanted.items()}
        placed = {v: ArraySharding(spec_of(s, len(v.shape)), v in batch) for v, s in inputs.items()}
        specs = {value: spec_of(s, len(value.shape)) for value, s in outputs.items()}
        read_rules(cut.segments, whole)
        propagated = propagate(cut.segments, placed, specs, mesh.axes)
        by_spec: dict[Spec, NamedSharding] = {}

        def sharding_of(spec: Spec) -> NamedSharding:
            while spec and not spec[-1]:
                spec = spec[:-1]
            if not spec:
                return whole
            if spec not in by_spec:
                entries = (None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec)
                by_spec[spec] = NamedSharding(mesh.devices, PartitionSpec(*entries))
            return by_spec[spec]

        found = {value: sharding_of(placed.spec) for value, placed in propagated.items()}
        of_batch = {value for value, placed in propagated.items() if placed.of_batch}
        super().__init__(cut, mesh, {**found, **inputs, **outputs}, of_batch)
        numbers: dict[Hashable, int] = {}
        segments = []
        for segment in cut.segments:
            kind = segment.function, *map(self.of, segment.inputs), *map(self.of, segment.outputs)
            segments.append(segment._replace(function=numbers.setdefault(kind, len(numbers))))
        self.cut = cut._replace(segments=segments)

    def gathers(self, segment: Segment) -> Gathers | None:
        if not self._gathers:
            return None
        known = {value: self.placed(value) for value in (*segment.inputs, *segment.outputs) if isinstance(value, Value)}
        return gathers_of(segment, known, self._axes)

    def divided(
        self, segment: Segment, run: Compute, inputs: Sequence[Value | int], outputs: Sequence[Value]
    ) -> Compute:
        return run

    def described(self, segment: Segment) -> tuple[Any, ...]:
        return self._gathers, *super().described(segment)


def spec_of(sharding: MeshSharding | NamedSharding, dims: int) -> Spec:
    """For each of `dims` dimensions, the axes over which it is sharded."""
    spec = named(sharding).spec
    return axes_of_dims((*spec, *(None,) * (dims - len(spec))))
