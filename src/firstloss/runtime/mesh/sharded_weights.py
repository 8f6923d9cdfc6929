"""Initialization of weights on a mesh: each device computes only its own shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import torch
from jax.sharding import NamedSharding
from torch.ops import aten

from ...capture.recorder import new_index
from ...compat.torch_names import DisableTorchDispatch
from ...engine.cpu_engine import materialize_values
from ...engine.plan import RangePlanner
from ...init.stablehlo.host_shards import materialize_on_host
from ...init.stablehlo.shard_memory import ArraySpec, tensor_at
from ...init.stablehlo.shard_memory import allocate as allocate_shards
from ...lower import unwritten
from ...lower.dtypes import constant, to_jax
from ...program.graph import FileValue, Node, Ref, Value, contiguous_stride, is_contiguous
from ...program.source import UNKNOWN
from ..jax_support import on_cpu, x64
from .mesh import MeshSharding, named

# Bytes of weights made at a time, if they are made unsharded or in host memory first.
_CHUNK = 256 << 20


class ArrayBox(NamedTuple):
    """A part of an array."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]


def boxes(shape: tuple[int, ...], sharding: NamedSharding) -> dict[ArrayBox, list[jax.Device]]:
    """The distinct shards of an array of `shape`, each with the devices that hold it, ordered by device id."""
    devices_by_box: dict[ArrayBox, list[jax.Device]] = {}
    indices = sharding.devices_indices_map(shape)
    for device in sorted(indices, key=lambda device: device.id):
        ends = [index.indices(size)[:2] for index, size in zip(indices[device], shape, strict=True)]
        box = ArrayBox(tuple(b for b, _ in ends), tuple(e - b for b, e in ends))
        devices_by_box.setdefault(box, []).append(device)
    return devices_by_box


class WeightShard(NamedTuple):
    """A shard of `value` on devices of this process; `part` is a Value with a recipe that makes only it."""

    value: Value
    part: Value
    box: ArrayBox
    devices: list[jax.Device]


def materialize(
    shardings: Mapping[Value, MeshSharding | NamedSharding], niceness: Sequence[int] = ()
) -> dict[Value, jax.Array]:
    """Run the recipes of the shards on devices of this process; `niceness` as in `engine.run.run`."""
    wanted = {value: named(sharding) for value, sharding in shardings.items()}
    planner = RangePlanner()
    drawn = {
        value: sharding for value, sharding in wanted.items() if _is_sequential(value) and planner.can_run(value, True)
    }
    out: dict[Value, jax.Array] = {}
    # On CPU devices all at once, directly in their memory.
    for values in [list(drawn)] if drawn and on_cpu() else _chunks(drawn):
        with x64():
            refs = {v: (Ref.of(v), drawn[v]) for v in values}
            out |= materialize_on_host(refs, niceness)
    for chunk in _chunks({value: sharding for value, sharding in wanted.items() if value not in drawn}):
        shards = [shard for value in chunk for shard in _shards(value, wanted[value])]
        memory = _Memory(shards, {value: wanted[value] for value in chunk})
        known = [shard for shard in shards if shard.value.known]
        computed = [shard for shard in shards if not shard.value.known]
        for shard in known:
            memory.store(shard, _read(shard))
        with DisableTorchDispatch():
            parts = materialize_values([shard.part for shard in computed], allocate=memory.allocate, niceness=niceness)
        for shard in computed:
            memory.store(shard, parts[shard.part])
        out |= memory.arrays()
    return out


class WholeArrays:
    """Arrays on this machine's CPU devices for weights that were drawn unsharded; allocated in one call."""

    def __init__(self, shardings: Mapping[Value, MeshSharding]) -> None:
        kinds = [ArraySpec(tuple(v.shape), to_jax(v.dtype), sharding.named) for v, sharding in shardings.items()]
        with x64():
            self._made = dict(zip(shardings, allocate_shards(kinds), strict=True))

    def array(self, value: Value, content: torch.Tensor) -> jax.Array:
        """Fill the array of `value` with `content` and return it. May be called again until `forget`."""
        array, addresses = self._made[value]
        local = array.sharding.shard_shape(array.shape)
        with DisableTorchDispatch():
            for device, index in array.sharding.devices_indices_map(array.shape).items():
                tensor_at(addresses[device], local, value.dtype, array).copy_(content[index])
        return array

    def forget(self, value: Value) -> None:
        """Release the array of `value`: it has another owner."""
        self._made.pop(value, None)


