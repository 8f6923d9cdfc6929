"""The Mersenne Twister, and the state of PyTorch's CPU generator.

MT19937 (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998) is a recurrence over 32-bit words,

    w[i+624] = w[i+397] ^ twist(w[i], w[i+1]);

the numbers drawn are the tempered words (`temper`). Any 624 consecutive words are a *window*, which determines all
words after it. Arrays of words are uint32 and one-dimensional.

`LAYOUT` is the layout of `torch.Generator.get_state()` for a CPU generator. PyTorch keeps 624 words and draws them in
order. `next` is the index of the word to draw. `left` is decremented before a draw; at zero all 624 words are replaced
by the following 624, and `next` is reset to 0. So a freshly seeded state (left 1, next 0) holds the words *before* the
first draw. Two fields cache the second of a pair of normals: a double, used by every CPU kernel, and a float, which is
unused but preserved. Source: `CPUGeneratorImplState` in ATen/CPUGeneratorImpl.cpp, `mt19937_engine` in
ATen/core/MT19937RNGEngine.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Words: TypeAlias = "NDArray[np.uint32]"

N = 624  # words in a window
M = 397  # the recurrence's middle term
MATRIX = 0x9908B0DF  # xored in if the bit shifted out is set

_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)
_MATRIX = np.uint32(MATRIX)
_ONE = np.uint32(1)


def twist(first: Words, second: Words) -> Words:
    """The linear map of the recurrence: the top bit of `first` and the low 31 of `second`, times the matrix."""
    mixed = (first & _UPPER) | (second & _LOWER)
    return (mixed >> _ONE) ^ ((second & _ONE) * _MATRIX)


def extend(window: Words, count: int) -> Words:
    """The window and the `count` words after it: shape (624 + count,). About 50 million words per second."""
    words = np.empty(N + count, np.uint32)
    words[:N] = window
    # A word depends on the one 227 before it, so 227 can be computed at a time.
    for begin in range(N, N + count, N - M):
        end = min(begin + N - M, N + count)
        words[begin:end] = words[begin - N + M : end - N + M] ^ twist(
            words[begin - N : end - N], words[begin - N + 1 : end - N + 1]
        )
    return words


def consistent(window: Words) -> Words:
    """The window with the low 31 bits of its first word set as the recurrence determines them.

    No later word depends on those bits, and seeding leaves them arbitrary: 624 words have 19,968 bits, the generator's
    state 19,937. Jump-ahead (`jump`) is exact only from a consistent window.
    """
    # window[623] = window[396] ^ twist(previous word, window[0]); the matrix sets the top bit iff a 1 is shifted out.
    twisted = int(window[N - 1]) ^ int(window[M - 1])
    shifted_out = twisted >> 31
    mixed = ((twisted ^ (MATRIX if shifted_out else 0)) << 1) | shifted_out
    fixed = window.copy()
    fixed[0] = (int(window[0]) & 0x80000000) | (mixed & 0x7FFFFFFF)
    return fixed


def temper(words: Words) -> Words:
    """The tempered words: the 32-bit integers that are drawn."""
    y = words ^ (words >> np.uint32(11))
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    return y ^ (y >> np.uint32(18))


LAYOUT = np.dtype(
    [
        ("seed", "<u8"),
        ("left", "<i4"),
        ("seeded", "<i4"),
        ("next", "<u8"),
        ("words", "<u8", N),  # each uses 32 bits
        ("normal_x", "<f8"),  # always 0
        ("normal", "<f8"),  # the cached normal
        ("normal_rho", "<f8"),  # always 0
        ("has_normal", "<i4"),
        ("padding", "V4"),
        ("float_normal", "<f4"),
        ("has_float_normal", "?"),
        ("float_padding", "V3"),
    ]
)
assert LAYOUT.itemsize == 5056


def parse_state(state: NDArray[np.uint8]) -> Any:
    """Parse a generator's state into a record of `LAYOUT` (a copy).

    Raises:
        ValueError: if it is not a valid state.
    """
    if state.dtype != np.uint8 or state.shape != (LAYOUT.itemsize,):
        raise ValueError(
            f"a CPU generator's state has {LAYOUT.itemsize} bytes (uint8), but got an array of dtype {state.dtype} and "
            f"shape {state.shape}; pass torch.get_rng_state().numpy() or generator.get_state().numpy()"
        )
    record = np.frombuffer(state.tobytes(), LAYOUT).copy()[0]
    left, following = int(record["left"]), int(record["next"])
    # Seeding sets (1, 0); after that left + next is always 625.
    if not record["seeded"] or not 1 <= left <= N or not (left + following == N + 1 or left == 1):
        raise ValueError(f"not a valid state of a torch CPU generator: left={left}, next={following}")
    return record


def build_state(record: Any) -> NDArray[np.uint8]:
    """The record's bytes, for `torch.Generator.set_state(torch.from_numpy(...))`."""
    return np.frombuffer(record.tobytes(), np.uint8).copy()
