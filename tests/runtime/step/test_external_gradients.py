"""Gradients assigned between steps, in any memory layout, match eager PyTorch."""

import warnings

import pytest
import torch
from torch import nn

import firstloss as fl

# For a weight of shape (3, 2), before the i-th step: a new tensor each time.
GRADIENTS = {
    "whole": lambda i: torch.full((3, 2), i + 1.0),
    "transposed": lambda i: torch.full((2, 3), i + 1.0).t(),
    "part of a larger one": lambda i: torch.full((5, 2), i + 1.0)[1:4],
    "part with another offset each time": lambda i: torch.arange(20.0).mul(i + 1)[i : i + 6].view(3, 2),
    "every second column": lambda i: torch.arange(12.0).mul(i + 1).view(3, 4)[:, ::2],
    "expanded": lambda i: torch.full((1, 1), i + 1.0).expand(3, 2),
    "whole and part in turns": lambda i: torch.full((3, 2), i + 1.0) if i % 2 else torch.full((5, 2), i + 1.0)[1:4],
    "of a larger and a smaller one": lambda i: torch.full((4 + i % 2, 2), i + 1.0)[1:4],
    "real and imaginary parts": lambda i: torch.view_as_real(torch.full((3,), complex(i + 1, -i))),
}


@pytest.fixture(params=[True, False], ids=["checked", "by guards alone"])
def trace(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.errors.GraphChangeWarning)
        yield lambda step: fl.trace(step, check=request.param)


@pytest.mark.parametrize("parameter", [True, False], ids=["parameter", "tensor"])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_a_step_reads_the_current_gradient(gradient, parameter, trace, tmp_path):
    def train(backend):
        model = nn.Module()
        weight = torch.ones(3, 2)
        model.weight = nn.Parameter(weight) if parameter else weight.requires_grad_()
        fl.compile(model, backend)
        optimizer = torch.optim.SGD([model.weight], lr=0.5)
        step = trace(lambda: optimizer.step())
        results = []
        for i in range(5):
            model.weight.grad = gradient(i)
            step()
            results.append(model.weight.detach().tolist())
        return results

    eager = train(fl.backend("CPU"))
    assert train(fl.backend("XLA", artifact_dir=tmp_path)) == eager  # sums of integers


def clip(parameters, optimizer):
    nn.utils.clip_grad_norm_(parameters, 0.1)
    optimizer.step()


def scale(parameters, optimizer):
    for p in parameters:
        p.grad.mul_(0.5)
    optimizer.step()


def zero(parameters, optimizer):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


STEPS = {"plain": lambda parameters, optimizer: optimizer.step(), "clip": clip, "scale": scale, "zero": zero}
MADE_ANEW = {
    "once": lambda i: i == 0,
    "each time": lambda i: True,
    "now and then": lambda i: i in (0, 1, 4),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("anew", MADE_ANEW.values(), ids=MADE_ANEW)
def test_gradients_may_be_views_of_one_vector(anew, step, trace, tmp_path):
    """As in data-parallel training, which reduces all of them at once."""

    def train(backend):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double()
        fl.compile(model, backend)
        parameters = list(model.parameters())
        size = sum(p.numel() for p in parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        traced = trace(lambda: step(parameters, optimizer))
        results = []
        for i in range(6):
            if anew(i):
                vector, begin = torch.zeros(size, dtype=torch.float64), 0
                for p in parameters:
                    p.grad = vector[begin : begin + p.numel()].view(p.shape)
                    begin += p.numel()
            vector.copy_(torch.arange(size) * 0.1 * (i + 1))
            if i == 5:  # one of them is removed
                parameters[0].grad = torch.ones(parameters[0].shape, dtype=torch.float64)
            traced()
            results += [*vector.tolist(), *(x for p in parameters for x in (p.sum().item(), p.grad.sum().item()))]
        return results

    eager = train(fl.backend("CPU"))
    # A norm and sums of a few numbers in another order, in float64, over six steps.
    assert train(fl.backend("XLA", artifact_dir=tmp_path)) == pytest.approx(eager, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_a_gradient_that_is_added_to_stays_the_same_object(gradient, trace, tmp_path):
    def train(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(2, 3)
        compiled = fl.compile(model, backend)
        step = trace(lambda x: compiled(x).square().sum().backward())
        results, held = [], []
        for i in range(5):
            if i == 2:
                model.weight.grad = gradient(i).contiguous() if gradient(i).stride()[0] == 0 else gradient(i)
                held.append(model.weight.grad)
            step(torch.ones(1, 2))
            results += [grad.clone() for grad in held]
        return results, model.weight.grad is held[0]

    expected = train(fl.backend("CPU"))
    torch.testing.assert_close(train(fl.backend("XLA", artifact_dir=tmp_path)), expected)  # float32
