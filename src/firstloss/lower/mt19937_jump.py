"""Windows of PyTorch's CPU stream at any position, computed on the device.

`rng/jump.py` explains how t^n is applied to a window: the bits of a polynomial in base Y = t^623 + t^396 select which
words of w, Yw, Y²w... to sum. Here the polynomials are those of n = 2^k, so a 64-bit position is reached by one
application for each of its set bits. A module that holds this table of 2.6 KB per bit needs nothing else to draw any
weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from numpy.typing import NDArray

from ..rng.jump import power
from ..rng.mt19937 import MATRIX, M, N, Words
from .mt19937 import following, twist, u32

_DIGIT = N - 1  # bits of a polynomial's digit
_DIGITS = 33
_LANES_OF_BITS = 20  # 32-bit words per digit
_REACH = _DIGIT + N - 1  # words of Y^k w that a digit uses
_BACK = 32  # Y^k w needs k words before w
# Terms summed per iteration: enough to amortize the loop, few enough to keep the text short.
_TERMS = 24


@lru_cache(maxsize=8)
def table(bits: int) -> Words:
    """t^(2^k) for k below `bits`, each as 33 digits of 623 bits, lowest first: uint32, shape (bits, 33, 20)."""
    out = np.zeros((bits, _DIGITS, _LANES_OF_BITS), np.uint32)
    mask = (1 << _DIGIT) - 1
    for k in range(bits):
        residue = power(1 << k)
        for digit in range(_DIGITS):
            packed = (residue >> _DIGIT * digit & mask).to_bytes(4 * _LANES_OF_BITS, "little")
            out[k, digit] = np.frombuffer(packed, "<u4")
    return out


def rewind(window: Words, count: int) -> Words:
    """The window `count` words earlier, on the host. `window` must be on the sequence (`mt19937.consistent`)."""
    words = np.concatenate([np.zeros(count, np.uint32), window])
    for i in range(count - 1, -1, -1):
        # word i gets its top bit from the word 624 later, and its low bits from the one before that
        upper = _untwist(int(words[i + N]) ^ int(words[i + M]))
        lower = _untwist(int(words[i + N - 1]) ^ int(words[i + M - 1]))
        words[i] = (upper & 0x80000000) | (lower & 0x7FFFFFFF)
    return words[:N]


def _untwist(twisted: int) -> int:
    """The top bit of the first argument of `twist`, and the low 31 bits of the second."""
    fell_out = twisted >> 31
    return (((twisted ^ (MATRIX if fell_out else 0)) << 1) | fell_out) & 0xFFFFFFFF


def _earlier(windows: Any, count: int) -> Any:
    """The `count` < 397 words before each window: `rewind` as a vector operation."""
    twisted = windows[:, N - count - 1 :] ^ windows[:, M - count - 1 : M]
    fell_out = twisted >> u32(31)
    mixed = ((twisted ^ (fell_out * u32(MATRIX))) << u32(1)) | fell_out
    return (mixed[:, 1:] & u32(0x80000000)) | (mixed[:, :-1] & u32(0x7FFFFFFF))


def _jump(windows: Any, polynomial: Any) -> Any:
    """Jump each window ahead by `polynomial`, uint32 of shape (33, 20)."""
    lanes = windows.shape[0]
    second = following(windows)
    words = lax.concatenate([_earlier(windows, _BACK), windows, second], 1)[:, : _BACK + _REACH]
    bits = (polynomial[:, :, None] >> jnp.arange(32, dtype=np.uint32)) & u32(1)
    masks = (u32(0) - bits.reshape(_DIGITS, -1))[:, :N]  # bit 623 is zero

    def digit(k: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        words, total = carry
        mask = lax.dynamic_index_in_dim(masks, k, 0, keepdims=False)
        padded = lax.pad(words[:, _BACK:], u32(0), [(0, 0, 0), (0, _TERMS, 0)])

        def terms(i: Any, total: Any) -> Any:
            begin = i * np.int32(_TERMS)
            chunk = lax.dynamic_slice(padded, (np.int32(0), begin), (lanes, N + _TERMS))
            chosen = lax.dynamic_slice(mask, (begin,), (_TERMS,))
            for j in range(_TERMS):
                total = total ^ (chunk[:, j : j + N] & chosen[j])
            return total

        total = lax.fori_loop(np.int32(0), np.int32(N // _TERMS), terms, total)
        # Y^(k+1) w, aligned at the right like Y^k w; one word at the left is lost.
        moved = lax.pad(twist(words[:, :-1], words[:, 1:]), u32(0), [(0, 0, 0), (1, 0, 0)])
        return moved, total

    start = (words, lax.full((lanes, N), 0, np.uint32))
    return lax.fori_loop(np.int32(0), np.int32(_DIGITS), digit, start)[1]


@jax.jit
def windows(origin: Any, position: Any, table: Any) -> Any:
    """The window whose next word is `position` words after that of `origin`: uint32, shape (624,).

    `origin` is uint32 of shape (624,), `position` an int64 below 2^bits of the table.
    """

    def bit(k: Any, window: Any) -> Any:
        return lax.cond(
            (position >> k.astype(np.int64)) & np.int64(1) == 1,
            lambda w: _jump(w, lax.dynamic_index_in_dim(table, k, 0, keepdims=False)),
            lambda w: w,
            window,
        )

    return lax.fori_loop(np.int32(0), np.int32(table.shape[0]), bit, origin[None])[0]


def spread(window: Any, count: int, log2: int, table: Any) -> Any:
    """`count` windows, starting with `window`, each 2^log2 words after the previous one: shape (count, 624)."""
    lanes = window[None]
    step = log2
    while lanes.shape[0] < count:
        lanes = lax.concatenate([lanes, _jump(lanes, table[step])], 0)
        step += 1
    return lanes[:count]


def bits_for(position: int) -> int:
    """The number of table bits that a position needs."""
    return max(int(position).bit_length(), 1)


Table = NDArray[np.uint32]
