"""The Mersenne Twister as a sequence of words.

MT19937 (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998) is a recurrence over 32-bit words,

    w[i+624] = w[i+397] ^ twist(w[i], w[i+1]),

and the draws are the words with their bits mixed once more (`temper`). Any 624 consecutive words are a *window*, and a
window determines everything that follows it. Arrays of words are uint32 and one-dimensional.

The bytes of `torch.Generator.get_state()` for a CPU generator (`LAYOUT`): PyTorch keeps 624 words and draws them in
order. `next` is the index of the word to draw, and before a draw `left` is decremented; at zero all 624 words are
replaced by the following 624, and `next` by 0. So a freshly seeded state (left 1, next 0) still has the words *before*
the first draw. Two caches hold the second of a pair of normals: a double one, used by every CPU kernel, and a float
one, which none uses but which is preserved. Source: `CPUGeneratorImplState` in ATen/CPUGeneratorImpl.cpp,
`mt19937_engine` in ATen/core/MT19937RNGEngine.h.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint32]

N = 624  # words in a window
M = 397  # the recurrence's middle term
MATRIX = 0x9908B0DF  # xored in when the lowest bit falls out

_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)
_MATRIX = np.uint32(MATRIX)
_ONE = np.uint32(1)


def twist(first: Words, second: Words) -> Words:
    """The linear map of the recurrence: the top bit of `first` and the low 31 of `second`, times the matrix."""
    mixed = (first & _UPPER) | (second & _LOWER)
    return (mixed >> _ONE) ^ ((second & _ONE) * _MATRIX)


def extend(window: Words, count: int) -> Words:
    """The window and the `count` words after it: shape (624 + count,). About 50 million words a second."""
    words = np.empty(N + count, np.uint32)
    words[:N] = window
    # A word needs the one 227 before it, so 227 are made at a time.
    for begin in range(N, N + count, N - M):
        end = min(begin + N - M, N + count)
        words[begin:end] = words[begin - N + M : end - N + M] ^ twist(
            words[begin - N : end - N], words[begin - N + 1 : end - N + 1]
        )
    return words


def consistent(window: Words) -> Words:
    """The window with the low 31 bits of its first word set to what the recurrence would have put there.

    Those bits influence no later word, and seeding leaves them arbitrary: 624 words hold 19,968 bits, the generator
    has 19,937. Linear algebra on the sequence (`jump`) is exact only from a window that lies on it.
    """
    # window[623] = window[396] ^ twist(the word before, window[0]); the matrix sets the top bit iff a 1 fell out.
    twisted = int(window[N - 1]) ^ int(window[M - 1])
    fell_out = twisted >> 31
    mixed = ((twisted ^ (MATRIX if fell_out else 0)) << 1) | fell_out
    fixed = window.copy()
    fixed[0] = (int(window[0]) & 0x80000000) | (mixed & 0x7FFFFFFF)
    return fixed


def temper(words: Words) -> Words:
    """The 32-bit integers drawn from these words."""
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
        ("words", "<u8", N),  # 32 bits used of each
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
    """A copy of a generator's state as a record of `LAYOUT`; ValueError for bytes that are not a valid state."""
    if state.dtype != np.uint8 or state.shape != (LAYOUT.itemsize,):
        raise ValueError(
            f"a CPU generator's state is {LAYOUT.itemsize} bytes (uint8), not an array of dtype {state.dtype} and "
            f"shape {state.shape}; pass torch.get_rng_state().numpy() or generator.get_state().numpy()"
        )
    record = np.frombuffer(state.tobytes(), LAYOUT).copy()[0]
    left, following = int(record["left"]), int(record["next"])
    # Seeding gives (1, 0); every draw keeps left + next at 625. Anything else would skip words or read past the end.
    if not record["seeded"] or not 1 <= left <= N or not (left + following == N + 1 or left == 1):
        raise ValueError(f"not a state that a torch CPU generator can be in: left={left}, next={following}")
    return record


def build_state(record: Any) -> NDArray[np.uint8]:
    """The record's bytes, to be given to `torch.Generator.set_state` through `torch.from_numpy`."""
    return np.frombuffer(record.tobytes(), np.uint8).copy()
