"""Random bits by the custom call: those of `jax.random`."""

import jax
import jax.extend.random
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import random

import firstloss as fl
from firstloss.lower import aten, threefry
from firstloss.runtime.jax_support import x64
from tests import compiled_steps

DRAWS = {
    "uniform": lambda key, shape: random.uniform(key, shape, np.float32),
    "uniform, float64": lambda key, shape: random.uniform(key, shape, np.float64),
    "uniform, bfloat16": lambda key, shape: random.uniform(key, shape, jax.numpy.bfloat16),
    "normal": lambda key, shape: random.normal(key, shape, np.float32),
    "bits, 8": lambda key, shape: random.bits(key, shape, np.uint8),
    "bits, 16": lambda key, shape: random.bits(key, shape, np.uint16),
    "bits, 64": lambda key, shape: random.bits(key, shape, np.uint64),
    "randint": lambda key, shape: random.randint(key, shape, 0, 1000, np.int64),
    "gumbel": lambda key, shape: random.gumbel(key, shape, np.float32),
    "split": lambda key, shape: jax.vmap(lambda one: random.uniform(one, (3,)))(random.split(key, 4)),
    "fold_in": lambda key, shape: random.normal(random.fold_in(key, 7), shape, np.float32),
    "permutation": lambda key, shape: random.permutation(key, 1 + sum(shape)),
}


def _computed(function, *arguments, by_call: bool) -> np.ndarray:
    """Its result, compiled with or without PyTorch's kernels and calls of ours."""
    with x64(), aten.within(by_call):
        return np.asarray(jax.jit(function).lower(*arguments).compile()(*arguments))


def _same(function, *arguments) -> bool:
    plain, called = (_computed(function, *arguments, by_call=by_call) for by_call in (False, True))
    return plain.dtype == called.dtype and plain.shape == called.shape and plain.tobytes() == called.tobytes()


@pytest.mark.parametrize("name", DRAWS)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.lists(st.integers(0, 40), max_size=3) | st.sampled_from([[257], [3, 256], [300, 400]]),
)
def test_draws_are_those_of_jax(name, seed, shape):
    draw = DRAWS[name]

    def run(seed):
        return draw(threefry.by_call(random.key(seed)), tuple(shape))

    assert _same(run, np.uint32(seed))


def test_many_numbers_are_drawn_by_several_threads():
    def run(seed):
        return random.bits(threefry.by_call(random.key(seed)), (1 << 20) + 3, np.uint32)

    assert _same(run, np.uint32(5))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), data=st.integers(0, 2**32 - 1))
def test_a_folded_key_is_that_of_jax(seed, data):
    def run(seed, data):
        return random.key_data(threefry.fold_in(random.key(seed), data))

    assert _same(run, np.uint32(seed), np.uint32(data))


def test_counters_go_on_beyond_32_bits():
    key, first, count = np.array([3, 4], np.uint32), 2**32 - 300, 600
    counters = first + np.arange(count, dtype=np.uint64)
    high, low = (counters >> 32).astype(np.uint32), counters.astype(np.uint32)
    expected = np.stack(jax.extend.random.threefry2x32_p.bind(key[0], key[1], high, low), -1)

    def run(key, first):
        return threefry._call(key, first, (count, 2), np.uint32, words=True)

    assert np.array_equal(_computed(run, key, np.uint32(first), by_call=True), expected)


def test_other_ways_of_drawing_stay_xla_s():
    with x64(), aten.within():
        assert threefry.usable(random.key(0))
        assert not threefry.usable(random.key(0, impl="rbg"))
        with jax.threefry_partitionable(False):
            assert not threefry.usable(random.key(0))


def test_a_compiled_dropout_draws_by_one_call():
    fl.backend("XLA")

    @fl.trace
    def step(x):
        return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(8, 1000)
    dropped = step(x)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    (executable,) = compiled_steps.segment_executables(compiled_steps.latest(step)).values()
    text = executable.as_text()
    assert "firstloss_threefry" in text and "while" not in text
