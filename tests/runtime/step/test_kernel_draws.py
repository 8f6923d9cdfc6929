"""Random operations that PyTorch's kernels run: the numbers of the compiled step."""

import functools

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstloss as fl
from firstloss.program.graph import Node, Value
from firstloss.runtime.step import kernel_draws
from firstloss.runtime.step.compiled_draws import CompiledDraws
from firstloss.runtime.step.kernel_draws import Draws

WORDS = st.integers(0, 2**32 - 1)


@functools.cache
def dropout_node(shape, dtype):
    """The random operation of a dropout."""
    fl.backend("XLA")

    @fl.trace
    def step(x):
        return torch.nn.functional.dropout(x, 0.25)

    step(torch.ones(shape, dtype=dtype))
    (node,) = (node for node in step.program().nodes if node.draw is not None)
    return node


def with_probability(node, p):
    """The node, with ones drawn with probability `p`."""
    args = node.args[0], p, *node.args[2:]
    copy = Node(node.index, node.op, args, node.kwargs, node.writes, node.overwrites, node.draw, node.source)
    copy.outputs = node.outputs
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (7, 300), (1 << 21,)], ids=str)
@settings(max_examples=4)
@given(words=st.tuples(WORDS, WORDS), p=st.floats(0, 1))
def test_the_masks_of_dropout_are_those_of_the_compiled_step(shape, dtype, words, p):
    assert_same_mask(with_probability(dropout_node(shape, dtype), p), np.array(words, np.uint32))


def test_a_half_is_the_default():
    node = dropout_node((50,), torch.float32)
    half = with_probability(node, 0.5)
    half.args = half.args[:1]  # as it is recorded for a dropout of a half
    assert_same_mask(half, np.array([1, 2], np.uint32))


def assert_same_mask(node, seed):
    assert kernel_draws._is_mask(node)
    (mask,), (compiled,) = (draws.run(node, Value.empty) for draws in (Draws(seed), CompiledDraws(seed)))
    assert torch.equal(mask.to(compiled.dtype), compiled.reshape(mask.shape))


@pytest.mark.parametrize(
    ("name", "value"), [("jax_threefry_partitionable", False), ("jax_default_prng_impl", "rbg")], ids=str
)
def test_masks_are_compiled_where_jax_draws_in_another_way(name, value):
    node = dropout_node((3,), torch.float32)
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        assert not kernel_draws._is_mask(node)
    finally:
        jax.config.update(name, before)
