"""Combined all-gathers of a segment's weights: one collective for many, rather than a rendezvous for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ...lower.gathers import Gather, Gathers
from ...lower.program import run_calls
from ...lower.sharding import Spec
from ...program.graph import Value

# The most bytes of unsharded weights gathered together. Larger ones take longer to transfer than a rendezvous of the
# devices takes, and all of them stay in memory until the last is used.
_MAX_GROUP_BYTES = 1 << 20


def run_gathered(
    gathers: Gathers, arrays: dict[Value, Any], key_of: Callable[[int], jax.Array], mesh: jax.sharding.Mesh
) -> None:
    """Like `run_calls`, for the calls of a segment, with its weights gathered in groups."""
    run_calls(gathers.before, arrays, key_of)
    whole: dict[Value, Any] = {}
    for group in _groups(gathers.gathers):
        if len(group) > 1:
            gathered = _gathered([arrays[gather.value] for gather in group], group, mesh)
            whole.update(zip((gather.value for gather in group), gathered, strict=True))
    for call, values in gathers.after:
        values = values & whole.keys()
        if values:
            operands = {value: arrays[value] for value in call.inputs if value in arrays}
            operands |= {value: whole[value] for value in values}
            run_calls([call], operands, key_of)
            arrays.update((value, operands[value]) for value in call.outputs)
        else:
            run_calls([call], arrays, key_of)


def _groups(gathers: Iterable[Gather]) -> Iterator[list[Gather]]:
    """Group gathers of the same dtype over the same axes."""
    open_groups: dict[Any, list[Gather]] = {}
    for gather in gathers:
        kind = gather.axes, gather.value.dtype
        group = open_groups.setdefault(kind, [])
        if group and sum(other.value.nbytes for other in group) + gather.value.nbytes > _MAX_GROUP_BYTES:
            yield open_groups.pop(kind)
            group = open_groups[kind] = []
        group.append(gather)
    yield from open_groups.values()


def _gathered(arrays: Sequence[Any], gathers: Sequence[Gather], mesh: jax.sharding.Mesh) -> Sequence[Any]:
    axes = gathers[0].axes
    count = math.prod(mesh.shape[axis] for axis in axes)
    before = tuple(_partitions(gather.spec) for gather in gathers)
    after = tuple(_partitions((*g.spec[: g.dim], (), *g.spec[g.dim + 1 :])) for g in gathers)

    def gather_parts(*parts: Any) -> tuple[Any, ...]:
        rows = lax.all_gather(lax.concatenate([part.reshape(-1) for part in parts], 0), axes)
        out, begin = [], 0
        for part, gather in zip(parts, gathers, strict=True):
            own = lax.slice_in_dim(rows, begin, begin + part.size, axis=1).reshape(count, *part.shape)
            begin += part.size
            out.append(lax.reshape(_shards_before(own, gather.dim), _full_shape(part.shape, gather.dim, count)))
        return tuple(out)

    return jax.shard_map(gather_parts, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)(*arrays)


def _shards_before(rows: Any, dim: int) -> Any:
    """`rows` with its first dimension, which counts the shards, moved in front of `dim`."""
    return lax.transpose(rows, (*range(1, dim + 1), 0, *range(dim + 1, rows.ndim)))


def _full_shape(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return (*shape[:dim], count * shape[dim], *shape[dim + 1 :])


def _partitions(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))
