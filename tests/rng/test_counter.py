"""The counter policy: slices match the whole, keys and seeds differ, and the distributions are correct."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.rng import counter, philox

FILLS = [counter.uniform, counter.normal]
WHOLE = {fill: fill(3, 17, 0, 300_000) for fill in FILLS}


@pytest.mark.parametrize("fill", FILLS)
@settings(max_examples=40)
@given(st.integers(0, 300_000), st.integers(0, 300_000))
def test_slices_match_the_whole(fill, a, b):
    begin, end = min(a, b), max(a, b)
    assert np.array_equal(fill(3, 17, begin, end - begin), WHOLE[fill][begin:end])


@pytest.mark.parametrize("fill", FILLS)
def test_far_slices_match_the_whole(fill):
    begin = (1 << 45) + 3
    assert np.array_equal(fill(3, 17, begin, 1000)[100:], fill(3, 17, begin + 100, 900))


def test_values_match_a_computation_by_hand():
    block = [int(w) >> 8 for w in philox.words(3, 25, 17)]
    assert counter.uniform(3, 17, 100, 4).tolist() == [b * 2.0**-24 for b in block]
    radius = math.sqrt(-2 * math.log((block[2] + 1) * 2.0**-24))
    angle = 2 * math.pi * block[3] * 2.0**-24 - math.pi / 4
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    assert counter.normal(3, 17, 102, 2).tolist() == pytest.approx(expected, rel=1e-6)  # float32
    fractions = [((int(w[0]) << 32 | int(w[1])) >> 11) * 2.0**-53 for w in philox.words(3, 25, 17).reshape(2, 2)]
    assert counter.uniform64(3, 17, 50, 2).tolist() == fractions
    radius, angle = math.sqrt(-2 * math.log(fractions[0] + 2.0**-53)), 2 * math.pi * fractions[1] - math.pi / 4
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    assert counter.normal64(3, 17, 50, 2).tolist() == pytest.approx(expected, rel=1e-14)  # float64


def test_values_never_change():
    """Later versions must reproduce the weights of an earlier one, on any machine."""
    digest = hashlib.sha256()
    for fill in FILLS:
        digest.update(fill(2**63 + 12345, 2**40 + 1, 2**34 - 7, 100_000, -0.25, 0.75).astype("<f4").tobytes())
    assert digest.hexdigest() == "eab6864f4705b368f30dff28d620a61ad1449af4ae1038cc1f253f1f6f6a7d0f"


def test_normals_are_accurate():
    """Two units in the last place of the radius and of the sine, and 24 bits of angle, give at most 5e-7."""
    bits = philox.words(3, np.arange(75_000), 17).astype(np.float64) // 256 * 2.0**-24
    radius = np.sqrt(-2 * np.log(bits[:, 0::2] + 2.0**-24))
    angle = 2 * np.pi * bits[:, 1::2] - np.pi / 4
    exact = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)
    assert np.abs(WHOLE[counter.normal] - exact).max() < 5e-7


@pytest.mark.skipif(not counter.has_kernels(), reason="the C kernels were not built: no C compiler")
@settings(max_examples=30)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63),
    st.integers(0, 2**48),
    st.integers(0, 3000),
    st.floats(-4, 4, width=32),
    st.floats(0, 4, width=32),
)
def test_native_fills_match_numpy(seed, draw, begin, count, first, second):
    for fill, end in ((counter.uniform, first + second), (counter.normal, second)):
        native = fill(seed, draw, begin, count, first, end)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counter, "has_kernels", lambda: False)
            assert native.tobytes() == fill(seed, draw, begin, count, first, end).tobytes()


def test_uniforms_exclude_their_end():
    low, end = 2.0**23, 2.0**23 + 3
    result = counter.uniform(1, 2, 0, 10_000, low, end)
    assert set(result.tolist()) == {low, low + 1, low + 2}
    assert counter.uniform(1, 2, 0, 5, 3.0, 3.0).tolist() == [3.0] * 5


def test_xla_gives_the_same_words_and_uniforms_and_close_normals():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @jax.jit
    def make(block):
        words = counter.philox32(jnp, (3, 0), (block, jnp.zeros_like(block)), (17, 0))
        even, odd = counter.pair(jnp, *words[:2])
        return jnp.stack(words, -1), counter.unit(jnp, words[0]), jnp.stack([even, odd], -1)

    words, uniforms, normals = (np.asarray(a) for a in make(jnp.arange(75_000, dtype=jnp.uint32)))
    assert np.array_equal(words, philox.words(3, np.arange(75_000), 17))
    assert np.array_equal(uniforms, WHOLE[counter.uniform][0::4])
    actual = WHOLE[counter.normal].reshape(-1, 4)[:, :2]
    # XLA fuses multiplications with additions, which changes the last bits of logarithm, sine and cosine.
    assert (np.abs(normals - actual) <= 4 * np.spacing(np.abs(actual))).all()


@pytest.mark.parametrize("fill", FILLS)
def test_seeds_and_keys_give_different_numbers(fill):
    fills = [fill(seed, key, 0, 64) for seed in (0, 1, 1 << 40) for key in (0, 1, 1 << 40)]
    assert len(np.unique(np.concatenate(fills))) == len(fills) * 64


def test_fills_have_their_distribution():
    uniform, normal = WHOLE[counter.uniform], WHOLE[counter.normal]
    assert uniform.dtype == normal.dtype == np.float32
    assert 0 <= uniform.min() and uniform.max() < 1
    # At least 4.7 standard errors of 300,000 draws.
    assert uniform.mean() == pytest.approx(0.5, abs=0.003) and uniform.var() == pytest.approx(1 / 12, abs=0.001)
    assert normal.mean() == pytest.approx(0, abs=0.01) and normal.std() == pytest.approx(1, abs=0.01)
    assert (np.abs(normal) < 1).mean() == pytest.approx(0.6827, abs=0.004)
    assert abs(np.corrcoef(normal[0::2], normal[1::2])[0, 1]) < 0.01


def test_invalid_arguments_are_errors():
    with pytest.raises(ValueError, match="must not be negative"):
        counter.uniform(0, 0, -1, 4)
    assert counter.normal(0, 0, 5, 0).shape == (0,)
