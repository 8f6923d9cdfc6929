"""Uninitialized memory for all shards of a model, owned by CPU devices and allocated in one call.

Memory that XLA allocates can be donated to a training step; memory that it was lent cannot. Weights alike are allocated
by one executable, and where nobody has touched their pages yet, the system is asked for huge ones.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, Sharding

from ...engine.huge_pages import advise_huge
from ...lower.unwritten import registered_with_xla
from ...lower.unwritten import results as unwritten_results


class ArraySpec(NamedTuple):
    """What an array is to be like, before there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding


def unwritten(kinds: Sequence[ArraySpec]) -> list[tuple[jax.Array, dict[jax.Device, int]]]:
    """Arrays of these kinds, on CPU devices of one mesh or on one CPU device, and where their parts' memory begins.

    Until an array has been given to anybody else, its memory may be written.
    """
    counts = Counter(kinds)
    times = rounds(list(counts.values()))
    calls = [(times, tuple(kind for kind, count in counts.items() for _ in range(count // times)))]
    calls += [(1, tuple(kind for kind, count in counts.items() for _ in range(count % times)))]
    calls = [call for call in calls if call[1]]
    registered_with_xla()  # once, and not by two threads
    with ThreadPoolExecutor(2, thread_name_prefix="firstloss-compile") as pool:
        allocators = list(pool.map(_allocator, [wanted for _, wanted in calls]))
    made: dict[ArraySpec, list[jax.Array]] = {}
    for (repeats, wanted), allocate in zip(calls, allocators, strict=True):
        for _ in range(repeats):
            for kind, array in zip(wanted, allocate(), strict=True):
                made.setdefault(kind, []).append(array)
    arrays = [made[kind].pop() for kind in kinds]
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
    """How often to make some of each kind, so that what is compiled for that, and for the rest, has fewest results.

    To compile an executable takes as long as the square of its results: a model of 22 layers is made in 22 rounds.
    """
    return min(
        range(1, max(counts, default=1) + 1),
        key=lambda n: sum(c // n for c in counts) ** 2 + sum(c % n for c in counts) ** 2,
    )


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the memory there, which it does not own."""
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=dtype).view(shape)


@lru_cache(maxsize=64)
def _allocator(kinds: tuple[ArraySpec, ...]) -> Any:
    """The executable whose results are these arrays, which are all on one mesh or one device."""
    sharding = kinds[0].sharding
    with jax.enable_x64(True):
        local = [(k.sharding.shard_shape(k.shape), k.dtype) for k in kinds]

        def make() -> tuple[Any, ...]:
            return tuple(unwritten_results(local))

        if not isinstance(sharding, NamedSharding):
            return jax.jit(make, out_shardings=sharding).lower().compile()
        specs = tuple(k.sharding.spec for k in kinds)
        whole = jax.shard_map(make, mesh=sharding.mesh, in_specs=(), out_specs=specs, check_vma=False)
        return jax.jit(whole).lower().compile()
