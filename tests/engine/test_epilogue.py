"""Pointwise edits of pieces of a weight are bit-identical to editing the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstloss as fl
from firstloss.engine import reader
from firstloss.engine.plan import RangePlanner
from firstloss.program import node_kinds
from firstloss.rng import native
from tests.capture.eager_comparison import assert_same_as_eager, bytes_of

aten = torch.ops.aten
# The in-place operations whose operands are numbers, among those that may run on a range.
EDITS = [
    op
    for packet in node_kinds.EXACT
    for op in (getattr(packet, name) for name in packet.overloads())
    if op._schema.is_mutable
    and not op._schema.name.startswith("aten::masked_fill")
    and (op._overloadname in ("default", "Scalar") or op._overloadname == "Tensor" and "clamp" not in str(op))
]
ARGUMENTS = {
    aten.mul_.Tensor: (0.0282843,),
    aten.mul_.Scalar: (0.0282843,),
    aten.add_.Tensor: (0.3,),
    aten.add_.Scalar: (0.3,),
    aten.sub_.Tensor: (0.3,),
    aten.sub_.Scalar: (0.3,),
    aten.div_.Tensor: (0.7,),
    aten.div_.Scalar: (0.7,),
    aten.clamp_.default: (-0.2, 0.4),
    aten.clamp_min_.default: (-0.1,),
    aten.clamp_max_.default: (0.1,),
}


@pytest.mark.parametrize("op", sorted(EDITS, key=str), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_an_edit_can_begin_at_any_element(op, dtype):
    torch.manual_seed(0)
    whole = torch.empty(100_003, dtype=dtype).uniform_(-1, 1)
    pieces = whole.clone()
    op(whole, *ARGUMENTS.get(op, ()))
    cuts = [0, 16, 33, 4096, 32768 + 16, 65536, 70001, 99_999, 100_003]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        op(pieces[begin:end], *ARGUMENTS.get(op, ()))
    assert bytes_of(whole) == bytes_of(pieces)


def timm_trunc_normal(tensor, std=0.02):
    tensor.uniform_(-1, 1)
    tensor.erfinv_()
    tensor.mul_(std * 2**0.5)
    tensor.add_(0.0)
    tensor.clamp_(min=-2, max=2)
    return tensor


@pytest.mark.parametrize("shape", [(700, 500), (300,), (3, 5), (65536 * 2 + 5,)], ids=str)
def test_a_chain_of_edits_matches_eager(shape):
    def build():
        weight, other = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
        timm_trunc_normal(weight)
        timm_trunc_normal(other)
        return [weight, other, torch.rand(3)]

    assert_same_as_eager(build, ways=({}, {}))


def test_a_chain_with_a_visible_intermediate_matches_eager():
    def build():
        weight = torch.empty(400, 500).uniform_(-1, 1).erfinv_()
        middle = weight.clone()
        weight.mul_(0.02).clamp_(min=-0.01)
        transposed = torch.empty(300, 500).t().normal_()
        transposed.mul_(2)
        viewed = torch.empty(300, 500).normal_()
        viewed.t().mul_(3)
        viewed[0].add_(1)
        return [weight, middle, transposed, viewed]

    assert_same_as_eager(build)


@pytest.mark.skipif(not native.available(), reason="there are no native kernels for this machine")
@settings(max_examples=50)
@given(
    st.integers(0, 15),
    st.integers(0, 200),
    st.floats(-4, 4, width=32),
    st.floats(-4, 4, width=32),
    st.floats(-3, 3, width=32),
    st.floats(-3, 3, width=32),
    st.sampled_from([8, 16]),
)
def test_a_native_epilogue_matches_eager(offset, count, factor, term, low, high, width):
    source = torch.cat([torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-44]), torch.randn(200)])[:count]
    expected = source.clone().mul_(factor).add_(term).clamp_(low, high)
    room = torch.full((250,), 7.0)
    actual = room[offset : offset + len(source)]
    finish = (actual.data_ptr(), source.data_ptr(), len(source), factor, term, low, high)
    native.mul_add_clamp(*finish, width=min(width, native.lanes()))
    assert bytes_of(actual) == bytes_of(expected)
    assert (room[:offset] == 7).all() and (room[offset + len(source) :] == 7).all()


def test_other_operations_end_a_chain():
    def chain(fn):
        tensor = fl.deferred_init(lambda: fn(torch.empty(300, 300).uniform_()))
        steps = RangePlanner().plan(tensor._storage.value, False).steps
        return [edit for step in steps for edit in step.edits], tensor

    whole, _kept = chain(lambda t: t.erfinv_().mul_(3).add_(0.5).clamp_(max=2))
    assert reader.split_epilogue(whole) == (whole[:1], reader.Epilogue(3, 0.5, high=2))
    for fn, end in (
        (lambda t: t.mul_(0.5), reader.Epilogue(factor=0.5)),
        (lambda t: t.add_(0.5).mul_(2), reader.Epilogue(factor=2)),
        (lambda t: t.add_(0.5).erfinv_(), None),
        (lambda t: t.mul_(float("inf")), None),
        (lambda t: t.add_(1, alpha=2), None),
        (lambda t: t.mul_(2).clamp_(-1, 1), reader.Epilogue(2, low=-1, high=1)),
    ):
        nodes, _kept = chain(fn)
        assert reader.split_epilogue(nodes)[1] == end
