"""Philox against its authors' known answers."""

import numpy as np
import pytest

from firstloss.rng import philox
from firstloss.rng.stream import PhiloxStream, Position

# From kat_vectors of the Random123 library, lines "philox4x32 10": counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    actual = philox.words(key[0] | key[1] << 32, counter[0] | counter[1] << 32, counter[2] | counter[3] << 32)
    assert tuple(actual.tolist()) == expected


def test_counters_broadcast():
    many = philox.words(7, np.arange(5)[:, None], [1, 1 << 40])
    assert many.shape == (5, 2, 4) and many.dtype == np.uint32
    assert np.array_equal(many[3, 1], philox.words(7, 3, 1 << 40))


def test_a_cuda_generators_state_is_its_seed_and_offset():
    stream = PhiloxStream(-1)
    state = stream.state_at(Position(1 << 40))
    assert state.dtype == np.uint8 and state.shape == (16,)
    assert state.view("<u8").tolist() == [2**64 - 1, 1 << 40]
    with pytest.raises(NotImplementedError, match="cuda_layout"):
        stream.words_at(0, 4)
