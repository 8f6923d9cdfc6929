"""An optimizer's operations on a weight as one custom call."""

import functools
import re

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.lower import aten, fused_updates
from tests import compiled_steps

pytestmark = pytest.mark.skipif(
    not aten.registered_with_xla(),
    reason="the handlers are not built (python setup.py build_ext --inplace), or not here",
)

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD by Nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "AdamW, maximized": functools.partial(torch.optim.AdamW, maximize=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}
SHAPES = [(33, 32, 3, 3), (200, 50), (1025,), (1,), (0, 3)]  # the third has one element more than a block
TRANSLATED = {name: len(SHAPES) - 1 for name in OPTIMIZERS} | {"SGD": 0, "Rprop": 0}  # one operation; a sign


@pytest.fixture
def functions(monkeypatch):
    """The functions of groups of operations that have been lowered; None for one that XLA computes as before."""
    made = []
    function = fused_updates._function
    monkeypatch.setattr(fused_updates, "_function", lambda *args: made.append(function(*args)) or made[-1])
    return made


def weights():
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])


def trained(called, optimizer, factors, wrap, steps=4):
    """Train for some steps; the gradients are `factors` times the weights, without rounding other than PyTorch's."""

    @wrap
    def step():
        loss = sum((factor * weight * weight.detach()).sum() for factor, weight in zip(factors, called, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(steps):
        step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_match_eager(name, functions, backend):
    factors = [torch.rand(shape) for shape in SHAPES]
    expected = weights()
    trained(expected, OPTIMIZERS[name](expected), factors, lambda step: step)
    with backend.device:
        actual = weights()
    trained(fl.compile(actual, backend), OPTIMIZERS[name](actual.parameters()), factors, fl.trace)
    assert sum(function is not None for function in functions) >= TRANSLATED[name]
    for a, e in zip(actual, expected, strict=True):
        # Of four steps' operations, some are rounded once instead of twice by PyTorch, or in another order.
        torch.testing.assert_close(a.detach().cpu(), e.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["a number", "an argument", "one result twice"])
def test_results_that_the_call_cannot_write_are_left_to_xla(kind, functions, backend):
    with backend.device:
        model = weights()
    called = fl.compile(model, backend)

    @fl.trace
    def step():
        loss = called[0].square().sum()
        loss.backward()
        with torch.no_grad():
            first, second = called[0].detach(), torch.zeros_like(called[0])
            torch._foreach_mul_([first, first.new_ones(3)], 0.5)
            if kind == "a number":
                torch._foreach_zero_([first, first.new_ones(3)])
            elif kind == "an argument":
                torch._foreach_copy_([first, first.new_ones(3)], [called[0].grad, first.new_ones(3)])
            else:
                torch._foreach_copy_([second, first.new_ones(3)], [first, first.new_ones(3)])
        return first, second, called[0].grad * 1.0

    first, _, gradient = (x.detach().clone() for x in step())
    weight = weights()[0].detach()
    expected = {"a number": weight * 0, "an argument": weight * 2, "one result twice": weight * 0.5}[kind]
    assert torch.equal(first, expected)
    assert torch.equal(gradient, weight * 2)


class Called(nn.Module):
    """A convolution and products, whose weights are read in the forward and in the backward pass."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 32, 3, padding=1)
        self.first = nn.Linear(32 * 36, 48)
        self.second = nn.Linear(48, 48)

    def forward(self, x):
        return self.second(self.first(self.convolution(x).relu().flatten(1)).relu())


@pytest.mark.optimized
@pytest.mark.parametrize("optimizer", ["SGD with momentum", "AdamW"])
def test_weights_are_overwritten_without_a_copy(optimizer, functions, tmp_path, monkeypatch):
    monkeypatch.setattr(aten, "_mkl", aten._sets_mkl_threads)  # independent of the CPU's vendor
    monkeypatch.setattr(aten, "_LEAST_PRODUCT", 1)
    backend = fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled")
    with backend.device:
        model = Called()
    called, step_of = fl.compile(model, backend), OPTIMIZERS[optimizer](model.parameters())

    @fl.trace
    def step(x):
        loss = called(x).square().mean()
        loss.backward()
        step_of.step()
        step_of.zero_grad()
        return loss

    for _ in range(3):
        step(torch.randn(8, 3, 6, 6)).item()
    assert functions and None not in functions
    (executable,) = compiled_steps.segment_executables(compiled_steps.latest(step)).values()
    text = executable.as_text()
    assert text.count('custom_call_target="firstloss_pointwise"') == 6
    assert not re.findall(r"= f(?:32|64)\[\]\S* fusion\(.*(?:pow|sqrt)", text)  # the corrections by the step's number
    assert not re.findall(r"= f32\[(?:48,1152|48,48)\]\S* copy\(", text)


@pytest.mark.parametrize("read", ["before", "after"])
def test_a_weight_that_a_step_returns_is_not_overwritten(read, functions, backend):
    with backend.device:
        model = weights()
    called, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    @fl.trace
    def step():
        (called[0].square().sum() / 2).backward()
        old = called[0].detach() * 1.0
        optimizer.step()
        optimizer.zero_grad()
        return old if read == "before" else called[0].detach() * 1.0

    results = [step().clone() for _ in range(3)]
    weight = weights()[0].detach()
    momentum = torch.zeros_like(weight)
    for actual in results:
        old = weight
        momentum = momentum * 0.9 + weight
        weight = weight - 0.5 * momentum
        # PyTorch adds the half with one rounding instead of two.
        torch.testing.assert_close(actual, old if read == "before" else weight, rtol=1e-6, atol=1e-6)
