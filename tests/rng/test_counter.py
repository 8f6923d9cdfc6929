"""The counter policy: any slice is the whole's, keys and seeds differ, and the numbers have their distribution."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.rng import counter, philox

FILLS = [counter.uniform, counter.normal]
WHOLE = {fill: fill(3, 17, 0, 300_000) for fill in FILLS}


@pytest.mark.parametrize("fill", FILLS)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300_000), st.integers(0, 300_000))
def test_a_slice_is_the_wholes(fill, a, b):
    begin, end = min(a, b), max(a, b)
    assert np.array_equal(fill(3, 17, begin, end - begin), WHOLE[fill][begin:end])


@pytest.mark.parametrize("fill", FILLS)
def test_far_slices(fill):
    begin = (1 << 45) + 3
    assert np.array_equal(fill(3, 17, begin, 1000)[100:], fill(3, 17, begin + 100, 900))


def test_values_by_hand():
    block = [int(w) >> 8 for w in philox.words(3, 25, 17)]
    assert counter.uniform(3, 17, 100, 4).tolist() == [b * 2.0**-24 for b in block]
    radius = math.sqrt(-2 * math.log((block[2] + 1) * 2.0**-24))
    angle = 2 * math.pi * block[3] * 2.0**-24
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    assert counter.normal(3, 17, 102, 2).tolist() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("fill", FILLS)
def test_seeds_and_keys_have_their_own_numbers(fill):
    fills = [fill(seed, key, 0, 64) for seed in (0, 1, 1 << 40) for key in (0, 1, 1 << 40)]
    assert len(np.unique(np.concatenate(fills))) == len(fills) * 64


def test_distributions():
    uniform, normal = WHOLE[counter.uniform], WHOLE[counter.normal]
    assert uniform.dtype == normal.dtype == np.float32
    assert 0 <= uniform.min() and uniform.max() < 1
    assert uniform.mean() == pytest.approx(0.5, abs=0.003) and uniform.var() == pytest.approx(1 / 12, abs=0.001)
    assert normal.mean() == pytest.approx(0, abs=0.01) and normal.std() == pytest.approx(1, abs=0.01)
    assert (np.abs(normal) < 1).mean() == pytest.approx(0.6827, abs=0.004)
    assert abs(np.corrcoef(normal[0::2], normal[1::2])[0, 1]) < 0.01


def test_errors():
    with pytest.raises(ValueError, match="begins at -1"):
        counter.uniform(0, 0, -1, 4)
    assert counter.normal(0, 0, 5, 0).shape == (0,)
