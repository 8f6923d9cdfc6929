"""Views, above all `as_strided`, and recovering them from their strides."""

import math

import jax
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firstloss.lower.rules import RULES
from firstloss.lower.views import strided_rows, strided_slices

from .harness import assert_rule, to_array

aten = torch.ops.aten


@st.composite
def strided_views(draw):
    """A size, strides and an offset within a memory of 120 elements."""
    dims = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=4))
    size, stride = [d[0] for d in dims], [d[1] for d in dims]
    last = sum((n - 1) * s for n, s in dims)
    assume(last < 120)
    return size, stride, draw(st.integers(0, 119 - last))


@given(strided_views(), st.data())
@settings(max_examples=25)
def test_as_strided_matches_eager(view, data):
    size, stride, offset = view
    base = torch.arange(120)
    expected = base.as_strided(size, stride, offset)
    shape = data.draw(st.sampled_from([(120,), (4, 30), (2, 3, 4, 5), (5, 1, 24)]))
    with jax.enable_x64(True):
        actual = RULES[aten.as_strided.default](to_array(base.reshape(shape)), size, stride, offset)
    assert (np.asarray(actual) == expected.numpy()).all()


@given(strided_views())
@settings(max_examples=1000)
def test_slices_match_the_view(view):
    """In NumPy, which does not compile."""
    size, stride, offset = view
    for shape in ((120,), (4, 30), (2, 3, 4, 5), (5, 1, 24)):
        slices = strided_slices(shape, size, stride, offset)
        if slices is None:
            continue
        cut = tuple(map(slice, slices.starts, slices.limits, slices.steps))
        x = np.arange(120).reshape(slices.shape)[cut]
        x = x.squeeze(tuple(j for j, d in enumerate(slices.dims) if d is None))
        dims = [d for d in slices.dims if d is not None]
        x = x.transpose(np.argsort(dims)) if dims else x
        x = x.reshape([n if d in dims else 1 for d, n in enumerate(size)])
        expected = torch.arange(120).as_strided(size, stride, offset).numpy()
        assert (np.broadcast_to(x, size) == expected).all()


@given(st.permutations(range(4)), st.data())
@settings(max_examples=200)
def test_views_of_contiguous_memory_are_slices(order, data):
    """Slices, transposes and broadcasts in any combination are recognized, and so are reshapes of contiguous ones."""
    base = torch.arange(120).reshape(2, 3, 4, 5)
    x = base.permute(*order)
    for d in range(4):
        start = data.draw(st.integers(0, x.shape[d] - 1))
        x = x[(slice(None),) * d + (slice(start, None, data.draw(st.integers(1, 2))),)]
    x = x.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *x.shape)
    assert strided_slices(base.shape, x.shape, x.stride(), x.storage_offset()) is not None
    whole = base.reshape(6, 20)[:, 5:15].reshape(6, 2, 5).transpose(0, 2)
    assert strided_slices(base.shape, whole.shape, whole.stride(), whole.storage_offset()) is not None


def test_sliding_windows_overlap():
    assert strided_rows((4, 3), (1, 1)) is None
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


@pytest.mark.parametrize(
    "how", [([3, 2], [2, 12], 1), ([4, 2], [6, 1], 3), ([6], [1], 6), ([4], [7], 0), ([2, 2], [12, 2], 1)]
)
def test_as_strided_scatter_matches_eager(how):
    x = torch.zeros(4, 6)
    src = torch.arange(1.0, 1 + math.prod(how[0])).reshape(how[0])
    assert_rule(aten.as_strided_scatter.default, (x, src, *how), {}, aten.as_strided_scatter(x, src, *how))


@pytest.mark.parametrize(
    "arguments", [(0, 1, 3, 1), (1, -3, None, 1), (1, 1, 2**62, 2), (0, 3, 1, 1), (1, None, -1, 3)]
)
def test_slices_match_eager(arguments):
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
def test_views_under_another_dtype_match_eager(dtypes):
    source, target = dtypes
    x = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]]).to(source)
    assert_rule(aten.view.dtype, (x, target), {}, x.view(target).clone(), tolerance=0.0)


def test_zero_dimensional_views_match_eager():
    x = torch.tensor(3.0)
    assert_rule(aten.permute.default, (x, []), {}, x)
    assert_rule(aten.squeeze.dim, (x, -1), {}, x)
    assert_rule(aten.unsqueeze.default, (x, -1), {}, x[None])
    assert_rule(aten.expand.default, (x, [2, 3]), {}, x.expand(2, 3).clone())
    assert_rule(aten.sum.dim_IntList, (x, [0]), {}, x)
    assert_rule(aten.max.dim, (x, 0), {}, x.max(0))
    assert_rule(aten.gather.default, (x, 0, torch.tensor([0])), {}, x.gather(0, torch.tensor([0])))
