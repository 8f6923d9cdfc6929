"""Reads and writes of views of a Program's Values, against PyTorch."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.lower.dtypes import constant
from firstloss.lower.program import View, read_view, write_view
from firstloss.lower.registry import functional
from tests import scale

aten = torch.ops.aten


@st.composite
def views(draw):
    """A base tensor, dense in some order of its dimensions, and a view of it by PyTorch's own view operations."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    count = int(np.prod(shape))
    base = torch.arange(count, dtype=torch.float32).reshape([shape[d] for d in order])
    base = base.permute([order.index(d) for d in range(len(order))])
    view = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "slice", "select", "expand", "unsqueeze", "flatten", "unfold"]))
        if view.dim() == 0:
            break
        d = draw(st.integers(0, view.dim() - 1))
        if kind == "transpose":
            view = view.transpose(d, draw(st.integers(0, view.dim() - 1)))
        elif kind == "slice":
            begin = draw(st.integers(0, view.shape[d] - 1))
            end = draw(st.integers(begin + 1, view.shape[d]))
            view = view[(slice(None),) * d + (slice(begin, end, draw(st.integers(1, 3))),)]
        elif kind == "select":
            view = view.select(d, draw(st.integers(0, view.shape[d] - 1)))
        elif kind == "unsqueeze":
            view = view.unsqueeze(d)
        elif kind == "expand" and view.shape[d] == 1:
            view = view.expand([4 if i == d else -1 for i in range(view.dim())])
        elif kind == "unfold":
            view = view.unfold(d, draw(st.integers(1, view.shape[d])), draw(st.integers(1, 2)))
        elif kind == "flatten":
            try:
                view = view.view(-1)
            except RuntimeError:  # not a view for these strides
                continue
    return base, view


def geometry(base, view):
    return View(
        tuple(base.shape),
        base.stride(),
        base.dtype,
        tuple(view.shape),
        view.stride(),
        view.storage_offset(),
        view.dtype,
    )


@settings(max_examples=scale.of(60, 150))
@given(views())
def test_a_view_is_read_as_pytorch_reads_it(pair):
    base, view = pair
    with jax.enable_x64(True):
        result = read_view(jax.numpy.asarray(base.contiguous().numpy()), geometry(base, view))
    assert np.array_equal(np.asarray(result), view.numpy())


@settings(max_examples=scale.of(40, 100))
@given(views())
def test_a_view_is_written_as_pytorch_writes_it(pair):
    base, view = pair
    places = view.reshape(-1).tolist()
    if len(set(places)) < len(places):
        return  # two elements of the view share memory: PyTorch refuses to write
    new = torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape) - 100
    before = jax.numpy.asarray(base.contiguous().numpy())
    written = write_view(before, jax.numpy.asarray(new.contiguous().numpy()), geometry(base, view))
    view.copy_(new)
    assert np.array_equal(np.asarray(written), base.contiguous().numpy())


def test_complex_views_of_reals_round_trip():
    base = torch.arange(12, dtype=torch.float32).reshape(2, 3, 2)
    view = torch.view_as_complex(base)
    result = read_view(jax.numpy.asarray(base.numpy()), geometry(base, view))
    assert np.array_equal(np.asarray(result), view.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_constants_keep_their_bits(dtype):
    values = torch.tensor([[0, 1, 3], [2, 5, 7]]).to(dtype).t()
    result = constant(values)
    assert result.shape == (3, 2)
    assert np.array_equal(result.astype(np.float64), values.to(torch.float64).numpy())


@pytest.mark.parametrize(
    ("recorded", "wanted"),
    [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.add.Tensor, aten.add.Tensor),
        (aten.add.out, aten.add.Tensor),
        (aten.zero_.default, aten.zero.default),
        (aten.copy_.default, aten.copy.default),
        (aten.normal_.default, aten.normal_functional.default),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten._foreach_addcdiv_.Tensor, aten._foreach_addcdiv.Tensor),
        (aten._fused_adamw_.default, aten._fused_adamw.default),
        (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default),
    ],
)
def test_in_place_overloads_have_functional_counterparts(recorded, wanted):
    assert functional(recorded) is wanted
