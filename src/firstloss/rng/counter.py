"""The counter policy: random numbers that depend on (seed, key, index) and on nothing else.

A weight that is filled by its key (a number of its own) is the same whatever is made before it, on any mesh, and any
slice of it costs what its length costs. It is another stream than eager PyTorch's.

Elements 4b to 4b+3 come from the four words of Philox4x32-10 with key `seed` and counter (b, key): words w give
uniforms (w >> 8) 2^-24, and pairs of words give pairs of normals by Box-Muller, the cosine first. Uniforms are exact in
float32, so every engine makes the same; normals are computed in double and rounded, and an engine that computes in
float32 may differ by its math library's error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from firstloss.rng import philox

Float32: TypeAlias = NDArray[np.float32]

_CHUNK = 1 << 14  # Philox blocks at a time: their intermediate words stay in the cache
_UNIT = 2.0**-24


def uniform(seed: int, key: int, start: int, count: int) -> Float32:
    """Elements `start` to `start + count` of the weight's uniforms: float32 in [0, 1), shape (count,)."""
    return _slice(_uniforms, seed, key, start, count)


def normal(seed: int, key: int, start: int, count: int) -> Float32:
    """Elements `start` to `start + count` of the weight's standard normals: float32, shape (count,)."""
    return _slice(_normals, seed, key, start, count)


def _uniforms(words: philox.Words) -> Float32:
    return (words >> np.uint32(8)) * np.float32(_UNIT)


def _normals(words: philox.Words) -> Float32:
    bits = words >> np.uint32(8)
    radius = np.sqrt(-2.0 * np.log((bits[:, 0::2] + 1) * _UNIT))  # of (0, 1]: never the logarithm of zero
    angle = bits[:, 1::2] * (2.0 * np.pi * _UNIT)
    normals = np.empty(bits.shape, np.float32)
    normals[:, 0::2] = radius * np.cos(angle)
    normals[:, 1::2] = radius * np.sin(angle)
    return normals


def _slice(make: Callable[[philox.Words], Float32], seed: int, key: int, start: int, count: int) -> Float32:
    if start < 0 or count < 0:
        raise ValueError(f"no slice begins at {start} and has {count} elements")
    out = np.empty(count, np.float32)
    done = 0
    while done < count:
        block, skip = divmod(start + done, 4)
        blocks = min(_CHUNK, -(-(skip + count - done) // 4))
        made = make(philox.words(seed, np.arange(block, block + blocks, dtype=np.uint64), key))
        part = made.reshape(-1)[skip : skip + count - done]
        out[done : done + len(part)] = part
        done += len(part)
    return out
