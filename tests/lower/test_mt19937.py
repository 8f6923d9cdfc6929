"""Random words, states and jumps on the device, against NumPy's and PyTorch's."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.lower import mt19937 as device
from firstloss.lower.mt19937_jump import bits_for, rewind, spread, table, windows
from firstloss.rng import mt19937 as host
from firstloss.rng.jump import jump

pytestmark = pytest.mark.optimized


@pytest.fixture(autouse=True)
def wide_integers():
    with jax.enable_x64(True):
        yield


def window(seed):
    return host.extend(host.consistent(np.random.default_rng(seed).integers(0, 1 << 32, 624, np.uint32)), 700)[-624:]


@given(seed=st.integers(0, 99), count=st.integers(0, 1500))
@settings(max_examples=25)
def test_rewind_undoes_extend(seed, count):
    start = window(seed)
    assert np.array_equal(rewind(host.extend(start, count)[count:], count), start)


@pytest.mark.parametrize("count", [0, 1, 623, 624, 625, 1248, 5000])
@pytest.mark.parametrize("words_each", [1, 2])
def test_every_lane_draws_the_words_after_its_state(count, words_each):
    lanes = np.stack([window(seed) for seed in range(3)])
    out, _ = jax.jit(lambda w: device.draw(w, count, lambda words: words[:, ::words_each], words_each))(lanes)
    expected = [host.temper(host.extend(w, count * words_each)[624:])[::words_each] for w in lanes]
    assert np.array_equal(out, np.stack(expected))


def test_words_match_a_generator():
    generator = torch.Generator().manual_seed(11)
    from firstloss.rng.stream import Stream

    stream = Stream.from_state(generator.get_state().numpy())
    out, _ = jax.jit(lambda w: device.draw(w, 2000, device.uniform_bits))(stream._block(0)[None])
    assert np.array_equal(out[0], torch.rand(2000, generator=generator).numpy())


_TABLE = table(12)


@given(seed=st.integers(0, 99), position=st.integers(0, (1 << 12) - 1))
@settings(max_examples=25)
def test_states_at_any_position_match_a_generator(seed, position):
    start = window(seed)
    actual = windows(start, np.int64(position), _TABLE)
    assert np.array_equal(actual, host.extend(start, position)[position:])


def test_states_at_far_positions_match_a_generator():
    start, position = window(0), 987_654_321_012
    actual = windows(start, np.int64(position), table(bits_for(position)))
    assert np.array_equal(actual, jump(start, position))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
def test_lanes_lie_at_equal_distances(count):
    start = window(4)
    actual = jax.jit(lambda w, t: spread(w, count, 7, t))(start, _TABLE)
    assert np.array_equal(actual, np.stack([host.extend(start, 128 * i)[128 * i :] for i in range(count)]))
