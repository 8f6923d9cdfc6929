"""Functions cut into logical shards, against the same functions uncut. `python -m tests.lower.cut_samples` cuts all of
PyTorch's samples; tests/runtime/mesh/same_run_cases.py runs whole steps on meshes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from firstloss.lower import logical_shards, shard_passes
from tests.op_db import op_db

from .cut_samples import SHARDS, cuts_of
from .test_opinfo import name_of

# Together their samples use nearly all primitives that PyTorch's samples use, of those that can be cut.
CHOSEN = """
    acosh atan2 cosh digamma frac frexp igamma isin logical_xor masked.cumprod masked.median masked.prod matrix_exp
    nextafter nn.functional.adaptive_avg_pool3d nn.functional.conv1d nn.functional.conv_transpose2d
    nn.functional.ctc_loss nn.functional.glu nn.functional.multilabel_margin_loss nn.functional.pdist
    nn.functional.scaled_dot_product_attention nn.functional.unfold polar slice_scatter special.log_ndtr
""".split()


@pytest.mark.parametrize("op", [op for op in op_db if name_of(op) in CHOSEN], ids=name_of)
def test_cut_samples_are_as_uncut(op):
    cuts = cuts_of(op, torch.float32, 2)
    assert cuts
    assert not [cut.problem for cut in cuts if cut.problem]


def cut_and_run(function, arrays, dims, shards=SHARDS):
    closed = jax.make_jaxpr(function)(*arrays)
    made = logical_shards.cut(closed, dims, shards)
    whole = [()] * len(arrays)
    outs = [()] * len(made.outputs)
    results = jax.jit(lambda more, *arrays: shard_passes.run(made, arrays, whole, outs, {}, more))(0, *arrays)
    return made, results


def primitives(made):
    return collections.Counter(op.equation.eqn.primitive.name for loop in made.loops for op in loop if op.equation)


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def max_pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


# A function of an array of (4, 6, ...) that is cut along its first dimension: the primitive that must be computed by
# logical shards, the function, and the rest of the shape.
COMPUTED = {
    "argmin": (lambda x: jnp.argmin(x, 1), ()),
    "cummax": (lambda x: lax.cummax(x, 1), ()),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), ()),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 2), (4, 3)), ()),
    "integer_pow": (lambda x: x**3, ()),
    "reduce_window_max": (max_pool, (4, 4)),
    "reduce_window_sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME"), ()),
    "select_and_gather_add": (lambda x: jax.jvp(max_pool, (x,), (x * x,))[1], (4, 4)),
    "select_and_scatter_add": (lambda x: jax.grad(lambda x: max_pool(x).sum())(x), (4, 4)),
    "top_k": (lambda x: lax.top_k(x, 2)[0], ()),
    "reduce_sum": (lambda x: x.sum((0, 1)), ()),
    "scatter-add": (lambda x: jnp.ones((5, 6)).at[jnp.array([0, 3, 3, 1])].add(x), ()),
    "dot_general": (lambda x: x.T @ jnp.tanh(x), ()),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + 9 * jnp.eye(6)), (6,)),
    "fft": (lambda x: jnp.fft.fft(x).real, ()),
}
# The same, where it must be computed from the whole.
GATHERED = {
    "sort over the batch": (lambda x: jnp.sort(x, 0), ()),
    "cumulated over the batch": (lambda x: x.cumsum(0), ()),
    "reversed": (lambda x: x[::-1], ()),
    "joined along the batch": (lambda x: jnp.concatenate([x, x + 1])[1:7], ()),
    "argmax over the batch": (lambda x: jnp.argmax(x, 0), ()),
    "windows over the batch": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"), ()),
    "a part of the batch": (lambda x: x[1:3], ()),
    "padded along the batch": (lambda x: jnp.pad(x, ((1, 1), (0, 0))), ()),
    "transposed into the features": (lambda x: x.T.reshape(4, 6), ()),
    "each with each": (lambda x: jax.nn.softmax(x @ x.T), ()),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda i, x: x * x.sum(), x), ()),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_primitives_are_computed_by_logical_shards(name):
    function, rest = COMPUTED[name]
    x = normal(4, 6, *rest)
    made, (result,) = cut_and_run(function, [x], [0])
    assert primitives(made)[name] and not any(made.gathered)
    np.testing.assert_allclose(result, jax.jit(function)(x), rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("name", GATHERED)
def test_what_cannot_be_cut_is_computed_from_the_whole(name):
    function, rest = GATHERED[name]
    x = normal(4, 6, *rest)
    made, (result,) = cut_and_run(lambda x: function(jnp.tanh(x)), [x], [0])
    assert any(made.gathered) and primitives(made)["tanh"]
    np.testing.assert_allclose(result, jax.jit(lambda x: function(jnp.tanh(x)))(x), rtol=1e-5, atol=1e-5)


def test_a_batch_that_is_not_first_is_cut_where_it_is_merged():
    """The logical shards then follow each other several times, as in attention over (time, batch, features)."""

    def loss(w, x):
        rows = (x.reshape(-1, 6) @ w).reshape(5, 4, 2, 3)
        heads = rows.transpose(1, 2, 0, 3).reshape(8, 5, 3)
        mixed = jax.nn.softmax(heads @ heads.swapaxes(1, 2)) @ heads
        return (mixed.reshape(4, 2, 5, 3).transpose(2, 0, 1, 3).reshape(20, 6) ** 2).sum(), rows.reshape(-1, 6)

    arrays = [normal(6, 6), normal(5, 4, 6)]
    made, results = cut_and_run(lambda w, x: jax.grad(loss, has_aux=True)(w, x), arrays, [None, 1])
    assert sum(map(len, made.gathered)) == 1  # the second result, whose rows are no shards of it
    for result, expected in zip(results, jax.grad(loss, has_aux=True)(*arrays), strict=True):
        # Terms as large as the largest element cancel out in others.
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_random_numbers_belong_to_the_logical_shard():
    """Each has numbers of its own, also where the same are drawn for a whole value."""
    key = jax.random.key(0)
    made, (dropped,) = cut_and_run(
        lambda k, x: x * jax.random.bernoulli(k, 0.5, x.shape), [key, normal(8, 64)], [None, 0]
    )
    assert primitives(made)["random_bits"] == 1
    halves = np.asarray(dropped != 0).reshape(2, 4, 64)
    assert not np.array_equal(*halves)
    made, (noise, _) = cut_and_run(
        lambda k, x: ((noise := jax.random.normal(k, x.shape)), x + noise), [key, normal(8, 64)], [None, 0]
    )
    assert not primitives(made)["random_bits"]
    assert np.array_equal(noise, jax.random.normal(key, (8, 64)))


def test_a_mask_is_made_by_logical_shards():
    """What is only read in logical shards is not made whole."""

    def function(x):
        mask = jnp.tril(jnp.ones((x.shape[0], 6, 6))) + jnp.zeros((x.shape[0], 1, 1))
        return (mask * x[:, None]).sum((1, 2))

    made, (result,) = cut_and_run(function, [x := normal(4, 6)], [0])
    assert not [op for group in made.between for op in group if made.shapes[op.results[0]].shape[:1] == (4,)]
    np.testing.assert_allclose(result, function(x), rtol=1e-5)


def test_sums_are_added_in_one_tree():
    """Eight terms of one float32, whose sum depends on the order."""
    x = np.array([1e8, 5, 5, 5, 5, 5, 5, -1e8], np.float32)
    pairs = x[::2] + x[1::2]
    fours = pairs[::2] + pairs[1::2]
    _, (total,) = cut_and_run(lambda x: x.sum(), [x], [0], shards=8)
    assert total == fours[0] + fours[1] != np.cumsum(x, dtype=np.float32)[-1]


def test_what_only_the_last_pass_needs_is_computed_in_it():
    """A masked mean counts first; all else, forward and backward, is one pass: nothing is kept in between."""

    def loss(w, x, mask):
        return ((jnp.tanh(x @ w) ** 2).sum(1) * mask).sum() / mask.sum()

    arrays = [normal(6, 5), normal(8, 6), np.array([1, 0, 1, 1, 0, 1, 1, 1], np.float32)]
    made, results = cut_and_run(jax.value_and_grad(loss), arrays, [None, 0, 0])
    assert [collections.Counter(op.add is not None for op in loop)[True] for loop in made.loops] == [1, 2]
    assert primitives(made._replace(loops=made.loops[:1])) == {"reduce_sum": 1}
    for result, expected in zip(results, jax.value_and_grad(loss)(*arrays), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_reshapes_are_cut_where_the_shards_stay_whole(data):
    """Merged and split dimensions, cut along any of them, maybe permuted before."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    groups, shape = list(np.array(sizes)[list(order)]), []
    while groups:
        count = data.draw(st.integers(1, len(groups)))
        merged, groups = int(np.prod(groups[:count])), groups[count:]
        first = data.draw(st.sampled_from([n for n in range(1, merged + 1) if merged % n == 0]))
        shape += [first, merged // first]
    dim = data.draw(st.integers(0, len(sizes) - 1))
    if sizes[dim] % SHARDS:
        sizes[dim] *= SHARDS
        return
    x = normal(*sizes)
    _, (result,) = cut_and_run(lambda x: lax.reshape(x + 1, shape, dimensions=order) * 2, [x], [dim])
    assert np.array_equal(result, (x + 1).transpose(order).reshape(shape) * 2)


def test_equations_know_their_lines():
    def function(x):
        with jax.named_scope("1"):
            return jnp.sort(jnp.tanh(x), 0)

    made = logical_shards.cut(jax.make_jaxpr(function)(normal(4, 6)), [0], 2, ["a.py:1", "a.py:2"])
    assert list(made.lines.values()) == ["a.py:2"]
    placed = logical_shards.place(made, [()], [()], {"d": 2})
    assert logical_shards.cost(placed, [()], {"d": 2}) == (1, 48.0, {"a.py:2": 96})
