"""Views: `as_strided` above all, which is told apart from its numbers."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firstloss.lower.rules import RULES
from firstloss.lower.views import strided_places, strided_steps

from .harness import assert_rule, to_array

aten = torch.ops.aten


@st.composite
def strided_views(draw):
    """A size, strides and an offset that stay inside a memory of 120 elements."""
    dims = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=4))
    size, stride = [d[0] for d in dims], [d[1] for d in dims]
    last = sum((n - 1) * s for n, s in dims)
    assume(last < 120)
    return size, stride, draw(st.integers(0, 119 - last))


@given(strided_views())
@settings(max_examples=25, deadline=None)
def test_as_strided(view):
    size, stride, offset = view
    base = torch.arange(120)
    expected = base.as_strided(size, stride, offset)
    assert (strided_places(size, stride, offset) == expected.numpy()).all()
    with jax.enable_x64(True):  # not compiled: hundreds of shapes
        ours = RULES[aten.as_strided.default](to_array(base), size, stride, offset)
    assert (np.asarray(ours) == expected.numpy()).all()


@given(st.permutations(range(4)), st.data())
@settings(max_examples=60, deadline=None)
def test_views_of_contiguous_memory_need_no_gather(order, data):
    """Slices, transposes and broadcasts, in any combination, are recognised."""
    x = torch.arange(120).reshape(2, 3, 4, 5).permute(*order)
    for d in range(4):
        start = data.draw(st.integers(0, x.shape[d] - 1))
        x = x[(slice(None),) * d + (slice(start, None, data.draw(st.integers(1, 2))),)]
    x = x.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *x.shape)
    steps = strided_steps(x.shape, x.stride())
    assert steps is not None
    order, rows = steps
    assert rows == sorted(rows, reverse=True)


def test_sliding_windows_overlap():
    assert strided_steps((4, 3), (1, 1)) is None
    x = torch.arange(6.0)
    assert_rule(aten.as_strided.default, (x, [4, 3], [1, 1], 0), {}, x.as_strided([4, 3], [1, 1], 0))


def test_strided_views_compile_without_gather():
    x = torch.arange(24.0).reshape(4, 6)
    for view in (x.t(), x[1:3, ::2], x[:, 2], x[::2].t(), x.diagonal()):
        with jax.enable_x64(True):
            rule = RULES[aten.as_strided.default]
            how = (tuple(view.shape), view.stride(), view.storage_offset())
            text = str(jax.make_jaxpr(lambda a, how=how, rule=rule: rule(a, *how))(to_array(x)))
        assert "gather" not in text
        assert_rule(aten.as_strided.default, (x, *how), {}, view.clone())


def test_as_strided_scatter():
    x, src = torch.zeros(4, 6), torch.arange(6.0).reshape(3, 2)
    how = ([3, 2], [2, 12], 1)
    assert_rule(aten.as_strided_scatter.default, (x, src, *how), {}, aten.as_strided_scatter(x, src, *how))


@pytest.mark.parametrize(
    "arguments", [(0, 1, 3, 1), (1, -3, None, 1), (1, 1, 2**62, 2), (0, 3, 1, 1), (1, None, -1, 3)]
)
def test_slices(arguments):
    x = torch.arange(24.0).reshape(4, 6)
    part = aten.slice.Tensor(x, *arguments)
    assert_rule(aten.slice.Tensor, (x, *arguments), {}, part)
    assert_rule(aten.slice_scatter.default, (x, -part, *arguments), {}, aten.slice_scatter(x, -part, *arguments))


WIDTHS = [
    (torch.float32, torch.int32),
    (torch.float32, torch.int16),
    (torch.int16, torch.float64),
    (torch.complex64, torch.float32),
    (torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtypes", WIDTHS, ids=str)
def test_bytes_under_another_dtype(dtypes):
    source, target = dtypes
    x = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]]).to(source)
    assert_rule(aten.view.dtype, (x, target), {}, x.view(target).clone(), tolerance=0.0)


def test_zero_dimensional():
    x = torch.tensor(3.0)
    assert_rule(aten.permute.default, (x, []), {}, x)
    assert_rule(aten.squeeze.dim, (x, -1), {}, x)
    assert_rule(aten.unsqueeze.default, (x, -1), {}, x[None])
    assert_rule(aten.expand.default, (x, [2, 3]), {}, x.expand(2, 3).clone())
    assert_rule(aten.sum.dim_IntList, (x, [0]), {}, x)
    assert_rule(aten.max.dim, (x, 0), {}, x.max(0))
    assert_rule(aten.gather.default, (x, 0, torch.tensor([0])), {}, x.gather(0, torch.tensor([0])))
