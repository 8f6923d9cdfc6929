"""Hooks of tensors that move to the backend or are materialized. The C++ tensor under the Python object is then
replaced, and `register_hook` passes its dict of hooks to autograd only when it creates the dict."""

import operator

import pytest
import torch
from torch import nn

import firstloss as fl

REGISTER = {
    "register_hook": lambda p, told: p.register_hook(lambda g: told.append("g") or g * 0.5),
    "register_post_accumulate_grad_hook": lambda p, told: p.register_post_accumulate_grad_hook(
        lambda p: (told.append("p"), p.grad.mul_(0.5)) and None
    ),
}
# Before the tensor moves: nothing; a hook registered and removed; a hook that stays.
BEFORE = {
    "": lambda register, p, told: None,
    "removed": lambda register, p, told: register(p, told).remove(),
    "kept": lambda register, p, told: register(p, told),
    "frozen_since": lambda register, p, told: (register(p, told).remove(), p.requires_grad_(False)),
}


def trained(backend, register, before, replaced):
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(3, 2)
    if replaced:
        model.weight = nn.Parameter(torch.full((2, 3), 0.5))
    calls, losses = [], []
    before(register, model.weight, calls)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        model.weight.requires_grad_()
        hook = register(model.weight, calls)
        loss = compiled(x).square().mean()
        loss.backward()
        hook.remove()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad()
        return loss

    for i in range(4):
        if i == 2:
            model.register_buffer("late", torch.ones(()))  # it is traced again
        losses.append(step(torch.ones(2, 3)).item())
    return losses


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_registered_after_the_move_runs(kind, before, replaced):
    eager = trained(fl.backend("CPU"), REGISTER[kind], BEFORE[before], replaced)
    traced = trained(fl.backend("XLA"), REGISTER[kind], BEFORE[before], replaced)
    torch.testing.assert_close(traced, eager, rtol=1e-5, atol=0)  # float32, four steps


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_registered_after_materialization_runs(kind, before):
    def grad(deferred):
        torch.manual_seed(0)
        calls = []
        if deferred:
            with fl.deferred():
                model = nn.Linear(3, 2)
                BEFORE[before](REGISTER[kind], model.weight, calls)
            fl.materialize_module(model)
        else:
            model = nn.Linear(3, 2)
            BEFORE[before](REGISTER[kind], model.weight, calls)
        model.weight.requires_grad_()
        REGISTER[kind](model.weight, calls)
        model(torch.ones(2, 3)).sum().backward()
        return model.weight.grad, calls

    (actual, calls), (expected, told_eagerly) = grad(True), grad(False)
    assert torch.equal(actual, expected) and calls == told_eagerly


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_two_hooks_share_one_object_from_the_first_call(register, by_kernels):
    """The objects that hooks use are known before they run: the second hook is registered after the first has stored
    some."""

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(4, 3)
        compiled, kept = fl.compile(model, backend), [{}, {}]

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            model.zero_grad()
            return loss

        results = []
        for i in range(6):
            if i in (1, 3):
                held = kept[i // 2]
                if register == "register_hook":
                    model.weight.register_hook(lambda g, held=held: held.update(g=g))
                else:
                    model.weight.register_post_accumulate_grad_hook(lambda p, held=held: held.update(g=p.grad))
            step(torch.ones(2, 4))
            a, b = (held.get("g") for held in kept)
            results.append((a is None, b is None, a is b))
        return results

    assert run(fl.backend("XLA")) == run(fl.backend("CPU"))


def test_a_hook_of_an_abandoned_trace_is_forgotten():
    """A number has changed that cannot be an input (an index), so the step is traced with it, and then without."""

    class Index:
        value = 0

        def __index__(self):
            return self.value

    def run(backend):
        index, second = Index(), operator.itemgetter
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled = fl.compile(model, backend)

        @fl.trace
        def step(x):
            handle = model.weight.register_hook(lambda g: g * 0.5)
            (compiled(x).sum() * second(index)([1.0, 4.0])).backward()
            handle.remove()
            gradient = model.weight.grad.clone()
            model.weight.grad = model.bias.grad = None
            return gradient

        results = []
        for call in range(5):
            index.value = int(call >= 3)
            results.append(step(torch.ones(2, 3)).tolist())
        return results

    assert run(fl.backend("XLA")) == run(fl.backend("CPU"))
