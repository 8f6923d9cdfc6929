"""Shards of fills under the counter policy, where each element is a function of its index (`rng/counter.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ...lower.dtypes import cast, to_jax
from ...lower.unfused import unfused
from ...rng import counter
from .fill import ShardGeometry, flat_indices


def part_of_draw(
    kind: str, first: float, second: float, dtype: Any, box: ShardGeometry, seed: Any, draw: Any, starts: Sequence[Any]
) -> Any:
    """The shard of a uniform or normal draw: an array of shape `box.local`.

    Args:
        first, second: low and high, or mean and standard deviation.
        seed, draw: uint64 and int64 numbers; see `rng.counter`.
        starts: int64, the shard's offset in each dimension.
    """
    narrow = to_jax(dtype)
    halves = [(_low(x), _high(x)) for x in (seed, draw)]
    # Four consecutive elements share a block of words.
    last = len(box.shape) - 1
    grouped = bool(box.shape) and box.local[last] % 4 == 0 and box.shape[last] % 4 == 0
    if grouped:
        blocks = ShardGeometry((*box.shape[:last], box.shape[last] // 4), (*box.local[:last], box.local[last] // 4))
        begin = [*starts[:last], starts[last] // np.int64(4)]
        block = flat_indices(blocks, begin)
    else:
        index = flat_indices(box, starts)
        block = index >> np.int64(2)
    words = counter.philox32(jnp, halves[0], (_low(block), _high(block)), halves[1])
    # Barriers keep XLA from recomputing a block for each of its elements.
    words = lax.optimization_barrier(tuple(words))
    if kind == "uniform":
        low, end = np.float32(first), np.float32(second)
        scaled = [unfused(counter.unit(jnp, word) * (end - low)) for word in words]
        values = [jnp.where(x + low == end, low, x + low) for x in scaled]
    else:
        pairs = [lax.optimization_barrier(counter.pair(jnp, words[i], words[i + 1])) for i in (0, 2)]
        scaled = [unfused(x * np.float32(second)) for pair in pairs for x in pair]
        values = [x + np.float32(first) for x in scaled]
    if grouped:
        out = jnp.stack(values, -1).reshape(box.local)
    else:
        lane = index & np.int64(3)
        out = jnp.where(lane == 0, values[0], jnp.where(lane == 1, values[1], values[2]))
        out = jnp.where(lane == 3, values[3], out)
    out = cast(out, narrow)
    if kind == "uniform" and narrow != np.float32:  # rounded up to the excluded end
        out = jnp.where(out == np.float32(second).astype(narrow), np.float32(first).astype(narrow), out)
    return out


def _low(x: Any) -> Any:
    return (x & np.asarray(0xFFFFFFFF, x.dtype)).astype(np.uint32)


def _high(x: Any) -> Any:
    return (x >> np.asarray(32, x.dtype)).astype(np.uint32)
