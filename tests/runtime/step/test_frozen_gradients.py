"""A frozen weight may still have a gradient, and a step may change it like any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import compiling
from tests.fuzz.interpret import interpreted


def nothing(model):
    return None


def drop(model):
    model[0].weight.grad = None


def edit(model):
    if model[0].weight.grad is not None:
        model[0].weight.grad.mul_(0.5)


def bind(model):
    model[0].weight.grad = model[1].weight.detach().t() * 2


def zero(model):
    model.zero_grad(set_to_none=False)


def clear(model):
    model.zero_grad()


def keep(model):
    model.kept = model[0].weight.grad


def read(model):
    grad = model[0].weight.grad
    return None if grad is None else grad.sum()


DOES = [nothing, drop, edit, bind, zero, clear, keep, read]


@pytest.mark.parametrize("returned", [False, True], ids=["", "returned"])
@pytest.mark.parametrize("frozen", ["before", "between"])
@pytest.mark.parametrize("does", DOES, ids=lambda does: does.__name__)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_gradients_of_frozen_weights_match_eager(does, frozen, returned, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiling, "compile_step", interpreted)  # by PyTorch's kernels: the same bits, and fast

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        compiled = fl.compile(model, backend)

        def freeze():
            model[0].weight.grad = torch.ones(3, 3)
            model[0].weight.requires_grad_(False)

        if frozen == "before":
            freeze()

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            more = does(model)
            return loss.detach(), more, model[0].weight.grad if returned else None

        for i in range(5):
            if i == 2 and frozen == "between":
                freeze()
            if i == 4:
                model[0].weight.grad = torch.full((3, 3), 2.0)
            before = model[0].weight.grad
            loss, more, gradient = step(torch.full((2, 3), float(i)))
            now = model[0].weight.grad
            yield loss, more, now, now is None or before is None or now.data_ptr() == before.data_ptr()
            if now is not None and i == 3:  # views of its memory show the change
                now.add_(1)
                yield gradient, before, getattr(model, "kept", None)

    def seen(backend):
        return [
            tuple(part.detach().clone() if isinstance(part, torch.Tensor) else part for part in parts)
            for parts in run(backend)
        ]

    expected = seen(fl.backend("CPU"))
    actual = seen(fl.backend("XLA", artifact_dir=tmp_path))
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a, b, strict=True):
            if isinstance(x, torch.Tensor):
                # Eager PyTorch's kernels on both sides; a mean may be summed in another order.
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
            else:
                assert x == y and type(x) is type(y)


@pytest.mark.parametrize("cleared", ["never", "between", "now and then"])
@pytest.mark.parametrize("freezes", ["the step", "others", "in turns"])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_gradients_of_weights_unfrozen_in_the_step_match_eager(freezes, cleared, by_kernels) -> None:
    """When the step was traced, the weight did not require a gradient and had none."""

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(4, 3)
        compiled, kept, calls = fl.compile(model, backend), {}, [0]
        model.weight.requires_grad_(False)

        @fl.trace
        def step(x):
            calls[0] += 1
            model.weight.requires_grad_(freezes != "in turns" or calls[0] % 2 == 0)
            loss = compiled(x).square().mean()
            loss.backward()
            kept["gradient"] = model.weight.grad
            if freezes == "the step":
                model.weight.requires_grad_(False)
            return loss

        results = []
        for i in range(8):
            step(torch.full((2, 4), float(i)))
            gradient = model.weight.grad
            results.append((None if gradient is None else gradient.clone(), kept["gradient"] is gradient))
            if freezes == "others":
                model.weight.requires_grad_(False)
            if cleared == "between" or cleared == "now and then" and i % 3:
                model.weight.grad = None
        return results

    for traced, eager in zip(run(fl.backend("XLA")), run(fl.backend("CPU")), strict=True):
        torch.testing.assert_close(traced, eager)
