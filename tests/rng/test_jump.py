"""Jumps against drawing one by one, and the characteristic polynomial against Berlekamp-Massey."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.rng import jump as jumps
from firstloss.rng.jump import jump, power
from firstloss.rng.mt19937 import N, consistent, extend, temper
from firstloss.rng.stream import GENERATE_BELOW, advance

WINDOW = consistent(np.random.default_rng(1).integers(0, 1 << 32, N, dtype=np.uint32))
FAR = extend(WINDOW, 300_000)


def to_powers_of_t(residue: int) -> int:
    """A polynomial in base Y, expanded: bit e stands for t^e."""
    out = 0
    for k in range(32, -1, -1):
        out = out << 623 ^ out << 396 ^ residue >> 623 * k & (1 << 623) - 1
    return out


def berlekamp_massey(bits: list[int]) -> int:
    """The characteristic polynomial of the shortest linear recurrence over GF(2) that the bits obey."""
    c = b = 1
    length = since = history = 0
    for count, bit in enumerate(bits):
        history = history << 1 | bit
        since += 1
        if (c & history).bit_count() & 1:
            previous, c = c, c ^ b << since
            if 2 * length <= count:
                length, b, since = count + 1 - length, previous, 0
    return int(f"{c:0{length + 1}b}"[::-1], 2)


def test_the_characteristic_polynomial_matches_berlekamp_massey():
    drawn = temper(extend(WINDOW, 2 * 19937))[N:] & 1
    result = berlekamp_massey(drawn.tolist())
    # t^19937 = P - t^19937 modulo P
    precomputed = 1 << 19937 ^ to_powers_of_t(power(19937))
    assert result == precomputed
    assert result.bit_length() == 19938 and result.bit_count() == 135


@pytest.mark.parametrize("n", [32, 33, 622, 623, 624, 1245, 1246, 19936, 19937, 19938, 123_456, 299_999])
def test_a_jump_matches_drawing(n):
    assert np.array_equal(jump(WINDOW, n), FAR[n : n + N])
    assert np.array_equal(advance(WINDOW, n), FAR[n : n + N])


@pytest.mark.parametrize("n", [0, 1, 31, 227, 624, GENERATE_BELOW - 1, GENERATE_BELOW])
def test_short_distances_are_generated(n):
    assert np.array_equal(advance(WINDOW, n), FAR[n : n + N])


@settings(max_examples=30)
@given(st.integers(32, 200_000), st.integers(0, 1 << 60))
def test_jumps_add(a, b):
    assert np.array_equal(advance(advance(WINDOW, b), a), jump(WINDOW, a + b))


@settings(max_examples=20)
@given(st.integers(0, 1 << 50))
def test_powers_of_t_multiply(n):
    times_t = to_powers_of_t(power(n)) << 1
    if times_t >> 19937:
        times_t ^= 1 << 19937 ^ to_powers_of_t(power(19937))
    assert times_t == to_powers_of_t(power(n + 1))


def test_a_jump_by_the_period_is_the_identity():
    # 2^19937 - 1 is prime, so t has that order exactly if t^(2^19937) = t: 19,937 squarings as an end-to-end check.
    residue = power(2)
    for _ in range(19937 - 1):
        residue = jumps._reduce(jumps._square(residue))
    assert residue == power(1)


def test_jumping_backwards_is_refused():
    with pytest.raises(ValueError, match="backwards by 5 words"):
        power(-5)


def test_only_unused_bits_of_a_state_are_changed():
    seeded = WINDOW.copy()
    seeded[0] ^= np.uint32(0x1234567)
    assert np.array_equal(consistent(seeded), WINDOW)
    assert np.array_equal(extend(seeded, 2000)[1:], extend(WINDOW, 2000)[1:])
    assert np.array_equal(consistent(FAR[777 : 777 + N]), FAR[777 : 777 + N])
