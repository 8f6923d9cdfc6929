"""Shards computed by PyTorch's kernels directly in the memory of JAX's CPU devices.

Elements that are adjacent in the stream are drawn together, even for different devices: rows are drawn once, and each
device's columns are copied from blocks of rows. For devices other than CPUs, shards are computed on the host and sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import torch
from jax.sharding import Sharding

from ...compat.torch_names import DisableTorchDispatch
from ...engine.cpu_engine import WantedPart, materialize_parts
from ...engine.splits import Box
from ...lower.dtypes import constant, to_jax
from ...program.graph import Ref
from .shard_memory import ArraySpec, allocate, tensor_at

K = TypeVar("K")


def materialize_on_host(wanted: Mapping[K, tuple[Ref, Sharding]], niceness: Sequence[int] = ()) -> dict[K, jax.Array]:
    """Compute Refs as sharded arrays.

    Args:
        wanted: a Ref and a sharding by key.
        niceness: as in `cpu_engine.materialize_parts`.

    Returns:
        The arrays by key.
    """
    out: dict[K, jax.Array] = {}
    sent: list[tuple[K, dict[Any, torch.Tensor]]] = []
    parts: list[tuple[Ref, list[WantedPart]]] = []
    on_cpu = [key for key, (_, sharding) in wanted.items() if _is_on_cpu(sharding)]
    specs = [ArraySpec(ref.size, to_jax(ref.dtype), sharding) for ref, sharding in map(wanted.__getitem__, on_cpu)]
    allocated = dict(zip(on_cpu, allocate(specs), strict=True))
    out.update((key, array) for key, (array, _) in allocated.items())
    with DisableTorchDispatch():
        for key, (ref, sharding) in wanted.items():
            shape, dtype = ref.size, ref.dtype
            if key in allocated:
                local = sharding.shard_shape(shape)
                array, addresses = allocated[key]
                memory = {device: tensor_at(at, local, dtype, array) for device, at in addresses.items()}
            else:
                boxes = sharding.addressable_devices_indices_map(shape)
                memory = {device: torch.empty(_box(shape, i).size, dtype=dtype) for device, i in boxes.items()}
                sent.append((key, memory))
            parts.append((ref, _parts(shape, sharding, memory)))
    materialize_parts(parts, niceness)
    for key, memory in sent:
        ref, sharding = wanted[key]
        arrays = [jax.device_put(constant(tensor), device) for device, tensor in memory.items()]
        out[key] = jax.make_array_from_single_device_arrays(ref.size, sharding, arrays)
    return out


def _is_on_cpu(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _box(shape: tuple[int, ...], index: tuple[slice, ...]) -> Box:
    ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(r[0] for r in ranges), tuple(r[1] - r[0] for r in ranges))


def _parts(shape: tuple[int, ...], sharding: Sharding, memory: dict[Any, torch.Tensor]) -> list[WantedPart]:
    parts_by_box: dict[Box, WantedPart] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = _box(shape, index or ())
        parts_by_box.setdefault(box, WantedPart(box, [])).into.append(memory[device])
    return list(parts_by_box.values())
