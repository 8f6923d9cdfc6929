"""The segments of a step that is the same run on any mesh: computed by logical shards, rather than as XLA divides it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...lower import logical_shards
from ...lower.dtypes import to_jax
from ...lower.segments import Cut, Segment
from ...lower.sharding import Spec
from ...program.graph import Value
from ..jax_support import x64
from .mesh import Mesh, MeshSharding, named
from .segment_shardings import Edges


class SameRunEdges(Edges):
    """As `Edges`, for a mesh with `same_run`: arrays are whole, cut along their batch, or where weights are kept."""

    same_run = True

    def __init__(
        self,
        cut: Cut,
        mesh: Mesh,
        given: Mapping[Value, MeshSharding | NamedSharding],
        batch: Container[Value],
        wanted: Mapping[Value, MeshSharding | NamedSharding],
    ) -> None:
        self.whole = mesh.whole.named
        self.cut = cut
        self._mesh = mesh
        self._gathers = False
        self._of_batch: set[Value] = set()
        self._shardings = {value: named(sharding) for value, sharding in (*given.items(), *wanted.items())}
        # The dimension along which a value is cut into logical shards.
        self._dims = {v: 0 for v in given if v in batch and self._shardings[v].spec == self._along(0).spec}
        self._functions: dict[int, logical_shards.CutFunction] = {}

    def _along(self, dim: int) -> NamedSharding:
        """The sharding of what is cut along `dim`."""
        return NamedSharding(self.whole.mesh, PartitionSpec(*(None,) * dim, self._mesh.data))

    def divided(
        self,
        segment: Segment,
        run: Callable[..., tuple[Any, ...]],
        inputs: Sequence[Value | int],
        outputs: Sequence[Value],
    ) -> Callable[..., tuple[Any, ...]]:
        """`run` by logical shards."""
        assert self._mesh.same_run is not None
        lines = [str(call.node.source) if call.node is not None else "" for call in segment.calls]
        with x64():
            closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((2,), np.uint32), *map(_shape, inputs))
        dims = [self._dims.get(value) if isinstance(value, Value) else None for value in inputs]
        function = logical_shards.cut(closed, [None, *dims], self._mesh.same_run, lines)
        out_dims = [function.dims.get(number) for number in function.outputs]
        self._dims.update((value, dim) for value, dim in zip(outputs, out_dims, strict=True) if dim is not None)
        ins = [(), *map(self._kept, inputs, dims)]
        outs = list(map(self._kept, outputs, out_dims))
        axes = self._mesh.axes
        function = logical_shards.place(function, ins, outs, axes)

        def local(seed: Any, *operands: Any) -> tuple[Any, ...]:
            more = (seed[1] >> 31).astype(np.int32)  # 0: no run takes so many steps
            return tuple(logical_shards.run(function, (seed, *operands), ins, outs, axes, more))

        return jax.shard_map(
            local,
            mesh=self.whole.mesh,
            in_specs=tuple(map(self._partition, (None, *dims), ins)),
            out_specs=tuple(map(self._partition, out_dims, outs)),
            check_vma=False,
        )

    def _kept(self, value: Value | int, dim: int | None) -> Spec:
        """How a value is sharded that is not cut."""
        return () if dim is not None or isinstance(value, int) else self.placed(value).spec

    def _partition(self, dim: int | None, spec: Spec) -> PartitionSpec:
        return PartitionSpec(*(names or None for names in spec)) if dim is None else self._along(dim).spec

    def described(self, segment: Segment) -> tuple[Any, ...]:
        return "same run", self._mesh.same_run, *super().described(segment)


def _shape(value: Value | int) -> jax.ShapeDtypeStruct:
    if isinstance(value, int):
        return jax.ShapeDtypeStruct((), np.uint32)
    return jax.ShapeDtypeStruct(tuple(value.shape), to_jax(value.dtype))
