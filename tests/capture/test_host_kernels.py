"""Single kernels on weights in host memory: the same bits as PyTorch's, without the recorder."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.capture.tensor import Hooks

VIEWS = {
    "whole": lambda w: w,
    "transposed": lambda w: w.t(),
    "rows": lambda w: w[1:],
    "strided": lambda w: w[:, ::2],
    "flat": lambda w: w.view(-1),
    "as integers": lambda w: w.view(torch.int32),
}
IN_PLACE = {
    "mul_": lambda w, x: w.mul_(2),
    "add_": lambda w, x: w.add_(x, alpha=3),
    "addcmul_": lambda w, x: w.addcmul_(x, x, value=2),
    "its own argument": lambda w, x: w.add_(w),
    "copy_": lambda w, x: w.copy_(x),
    "copy_ of another dtype": lambda w, x: w.copy_(x.double()),
    "masked_fill_": lambda w, x: w.masked_fill_(x > 0, 7),
    "clamp_": lambda w, x: w.clamp_(min=0),
    "zero_": lambda w, x: w.zero_(),
    "fill_": lambda w, x: w.fill_(3),
    "neg_": lambda w, x: w.neg_(),
}
NEW = {
    "sum": lambda w, x: w + x,
    "reflected": lambda w, x: 1 - w,
    "comparison": lambda w, x: w > x,
    "promotion": lambda w, x: w * x.double(),
    "where": lambda w, x: torch.where(x > 0, w, x),
    "reduction": lambda w, x: w.sum(),
    "of both": lambda w, x: torch.maximum(w, w),
}


def assert_same_bits(ours, real):
    ours, real = ours.detach().clone().contiguous(), real.detach().contiguous()
    assert (ours.shape, ours.dtype) == (real.shape, real.dtype)
    assert torch.equal(ours.view(-1).view(torch.uint8), real.view(-1).view(torch.uint8))


@pytest.fixture
def weight(tmp_path):
    model = nn.Linear(4, 6)
    fl.compile(model, fl.backend("XLA", artifact_dir=tmp_path))
    with torch.no_grad():
        model.weight.mul_(1.0)  # from now on in host memory
    return model.weight


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
def test_a_kernel_on_a_weight_has_pytorchs_bits(name, view, weight):
    function = {**IN_PLACE, **NEW}[name]
    real = weight.detach().clone()
    with torch.no_grad():
        expected_view = VIEWS[view](real)
        x = (torch.randn(expected_view.shape) * 3).to(expected_view.dtype)
        expected = function(expected_view, x)
        ours = VIEWS[view](weight)
        result = function(ours, x)
    assert (result is ours) == (expected is expected_view)
    assert_same_bits(result, expected)
    assert_same_bits(weight, real)


@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
def test_a_kernel_on_a_weight_is_not_recorded(name, weight, monkeypatch):
    def fail(op, args, kwargs):
        raise AssertionError(f"{op} was handed to the recorder")

    x = torch.randn(weight.shape)
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(Hooks, "dispatch", staticmethod(fail))
        {**IN_PLACE, **NEW}[name](weight, x)


def test_an_error_is_pytorchs(weight):
    before = weight.detach().clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match the size"):
        weight.add_(torch.ones(5))
    assert_same_bits(weight, before)


def test_gradients_are_those_of_eager_pytorch(weight):
    real = weight.detach().clone().requires_grad_()
    x = torch.randn(3, 4)
    for w in (weight, real):
        F.gelu(F.linear(x, w * 2)).pow(2).sum().backward()
    assert_same_bits(weight.grad, real.grad)


def test_an_edit_by_a_kernel_is_seen_by_the_next_compiled_call(weight):
    model = nn.Linear(3, 2, bias=False)
    compiled = fl.compile(model, fl.backend("XLA"))
    step = fl.trace(lambda x: compiled(x).sum())
    x = torch.ones(1, 3)
    for n in range(4):
        with torch.no_grad():
            model.weight.fill_(n).mul_(2)
        assert step(x).item() == 12 * n
