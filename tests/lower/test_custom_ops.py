"""Custom operators: with their own lowering, with a decomposition, and as autograd functions."""

import pytest
import torch
from jax import numpy as jnp
from torch import nn
from torch._decomp import register_decomposition

import firstloss as fl
from tests.compiled_steps import check_runs_eagerly

library = torch.library.Library("firstloss_own", "DEF")
library.define("halved(Tensor x, int places) -> (Tensor, Tensor)")
library.define("add_twice_(Tensor(a!) x, Tensor y) -> ()")
library.define("shifted(Tensor x, float by=1.5) -> Tensor")
library.define("plain(Tensor x) -> Tensor")


@torch.library.impl(library, "halved", "CompositeExplicitAutograd")
def _(x, places):
    return x / 2, x * places


@torch.library.impl(library, "halved", "Meta")
def _(x, places):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.impl(library, "add_twice_", "CompositeExplicitAutograd")
def _(x, y):
    x.add_(y, alpha=2)


@torch.library.impl(library, "add_twice_", "Meta")
def _(x, y):
    pass


@torch.library.impl(library, "shifted", "CompositeExplicitAutograd")
def _(x, by=1.5):
    return x + by


@torch.library.impl(library, "shifted", "Meta")
def _(x, by=1.5):
    return torch.empty_like(x)


@torch.library.impl(library, "plain", "CompositeImplicitAutograd")
def _(x):
    return torch.sin(x).cumsum(0)


own = torch.ops.firstloss_own


@register_decomposition(own.halved.default)
def _(x, places):
    return x / 2, (x.clone().mul_(places)).t().contiguous().t()


@register_decomposition(own.add_twice_.default)
def _(x, y):
    x += y
    x[0].add_(y[0])
    x[1:].add_(y[1:])


@torch.library.custom_op("firstloss_own::scaled_tanh", mutates_args=())
def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * torch.tanh(x)


@scaled_tanh.register_fake
def _(x, scale):
    return torch.empty_like(x)


def _tanh_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return grad * (ctx.scale - y * y / ctx.scale), None


def _tanh_setup(ctx, inputs, output):
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


scaled_tanh.register_autograd(_tanh_backward, setup_context=_tanh_setup)


@torch.library.custom_op("firstloss_own::fill_with_ramp", mutates_args={"x"})
def fill_with_ramp(x: torch.Tensor, step: float) -> None:
    x.copy_(torch.arange(x.numel()).reshape(x.shape) * step)


@fill_with_ramp.register_fake
def _(x, step):
    return None


@fl.register_lowering(scaled_tanh)
def _(x, scale):
    return scale * jnp.tanh(x)


@fl.register_lowering(own.fill_with_ramp)
def _(x, step):
    return jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) * step


@pytest.fixture
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def same(function, *args, rtol=1.3e-6):
    """Traced and eager results of `function` agree within PyTorch's tolerance between its own kernels."""
    expected = function(*[a.clone() for a in args])
    result = fl.trace(function)(*args)
    for actual, eager in zip(result, expected, strict=True):
        torch.testing.assert_close(actual.clone(), eager, rtol=rtol, atol=1e-6)


def test_a_registered_lowering_is_used_and_differentiated(backend):
    def step(x):
        x = x.clone().requires_grad_()
        y = scaled_tanh(x * 2, 3.0)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), grad

    same(step, X)


def test_a_registered_lowering_may_be_in_place(backend):
    def step(x):
        y = x.clone()
        fill_with_ramp(y[1:], 0.5)
        return (y,)

    same(step, X)


def test_a_registered_decomposition_is_used(backend):
    def step(x):
        a, b = own.halved(x, 3)
        return a, b, own.halved(a.t(), 3)[1]

    same(step, X)


def test_a_decomposition_may_write_to_an_argument(backend):
    def step(x):
        y = x.clone()
        own.add_twice_(y[1:], x[1:])
        own.add_twice_(y[1:].t(), x[1:].t())
        return (y,)

    same(step, X)


def test_a_composite_operation_needs_nothing(backend):
    same(lambda x: (own.plain(x),), X)


def test_an_operation_with_neither_runs_by_its_kernel_and_says_what_to_write():
    check_runs_eagerly(
        lambda backend, trace: trace(lambda x: own.shifted(x))(X),
        rf"firstloss_own.shifted.*{__file__}.*register_lowering",
    )


def test_a_second_lowering_must_be_requested(backend):
    with pytest.raises(ValueError, match="replace=True"):
        fl.register_lowering(own.scaled_tanh)(lambda x, scale: x)
    with pytest.raises(ValueError, match="has a lowering"):
        fl.register_lowering(torch.ops.aten.sin.default)(lambda x: x)
    with pytest.raises(TypeError, match="torch.library"):
        fl.register_lowering(lambda x: x)

    def doubled(x):
        return (scaled_tanh(x, 1.0),)

    before = fl.trace(doubled)(X)[0].clone()
    fl.register_lowering(own.scaled_tanh, replace=True)(lambda x, scale: 2 * scale * jnp.tanh(x))
    try:
        assert torch.equal(fl.trace(doubled)(X)[0].clone(), 2 * before)
    finally:
        fl.register_lowering(own.scaled_tanh, replace=True)(lambda x, scale: scale * jnp.tanh(x))


def test_a_lowering_of_another_shape_is_not_used():
    fl.register_lowering(own.shifted)(lambda x, by=1.5: jnp.zeros((7, 7)))
    try:
        check_runs_eagerly(lambda backend, trace: trace(lambda x: own.shifted(x))(X), "capture recorded")
    finally:
        from firstloss.lower.registry import RULES

        del RULES[own.shifted.default]


class Cubed(torch.autograd.Function):
    """Its backward is not its derivative, which shows whose backward was used."""

    @staticmethod
    def forward(context, x, factor):
        context.save_for_backward(x)
        context.factor = factor
        y = x**3
        context.mark_non_differentiable(y)
        return x**3 * factor, y

    @staticmethod
    def backward(context, grad, _):
        (x,) = context.saved_tensors
        return grad * x * 5 * context.factor, None


def test_an_autograd_function_keeps_its_backward(backend):
    def step(x):
        x = x.clone().requires_grad_()
        y, cubes = Cubed.apply(x.sin(), 2.0)
        y.sum().backward()
        return y.detach(), cubes, x.grad

    same(step, X)


class Straight(torch.autograd.Function):
    """The straight-through estimator in the newer style."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(context, inputs, output):
        pass

    @staticmethod
    def backward(context, grad):
        return grad


def test_an_autograd_function_in_a_model(backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return Straight.apply(self.inner(x) * 10)

    torch.manual_seed(0)
    eager = Model()
    torch.manual_seed(0)
    with backend.device:
        model = Model()
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        loss = compiled(x).square().sum()
        loss.backward()
        return loss

    result = step(X)
    expected = eager(X).square().sum()
    expected.backward()
    assert float(result) == expected.item()  # sums of squares of integers
    torch.testing.assert_close(model.inner.weight.grad.clone(), eager.inner.weight.grad, rtol=1.3e-6, atol=1e-5)
