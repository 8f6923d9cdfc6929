"""Jump-ahead for MT19937: the window n words later, for any n, in one to three milliseconds.

Let t be the operator that advances the sequence by one word. The recurrence is linear over GF(2), so the window n words
later is the polynomial t^n modulo the characteristic polynomial P, applied to the current window (Haramoto, Matsumoto,
Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators", INFORMS J. Computing
20(3), 2008). P has degree 19,937 and 135 terms. Both steps are cheap here because, with Y = t^623 + t^396,

    P = t Y^32 + sum of t Y^(31-i) over the bits i < 31 of the matrix constant + 1

(the formula for P in the 1998 paper, written in base Y):

* Reducing modulo P is a few shifts of 623-bit digits: t^n takes 65 microseconds per bit of n.
* Applying Y to the words is one `twist`: (Yw)[i] = w[i+623] ^ w[i+396] = twist(w[i-1], w[i]). So the digits are applied
  to 33 short sequences w, Yw, Y²w..., and no long sequence is generated.

A polynomial in base Y is a list of digits, or a Python int that packs them, 623 bits each, lowest first: bit
623 k + e is the coefficient of t^e Y^k. Residues have 32 digits and one bit.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from firstloss import c_library
from firstloss.rng.mt19937 import MATRIX, M, N, Words, extend, twist

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIGIT = N - 1  # bits in a digit, the degree of Y
_DIGITS = 33  # in a residue; the last has one bit
_FALL = N - M  # t^623 = Y + t^396: a bit that overflows its digit sets another one this far below
_TAPS = tuple(i for i in range(31) if MATRIX >> i & 1)
_OVERFLOW = 1 << _DIGIT | 1 << _DIGIT - _FALL  # Y itself, as bits of a digit
_MASK = (1 << _DIGIT) - 1
_LOWEST_BITS = ((1 << 2 * _DIGITS * _DIGIT) - 1) // _MASK - 1  # of the digits from 1 on: a geometric series
_ODD_DIGITS = ((1 << 2 * _DIGITS * _DIGIT) - 1) // (_MASK + 2) << _DIGIT  # all bits of the digits 1, 3, 5...: likewise


def _spread() -> NDArray[np.uint16]:
    """Each byte with a zero after every bit."""
    spread = np.arange(256, dtype="<u2")
    for shift, mask in ((4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        spread = (spread | spread << shift) & mask
    return spread


_SPREAD = _spread()


def jump(window: Words, n: int) -> Words:
    """The window `n` >= 32 words later. Polynomials are cached: the same n again takes a third of the time."""
    # Y^k w starts k words later than w; relative to word 32 of the window, all of them are defined.
    offsets = _selection(n - (_DIGITS - 1))
    if has_kernel():
        return native_jump(window, offsets)
    table = _combinations(window)
    rows = as_strided(table.reshape(-1), (table.size - N + 1, N), (table.itemsize, table.itemsize), writeable=False)
    result = np.zeros(N, np.uint32)
    for begin in range(0, len(offsets), _GATHER):
        result ^= np.bitwise_xor.reduce(rows[offsets[begin : begin + _GATHER]], axis=0)
    return result


# Applying a polynomial sums tens of thousands of 624-word rows, t^e Y^k w for each of its bits. By the method of four
# Russians, the 33 powers of Y are split into groups of five and the xor of every subset of a group is tabulated, so
# that one row per group and e is enough. Groups of 4, 5, 6, 7 and 8 take 0.97, 0.87, 0.88, 1.0 and 1.4 ms in total.
_GROUP = 5
_GROUPS = -(-_DIGITS // _GROUP)
_REACH = _DIGIT + N - 1  # words of Y^k w that a digit reads
_GATHER = 256  # rows gathered at a time, to stay in the cache


def _combinations(window: Words) -> Words:
    """The xor of every subset of each group of w, Yw, Y²w...: shape (groups, 2^group, reach)."""
    table = np.zeros((_GROUPS, 1 << _GROUP, _REACH), np.uint32)
    words = extend(window, _DIGITS - 1 + _REACH - N)
    for k in range(_DIGITS):
        group, bit = divmod(k, _GROUP)
        np.bitwise_xor(table[group, : 1 << bit], words[-_REACH:], out=table[group, 1 << bit : 2 << bit])
        words = twist(words[:-1], words[1:])
    return table


@lru_cache(maxsize=128)
def _selection(n: int) -> NDArray[np.intp]:
    """The rows of `_combinations` that sum to t^n, as offsets into the flattened table."""
    packed = power(n).to_bytes(-(-_DIGIT * _DIGITS // 8), "little")
    bits = np.zeros((_GROUPS * _GROUP, _DIGIT), np.uint8)
    bits[:_DIGITS] = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: _DIGITS * _DIGIT].reshape(
        _DIGITS, _DIGIT
    )
    subset = np.packbits(bits.reshape(_GROUPS, _GROUP, _DIGIT), axis=1, bitorder="little")[:, 0].astype(np.intp)
    member = np.arange(_GROUPS)[:, None] * (1 << _GROUP) + subset
    return (member * _REACH + np.arange(_DIGIT)).reshape(-1)


# -- the inner loops in C (`_jump.c`), five times as fast, generating fourteen times ----------------------------------

_ADDRESS = ctypes.c_void_p
_FUNCTIONS = {
    "firstloss_jump": (None, (_ADDRESS, _ADDRESS, ctypes.c_int64, ctypes.c_int, _ADDRESS, _ADDRESS)),
    "firstloss_generate": (None, (_ADDRESS, ctypes.c_int64, _ADDRESS)),
}
_TABLE_WORDS = _GROUPS * (1 << _GROUP) * _REACH
_scratch = threading.local()


@cache
def _kernels() -> Any:
    return c_library.load(__file__, "_jump", _FUNCTIONS)


def has_kernel() -> bool:
    """Whether the package was built with a C compiler."""
    return _kernels() is not None


def native_generate(window: Words, n: int) -> Words:
    """The window `n` words later, as the last of `extend(window, n)`. Releases the GIL."""
    window = np.ascontiguousarray(window, np.uint32)
    result = np.empty(N, np.uint32)
    _kernels().firstloss_generate(window.ctypes.data, n, result.ctypes.data)
    return result


def native_jump(window: Words, offsets: NDArray[np.intp]) -> Words:
    """The xor of the rows of `_combinations(window)` that begin at `offsets`. Releases the GIL."""
    if not hasattr(_scratch, "table"):  # reused: touching a new megabyte costs more than filling it
        _scratch.table = np.empty(_TABLE_WORDS, np.uint32)
    window = np.ascontiguousarray(window, np.uint32)
    rows = np.ascontiguousarray(offsets, np.int64)
    result = np.empty(N, np.uint32)
    table = _scratch.table.ctypes.data
    _kernels().firstloss_jump(window.ctypes.data, rows.ctypes.data, len(rows), _GROUP, table, result.ctypes.data)
    return result


# -- polynomials -----------------------------------------------------------------------------------------------------


def power(n: int) -> int:
    """t^n modulo P, in base Y."""
    if n < 0:
        raise ValueError(f"cannot jump backwards by {-n} words")
    # The leading 9 bits of n make an exponent below 512, which needs no reduction.
    remaining = max(n.bit_length() - 9, 0)
    residue = 1 << (n >> remaining)
    for bit in range(remaining - 1, -1, -1):
        product = _square(residue)
        if n >> bit & 1:
            product <<= 1
            # A bit shifted out of its digit is now the lowest bit of the next one (Y); t^396 is missing.
            product ^= (product & _LOWEST_BITS) >> _FALL
        residue = _reduce(product)
    return residue


def squared(residue: int) -> int:
    """t^2n, given t^n."""
    return _reduce(_square(residue))


def _square(residue: int) -> int:
    """The square, not reduced: up to 66 digits."""
    # Squaring over GF(2) inserts a zero after every bit. So the 1246 bits of digit k's square are in digits 2k and
    # 2k+1: in base Y, except that the t^396 of each t^623 = Y + t^396 is missing.
    octets = np.frombuffer(residue.to_bytes(-(-residue.bit_length() // 8), "little"), np.uint8)
    square = int.from_bytes(_SPREAD[octets].tobytes(), "little")
    missing = square & _ODD_DIGITS
    while missing:
        missing >>= _FALL
        square ^= missing
        missing &= _ODD_DIGITS
    return square


def _reduce(polynomial: int) -> int:
    """The polynomial (at most 66 digits) modulo P."""
    count = max(_DIGITS, -(-polynomial.bit_length() // _DIGIT))
    digits = [polynomial >> _DIGIT * k & _MASK for k in range(count)]
    top = _DIGITS - 1
    for k in range(count - 1, top - 1, -1):
        # Modulo P, t Y^32 is the sum of t Y^(31-i) and 1; the digit's constant term remains.
        constant, rest = digits[k] & 1, digits[k] >> 1
        digits[k - top] ^= rest
        for tap in _TAPS:
            digits[k - 1 - tap] ^= rest << 1
        digits[k] = constant
        if constant and k > top:
            digits[k - 1] ^= _OVERFLOW
    residue = 0
    carry = 0
    for k in range(_DIGITS):
        digit = digits[k] ^ carry
        carry = digit >> _DIGIT
        residue |= (digit ^ carry * _OVERFLOW) << _DIGIT * k
    return residue