def _is_sequential(value: Value) -> bool:
    """Whether a recipe's elements are drawn in memory order, so that any part may be drawn alone."""
    return not value.known and is_contiguous(value.shape, value.stride)


def _chunks(values: Mapping[Value, NamedSharding]) -> Iterator[list[Value]]:
    chunk: list[Value] = []
    for value in values:
        if chunk and sum(v.nbytes for v in chunk) + value.nbytes > _CHUNK:
            yield chunk
            chunk = []
        chunk.append(value)
    if chunk:
        yield chunk


def _shards(value: Value, sharding: NamedSharding) -> list[WeightShard]:
    addressable = sharding.addressable_devices
    out = []
    for box, devices in boxes(tuple(value.shape), sharding).items():
        local = [device for device in devices if device in addressable]
        if local:
            out.append(WeightShard(value, _part(value, box), box, local))
    return out


def _part(value: Value, box: ArrayBox) -> Value:
    """A Value that copies `box` out of `value`."""
    if box.shape == value.shape and is_contiguous(value.shape, value.stride):
        return value
    ref = Ref(value, box.shape, value.stride, _offset(value, box), value.dtype)
    node = Node(
        new_index(), aten.clone.default, (ref,), {"memory_format": torch.contiguous_format}, (), False, None, UNKNOWN
    )
    part = Value(box.shape, contiguous_stride(box.shape), value.dtype, value.device, node)
    node.outputs = (part,)
    return part


def _offset(value: Value, box: ArrayBox) -> int:
    return sum(b * s for b, s in zip(box.begin, value.stride, strict=True))


def _read(shard: WeightShard) -> torch.Tensor:
    """The shard of a Value that is known."""
    if isinstance(shard.value, FileValue):
        return shard.value.box(*shard.box)
    real = shard.value.real
    assert real is not None
    ref = Ref(shard.value, shard.box.shape, shard.value.stride, _offset(shard.value, shard.box), shard.value.dtype)
    return ref.view(real)


class _Memory:
    """Where shards are made: on a CPU in the devices' own memory, elsewhere on the host first."""

    def __init__(self, shards: list[WeightShard], shardings: dict[Value, NamedSharding]) -> None:
        self._shardings = shardings
        self._arrays: dict[Value, jax.Array] = {}
        self._views: dict[tuple[Value, jax.Device], torch.Tensor] = {}
        self._first: dict[Value, torch.Tensor] = {}
        self._parts: dict[Value, list[jax.Array]] = {}
        if not on_cpu():
            return
        for shard in shards:
            if shard.value not in self._arrays:
                self._arrays[shard.value] = self._empty(shard.value)
            self._first[shard.part] = self._views[shard.value, shard.devices[0]]

    def _empty(self, value: Value) -> jax.Array:
        shape, dtype = tuple(value.shape), to_jax(value.dtype)
        array = unwritten.array_on(self._shardings[value], shape, dtype)
        for shard in array.addressable_shards:
            self._views[value, shard.device] = unwritten.memory_of(shard.data, value.dtype)
        return array

    def allocate(self, part: Value) -> torch.Tensor:
        """Memory for a shard, or for an intermediate value."""
        memory = self._first.get(part)
        return part.empty() if memory is None or not part.numel else memory

    def store(self, shard: WeightShard, content: torch.Tensor) -> None:
        """Copy a shard that has been made to all devices that hold it."""
        if shard.value in self._arrays:
            for device in shard.devices:
                memory = self._views[shard.value, device]
                if memory.data_ptr() != content.data_ptr():
                    memory.copy_(content)
            return
        host = constant(content)
        with x64():
            self._parts.setdefault(shard.value, []).extend(jax.device_put(host, device) for device in shard.devices)

    def arrays(self) -> dict[Value, jax.Array]:
        """The arrays, once all their shards have been stored."""
        with x64():
            for value, parts in self._parts.items():
                shape, sharding = tuple(value.shape), self._shardings[value]
                self._arrays[value] = jax.make_array_from_single_device_arrays(shape, sharding, parts)
        return self._arrays
