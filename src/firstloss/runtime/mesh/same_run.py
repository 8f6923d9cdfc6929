"""Steps that are the same run on any mesh: computed by logical shards, not as XLA's partitioner divides them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...lower import logical_shards, shard_passes
from ...lower.dtypes import to_jax
from ...lower.logical_shards import Cost, CutFunction
from ...lower.segments import Cut, Segment
from ...lower.sharding import Spec
from ...program.graph import Value
from ..jax_support import x64
from .mesh import Mesh, MeshSharding, named
from .segment_shardings import Compute, Edges


class SameRunEdges(Edges):
    """Those of a mesh with `same_run`: values are cut along the batch, or are where they are kept.

    Attributes:
        costs: of the segments that have been divided, by their function numbers.
    """

    same_run = True

    def __init__(
        self,
        cut: Cut,
        mesh: Mesh,
        given: Mapping[Value, MeshSharding | NamedSharding],
        batch: Container[Value],
        wanted: Mapping[Value, MeshSharding | NamedSharding],
    ) -> None:
        super().__init__(cut, mesh, {value: named(sharding) for value, sharding in (*given.items(), *wanted.items())})
        self.costs: dict[int, Cost] = {}
        self._divided: dict[int, Compute] = {}
        self._mesh = mesh
        self._dims = {v: 0 for v in given if v in batch and is_cut(self._shardings[v], mesh)}

    def divided(
        self, segment: Segment, run: Compute, inputs: Sequence[Value | int], outputs: Sequence[Value]
    ) -> Compute:
        if (known := self._divided.get(segment.function)) is not None:
            return known
        dims = [self._dims.get(value) if isinstance(value, Value) else None for value in inputs]
        lines = [str(call.node.source) if call.node is not None else "" for call in segment.calls]
        function = cut_step(run, list(map(_shape, inputs)), dims, self._mesh, lines)
        out_dims = [function.dims[number].dim if number in function.dims else None for number in function.outputs]
        for value, dim in zip(outputs, out_dims, strict=True):
            if dim is not None:
                self._dims[value] = dim
                self._shardings.setdefault(value, _along(dim, self._mesh))
        ins = [(), *(() if dim is not None else self._kept(value) for value, dim in zip(inputs, dims, strict=True))]
        outs = [() if dim is not None else self._kept(value) for value, dim in zip(outputs, out_dims, strict=True)]
        placed = logical_shards.place(function, ins, outs, self._mesh.axes)
        self.costs[segment.function] = logical_shards.cost(placed, ins, self._mesh.axes)
        computed = self._divided[segment.function] = divided(placed, ins, outs, self._mesh)
        return computed

    def _kept(self, value: Value | int) -> Spec:
        return () if isinstance(value, int) else self.placed(value).spec

    def described(self, segment: Segment) -> tuple[Any, ...]:
        return "same run", self._mesh.same_run, *super().described(segment)


def is_cut(sharding: NamedSharding, mesh: Mesh) -> bool:
    """Whether a batch is sharded so that it is cut into logical shards."""
    return sharding.spec == _along(0, mesh).spec


def _along(dim: int, mesh: Mesh) -> NamedSharding:
    """The sharding of what is cut along `dim`."""
    return NamedSharding(mesh.devices, PartitionSpec(*(None,) * dim, mesh.data))


def cut_step(
    run: Compute, shapes: Sequence[jax.ShapeDtypeStruct], dims: Sequence[int | None], mesh: Mesh, lines: Sequence[str]
) -> CutFunction:
    """`run`, cut into the logical shards of a mesh with `same_run`.

    Args:
        shapes: of its arrays.
        dims: along which these are cut; None: whole.
        lines: as for `logical_shards.cut`.
    """
    assert mesh.same_run is not None
    with x64():
        closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((2,), np.uint32), *shapes)
    return logical_shards.cut(closed, [None, *dims], mesh.same_run, lines)


def divided(function: CutFunction, inputs: Sequence[Spec], outputs: Sequence[Spec], mesh: Mesh) -> Compute:
    """A cut and placed function of a seed and arrays, computed by all devices of a mesh.

    Args:
        inputs, outputs: how the seed and its arrays, and its results, are sharded; `()` if they are whole or cut.
    """

    def local(seed: Any, *operands: Any) -> tuple[Any, ...]:
        more = (seed[1] >> 31).astype(np.int32)  # 0: no run takes so many steps
        return tuple(shard_passes.run(function, (seed, *operands), inputs, outputs, mesh.axes, more))

    def partition(value: int, spec: Spec) -> PartitionSpec:
        along = function.dims.get(value)
        return PartitionSpec(*(names or None for names in spec)) if along is None else _along(along.dim, mesh).spec

    return jax.shard_map(
        local,
        mesh=mesh.devices,
        in_specs=tuple(map(partition, function.inputs, inputs)),
        out_specs=tuple(map(partition, function.outputs, outputs)),
        check_vma=False,
    )


def _shape(value: Value | int) -> jax.ShapeDtypeStruct:
    if isinstance(value, int):
        return jax.ShapeDtypeStruct((), np.uint32)
    return jax.ShapeDtypeStruct(tuple(value.shape), to_jax(value.dtype))
