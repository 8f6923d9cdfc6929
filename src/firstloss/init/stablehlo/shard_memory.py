"""Uninitialized memory for all shards of a model, owned by CPU devices and allocated in one call.

Memory that XLA allocates can be donated to a training step; external memory cannot. Weights of the same kind are
allocated by one executable, and huge pages are requested for memory that has not been touched yet.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, Sharding

from ...engine.huge_pages import advise_huge
from ...lower.unwritten import registered_with_xla
from ...lower.unwritten import results as unwritten_results
from ...workers import Workers


class ArraySpec(NamedTuple):
    """The shape, dtype and sharding of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding


def allocate(specs: Sequence[ArraySpec]) -> list[tuple[jax.Array, dict[jax.Device, int]]]:
    """Allocate uninitialized arrays, on CPU devices of one mesh or on one CPU device.

    Returns:
        Each array, with the address of its shard on each device. The memory may be written until the array is used.
    """
    counts = Counter(specs)
    times = rounds(list(counts.values()))
    calls = [(times, tuple(spec for spec, count in counts.items() for _ in range(count // times)))]
    calls += [(1, tuple(spec for spec, count in counts.items() for _ in range(count % times)))]
    calls = [call for call in calls if call[1]]
    registered_with_xla()  # not concurrently
    with Workers(2, "firstloss-compile") as workers:
        allocators = workers.map(_allocator, [results for _, results in calls])
    arrays_by_spec: dict[ArraySpec, list[jax.Array]] = {}
    for (repeats, results), allocator in zip(calls, allocators, strict=True):
        for _ in range(repeats):
            for spec, array in zip(results, allocator(), strict=True):
                arrays_by_spec.setdefault(spec, []).append(array)
    arrays = [arrays_by_spec[spec].pop() for spec in specs]
    jax.block_until_ready(arrays)
    out = []
    ranges = []
    for array in arrays:
        parts = {part.device: part.data.unsafe_buffer_pointer() for part in array.addressable_shards}
        nbytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        ranges += [(address, nbytes) for address in parts.values() if nbytes]
        out.append((array, parts))
    advise_huge(ranges)
    return out


def rounds(counts: Sequence[int]) -> int:
    """The number of rounds in which to allocate the arrays, so that executables have few results.

    Compile time is quadratic in the number of results: a model of 22 layers is allocated in 22 rounds, and the rest by
    a second executable.
    """
    return min(
        range(1, max(counts, default=1) + 1),
        key=lambda n: sum(c // n for c in counts) ** 2 + sum(c % n for c in counts) ** 2,
    )


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, owner: Any) -> torch.Tensor:
    """A tensor on memory at `address`, which belongs to `owner`: it is kept as long as there is such a tensor.

    If the caller is interrupted, threads may still be writing to the memory.
    """
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory: Any = (ctypes.c_char * count).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@lru_cache(maxsize=64)
def _allocator(specs: tuple[ArraySpec, ...]) -> Any:
    """An executable that returns uninitialized arrays, all on one mesh or one device."""
    sharding = specs[0].sharding
    with jax.enable_x64(True):
        local = [(spec.sharding.shard_shape(spec.shape), spec.dtype) for spec in specs]

        def make() -> tuple[Any, ...]:
            return tuple(unwritten_results(local))

        if not isinstance(sharding, NamedSharding):
            return jax.jit(make, out_shardings=sharding).lower().compile()
        out_specs = tuple(spec.sharding.spec for spec in specs)
        mapped = jax.shard_map(make, mesh=sharding.mesh, in_specs=(), out_specs=out_specs, check_vma=False)
        return jax.jit(mapped).lower().compile()
