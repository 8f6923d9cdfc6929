"""Philox4x32-10: a bijection from a 128-bit counter and a 64-bit key to four random 32-bit words.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). It is stateless: any block of
the stream can be computed at the same cost, as GPUs (`cuda_layout`) and sharded weights (`counter`) require.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Words: TypeAlias = "NDArray[np.uint32]"

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round: the golden ratio, and sqrt(3) - 1
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def words(key: int, low: ArrayLike, high: ArrayLike) -> Words:
    """The four words of each counter: uint32, shape (..., 4).

    key: 64 bits, cuRAND's seed.
    low, high: the counter's 64-bit halves, integers or arrays of them that broadcast to shape (...).
    """
    low, high = np.broadcast_arrays(np.asarray(low, np.uint64), np.asarray(high, np.uint64))
    # 32-bit words in 64-bit integers, for the products.
    x0, x1, x2, x3 = low & _LOW, low >> _HALF, high & _LOW, high >> _HALF
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p, q = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (q >> _HALF) ^ x1 ^ np.uint64(k0), q & _LOW, (p >> _HALF) ^ x3 ^ np.uint64(k1), p & _LOW
        k0, k1 = k0 + _WEYL[0] & 0xFFFFFFFF, k1 + _WEYL[1] & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)
