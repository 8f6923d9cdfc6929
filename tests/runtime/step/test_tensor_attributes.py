"""A returned or kept tensor has its gradient and its attributes."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl

STEPS = 5


def retained(model, x):
    hidden = model[0](x)
    hidden.retain_grad()
    return hidden, hidden


def new_leaf(model, x):
    delta = torch.zeros_like(x, requires_grad=True)
    return delta, model[0](x + delta)


def constant_leaf(model, x):
    delta = torch.full((4,), 0.5, requires_grad=True)
    return delta, model[0](x + delta)


def detached_argument(model, x):
    leaf = x.detach().requires_grad_()
    return leaf, model[0](leaf)


def computed_leaf(model, x):
    leaf = (x * 2).detach().requires_grad_()
    return leaf, model[0](leaf)


def no_gradient(model, x):
    return (x * 2).detach(), model[0](x)


TENSORS = [retained, new_leaf, constant_leaf, detached_argument, computed_leaf, no_gradient]


def nothing(tensor, loss):
    pass


def a_tensor(tensor, loss):
    tensor.aux = loss.detach() * 2


def tensors_in_a_list(tensor, loss):
    tensor.aux = [loss.detach() + 1, 7]


def itself(tensor, loss):
    tensor.aux = tensor


ATTRIBUTES = [nothing, a_tensor, tensors_in_a_list, itself]


@pytest.mark.parametrize("kept", ["returned", "left", "in a list"])
@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("make", TENSORS)
def test_a_kept_tensor_has_its_gradient_and_attributes(make, attribute, kept, by_kernels):
    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        place = types.SimpleNamespace(held=None)

        @fl.trace
        def step(x, y):
            tensor, hidden = make(model, x)
            loss = F.mse_loss(model[1](hidden), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            attribute(tensor, loss)
            if kept == "returned":
                return tensor
            place.held = tensor if kept == "left" else [tensor]
            return loss

        results, older = [], []
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
            result = step(x, y)
            tensor = {"returned": result, "left": place.held}[kept] if kept != "in a list" else place.held[0]
            older.append(tensor)
        for tensor in older:  # each is unchanged by later steps
            aux = getattr(tensor, "aux", None)
            gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            results.append([tensor.detach(), gradient, tensor.requires_grad, aux is tensor])
            results.append(aux if aux is not tensor else None)
        return results

    # By the same kernels; a sum may be in another order. Measured: 2.4e-7.
    torch.testing.assert_close(run(fl.backend("XLA")), run(fl.backend("CPU")), rtol=0, atol=2.4e-6)


@pytest.mark.parametrize("make", [retained, new_leaf])
def test_the_next_step_reads_a_kept_tensors_gradient(make, by_kernels):
    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        fl.compile(model, backend)
        place = types.SimpleNamespace(held=None)

        @fl.trace
        def step(x, y):
            tensor, hidden = make(model, x)
            factor = 1.0 if place.held is None else 1.0 + place.held.grad.sum()
            loss = F.mse_loss(model[1](hidden), y) * factor
            loss.backward()
            place.held = tensor
            return loss

        generator = torch.Generator().manual_seed(1)
        return [
            step(torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)).detach()
            for _ in range(STEPS)
        ]

    torch.testing.assert_close(run(fl.backend("XLA")), run(fl.backend("CPU")))
