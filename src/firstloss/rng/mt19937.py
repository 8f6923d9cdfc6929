"""The Mersenne Twister as a sequence of words.

MT19937 (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998) is a recurrence over 32-bit words,

    w[i+624] = w[i+397] ^ twist(w[i], w[i+1]),

and the draws are the words with their bits mixed once more (`temper`). Any 624 consecutive words are a *window*, and a
window determines everything that follows it. All arrays here are uint32 and one-dimensional.
"""

from __future__ import annotations

from typing import TypeAlias

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
