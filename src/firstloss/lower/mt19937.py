"""PyTorch's CPU random words (MT19937), computed on the device in lanes.

A lane is a window of 624 words (`rng/mt19937.py`) and draws the words after it. The next 624 words of a lane take three
steps, because a word depends on the one 227 before it; each step is one vector operation over all lanes. Only integers
are used: the words are PyTorch's on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..rng.mt19937 import MATRIX, M, N

_LAG = N - M  # words that can be computed at once


def u32(number: int) -> np.uint32:
    """A uint32 constant; a bare Python int would be signed."""
    return np.uint32(number)


def twist(first: Any, second: Any) -> Any:
    """Like `rng.mt19937.twist`."""
    mixed = (first & u32(0x80000000)) | (second & u32(0x7FFFFFFF))
    return (mixed >> u32(1)) ^ ((second & u32(1)) * u32(MATRIX))


def following(windows: Any) -> Any:
    """The 624 words after each window: uint32 of shape (lanes, 624), like the argument."""
    a = windows[:, M:] ^ twist(windows[:, :_LAG], windows[:, 1 : _LAG + 1])
    b = a ^ twist(windows[:, _LAG : 2 * _LAG], windows[:, _LAG + 1 : 2 * _LAG + 1])
    rest = N - 1 - 2 * _LAG
    c = b[:, :rest] ^ twist(windows[:, 2 * _LAG : -1], windows[:, 2 * _LAG + 1 :])
    last = b[:, rest : rest + 1] ^ twist(windows[:, -1:], a[:, :1])
    return lax.concatenate([a, b, c, last], 1)


def temper(words: Any) -> Any:
    """Like `rng.mt19937.temper`."""
    y = words ^ (words >> u32(11))
    y = y ^ ((y << u32(7)) & u32(0x9D2C5680))
    y = y ^ ((y << u32(15)) & u32(0xEFC60000))
    return y ^ (y >> u32(18))


def draw(windows: Any, count: int, emit: Callable[[Any], Any], words_each: int = 1, group: int = 1) -> tuple[Any, Any]:
    """Draw `count` elements in each lane, made from `words_each` words each by `emit`.

    Args:
        windows: uint32, shape (lanes, 624).
        emit: converts words, uint32 of shape (lanes, 624), to 624 / words_each elements per lane.
        group: the number of elements that are made together; it divides 624 / words_each.

    Returns:
        The elements, of shape (lanes, count), and the windows after them, if they take whole blocks of 624 words.
    """
    each = N // words_each
    blocks, ragged = divmod(count, each)
    lanes = windows.shape[0]
    kind = emitted(emit)
    block = _block(emit)
    if blocks <= 1:
        parts = []
        for _ in range(blocks):
            windows, values = block(windows)
            parts.append(values)
        if ragged:
            parts.append(block(windows)[1][:, :ragged])
        return (lax.concatenate(parts, 1) if parts else lax.full((lanes, 0), 0, kind)), windows

    left = ragged // group * group

    def step(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        windows, out = carry
        windows, values = block(windows)
        return windows, lax.dynamic_update_slice(out, values, (np.int32(0), i * np.int32(each) + np.int32(left)))

    out = lax.empty((lanes, count), kind)
    # The remainder is drawn first: written after the loop, its result would be copied. Windows may begin anywhere.
    if left:
        after, values = block(windows)
        out = lax.dynamic_update_slice(out, values[:, :left], (np.int32(0), np.int32(0)))
        words = left * words_each
        windows = lax.concatenate([windows[:, words:], after[:, :words]], 1)
    windows, out = lax.fori_loop(np.int32(0), np.int32(blocks), step, (windows, out))
    if ragged > left:
        last = block(windows)[1][:, : ragged - left]
        out = lax.dynamic_update_slice(out, last, (np.int32(0), np.int32(count - ragged + left)))
    return out, windows


@lru_cache(maxsize=256)
def _block(emit: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, Any]]:
    """The next windows and their elements, as a function shared by all fills of a module."""

    def block(windows: Any) -> tuple[Any, Any]:
        windows = following(windows)
        return windows, emit(temper(windows))

    name = getattr(emit, "__name__", "words")
    block.__name__ = block.__qualname__ = f"block_of_{name}".replace("<lambda>", "words")
    return jax.jit(block)


@lru_cache(maxsize=256)
def emitted(emit: Callable[[Any], Any]) -> np.dtype:
    """The dtype of the elements made by `emit`."""
    return jax.eval_shape(emit, jax.ShapeDtypeStruct((1, N), np.uint32)).dtype


def uniform_bits(words: Any) -> Any:
    """The 24 bits of a float32 uniform, as a float32 in [0, 1)."""
    return lax.convert_element_type((words & u32(0xFFFFFF)).astype(np.int32), np.float32) * np.float32(2.0**-24)


def wide(words: Any) -> Any:
    """Pairs of words as 64-bit integers, the first word in the high half: shape (lanes, words / 2)."""
    pairs = jnp.reshape(words, (words.shape[0], -1, 2)).astype(np.uint64)
    return (pairs[:, :, 0] << np.uint64(32)) | pairs[:, :, 1]
