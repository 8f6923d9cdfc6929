"""Hooks of the nodes that accumulate gradients, which Python holds while their weights become other tensors of C++."""

import gc
import itertools
import weakref

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.optim import _apply_optimizer_in_backward

import firstloss as fl


def _node(weight):
    return weight.view_as(weight).grad_fn.next_functions[0][0]


def _sgd_after(weights, held):
    for weight in weights:
        node = _node(weight)

        def update(*_, weight=weight):
            with torch.no_grad():
                weight.add_(weight.grad, alpha=-0.1)
                weight.grad = None

        node.register_hook(update)
        held.append(node)


def _sgd_of_torch(weights, held):
    _apply_optimizer_in_backward(torch.optim.SGD, weights, {"lr": 0.1})


def _changed_before(weights, held):
    for weight in weights:
        node = get_gradient_edge(weight).node
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
        held.append(node)


def _removed(weights, held):
    for weight in weights:
        node = _node(weight)
        handle = node.register_prehook(lambda gradients: (gradients[0] * 2.0,))
        held += [node, handle]


def _counted_twice(weights, held):
    """Two hooks, one of them registered through another reference to the node."""
    for weight in weights:

        def halve(*_, weight=weight):
            weight.grad *= 0.5

        def move(*_, weight=weight):
            weight.grad += 0.25

        held.append(_node(weight))
        held[-1].register_hook(halve)
        _node(weight).register_hook(move)


KINDS = [_sgd_after, _sgd_of_torch, _changed_before, _removed, _counted_twice]


def _model():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def _run(register, when, route):
    """The weights after each call of a step; `when` the hooks are registered."""
    held = []
    if route == "eager" or when != "deferred":
        model = _model()
    else:
        model = fl.deferred_init(_model)
    weights = list(model.parameters())
    if when in ("deferred", "before"):
        register(weights, held)
    if route == "materialized":
        fl.materialize_module(model)
    elif route != "eager":
        fl.compile(model, fl.backend("XLA"))
    if when == "after":
        register(weights, held)
    seen = []

    def step(x):
        loss = model(x).square().mean()
        if route == "untraced":
            seen.append(loss.detach().numpy().copy())
        loss.backward()
        if register not in (_sgd_after, _sgd_of_torch):
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad
                    weight.grad = None

    run = fl.trace(step) if route in ("traced", "untraced") else step
    results = []
    for call in range(7):
        if when == f"at {call}":
            register(weights, held)
        if call == 5 and register is _removed:
            [handle.remove() for handle in held[1::2]]
        run(torch.ones(3, 2) * (1 + call) / 4)
        results.append([weight.detach().clone() for weight in weights])
    return results


@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("register", KINDS)
@pytest.mark.parametrize(
    "when, route",
    [
        ("deferred", "materialized"),
        *itertools.product(("deferred", "before", "after"), ("moved", "traced", "untraced")),
        ("at 1", "untraced"),
        ("at 1", "traced"),
        ("at 4", "traced"),
        ("at 4", "untraced"),
    ],
)
def test_hooks_of_held_nodes_run_as_in_eager_pytorch(register, when, route):
    expected, results = _run(register, when, "eager"), _run(register, when, route)
    for one, other in zip(expected, results, strict=True):
        torch.testing.assert_close([w + 0.0 for w in other], one)


def test_nodes_are_followed_no_longer_than_python_holds_them():
    model = _model()
    node = _node(model.weight)
    calls = []

    class Hook:
        def __call__(self, *_):
            calls.append(model.weight.grad.clone())

    node.register_hook(hook := Hook())
    seen = weakref.ref(hook)
    del hook
    fl.compile(model, fl.backend("XLA"))
    model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 1
    del node
    gc.collect()
    model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 1 and seen() is None


@pytest.mark.parametrize("use", ["frozen", "in inference mode"])
def test_a_weight_that_becomes_real_where_no_graph_is_recorded(use):
    model = fl.deferred_init(_model)
    held = []
    _sgd_after([model.weight], held)
    if use == "frozen":
        model.weight.requires_grad_(False)
        fl.materialize_module(model)
        model.weight.requires_grad_(True)
    else:
        with torch.inference_mode():
            model(torch.ones(1, 2))
    assert not fl.is_deferred(model.weight)
    expected = model.weight.detach() - 0.1
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight, expected) and model.weight.grad is None
