"""Optimizer state that the step reads before the optimizer steps: as a gradient, in the step's own code, by a view."""

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl


class Own(torch.optim.Optimizer):
    """Keeps gradients as state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("last", p.grad)
                    p.sub_((p.grad + 0.5 * old) * group["lr"])
                    self.state[p]["last"] = p.grad


def momentum(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def gradient_is_state(model, optimizer):
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()


def state_is_gradient(model, optimizer):
    model.weight.grad = next(iter(optimizer.state[model.weight].values()))


def new_state(model, optimizer):
    key = next(iter(optimizer.state[model.weight]))
    optimizer.state[model.weight][key] = torch.full((3, 4), 0.5)


def state_of_two(model, optimizer):
    key = next(iter(optimizer.state[model.weight]))
    memory = torch.full((6, 4), 0.5)
    optimizer.state[model.weight][key] = memory[:3]
    model.weight.grad = memory[3:]


def reloaded(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def nothing(model, optimizer, held):
    return 0.0


def read(model, optimizer, held):
    return sum(t.sum() for entries in optimizer.state.values() for t in entries.values())


def edited(model, optimizer, held):
    with torch.no_grad():
        for entries in optimizer.state.values():
            for tensor in entries.values():
                tensor.mul_(0.5)
    return 0.0


def kept(model, optimizer, held):
    held[:] = [t for entries in optimizer.state.values() for t in entries.values()]
    return 0.0


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("before", [nothing, read, edited, kept])
@pytest.mark.parametrize("between", [gradient_is_state, state_is_gradient, new_state, state_of_two, reloaded])
@pytest.mark.parametrize("make", [Own, momentum])
def test_state_read_before_the_optimizer_steps_matches_eager(make, between, before, by_kernels):
    def run(backend):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer, compiled = make(model.parameters()), fl.compile(model, backend)
        batches, held = torch.Generator().manual_seed(1), []

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            more = before(model, optimizer, held)
            optimizer.step()
            optimizer.zero_grad()
            return loss + more

        losses = []
        for i in range(7):
            if i in (3, 5):
                between(model, optimizer)
            losses.append(step(torch.randn(5, 4, generator=batches)).item())
        state = [t.numpy().copy() for entries in optimizer.state.values() for t in entries.values()]
        return losses, [*state, model.weight.detach().numpy(), *(t.numpy() for t in held)]

    (traced, kept_ours), (eager, kept_eager) = run(fl.backend("XLA")), run(fl.backend("CPU"))
    np.testing.assert_allclose(traced, eager, rtol=3e-6)  # float32, other kernels: 3e-7
    for a, b in zip(kept_ours, kept_eager, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # as above: 2e-7 absolutely
