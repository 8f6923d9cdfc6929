"""A weight, a gradient, optimizer state, a buffer or a kept tensor gets memory of another tensor, before the first step
or between two: as in eager PyTorch, or refused at the line."""

import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning

STEPS, AFTER = 7, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("moving", torch.zeros(4))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) + self.moving


# Tensors whose memory is shared: vectors of four.
GIVERS = {
    "the weight itself": lambda run: run.model.a.bias.detach(),
    "another weight": lambda run: run.model.b.bias.detach(),
    "a row of one before it": lambda run: run.model.a.weight.detach()[1],
    "a row of one after it": lambda run: run.model.b.weight.detach()[1],
    "a gradient": lambda run: run.model.b.bias.grad,
    "a row of a gradient": lambda run: run.model.b.weight.grad[2],
    "state": lambda run: run.state(run.model.b.bias),
    "a row of state": lambda run: run.state(run.model.a.weight)[0],
    "a buffer": lambda run: run.model.moving,
    "a kept tensor": lambda run: run.place.kept,
}


def gradient(run, memory):
    run.model.a.bias.grad = memory


def data(run, memory):
    run.model.a.bias.data = memory


def state(run, memory):
    run.optimizer.state[run.model.a.bias][run.key] = memory


def buffer(run, memory):
    run.model.moving = memory


def kept(run, memory):
    run.place.kept = memory


TAKERS = [gradient, data, state, buffer, kept]
OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.05, momentum=0.5), "momentum_buffer"),
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.02), "exp_avg"),
    "on lists": (lambda p: torch.optim.SGD(p, 0.05, momentum=0.5, foreach=True), "momentum_buffer"),
}


class Run:
    def __init__(self, backend, optimizer):
        torch.manual_seed(0)
        with backend.device:
            self.model = Net()
        make, self.key = OPTIMIZERS[optimizer]
        self.optimizer = make(self.model.parameters())
        compiled = fl.compile(self.model, backend)
        self.place = types.SimpleNamespace(kept=torch.ones(4))
        run = self

        @fl.trace
        def step(x, y):
            out = compiled(x)
            loss = F.mse_loss(out * run.place.kept, y)
            loss.backward()
            run.optimizer.step()
            run.model.moving.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            run.place.kept.mul_(0.95)
            return loss

        self.step = step

    def state(self, parameter):
        return self.optimizer.state[parameter][self.key]


def cases():
    """All of them before the first step with one optimizer, and between two with another, alternating."""
    for i, (giver, taker, optimizer, late) in enumerate(itertools.product(GIVERS, TAKERS, OPTIMIZERS, (False, True))):
        marks = [] if i % 4 == 1 else [pytest.mark.sweep]
        yield pytest.param(giver, taker, optimizer, late, marks=marks)


@pytest.mark.parametrize("giver, taker, optimizer, late", list(cases()))
def test_newly_shared_memory_matches_eager_or_is_refused(giver, taker, optimizer, late, by_kernels):
    def train(backend):
        run = Run(backend, optimizer)
        generator = torch.Generator().manual_seed(1)
        results = []
        for i in range(STEPS):
            x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
            if i == 0:  # gradients and state exist before the first traced step
                F.mse_loss(run.model(x), y).backward()
                run.optimizer.step()
            if i == (AFTER if late else 0):
                taker(run, GIVERS[giver](run))
            results.append(run.step(x, y).detach().clone())
        rest = [run.model.state_dict(), [p.grad for p in run.model.parameters()], run.place.kept]
        return results, rest, [run.state(p) for p in run.model.parameters()]

    row = giver in ("a row of a gradient", "a row of state") and taker is data and not late
    itself = giver in ("a buffer", "a kept tensor") or giver == "the weight itself" and taker is data
    if row or optimizer == "on lists" and taker in (gradient, data, state) and not itself:
        with pytest.warns(EagerStepWarning, match=r"test_overlapping_memory.py:\d+: .* memory"):
            actual = train(fl.backend("XLA"))
    else:
        actual = train(fl.backend("XLA"))
    # float32, the same operations; sums in another order differ in the last places
    torch.testing.assert_close(actual, train(fl.backend("CPU")), rtol=1e-4, atol=1e-5)
