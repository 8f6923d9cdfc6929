"""Tensors whose size, storage or identity is changed in a deferred constructor."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.rng.mt19937 import LAYOUT

SHARING = ["{t}[1:]", "{t}.view(-1)", "{t}.detach()", "{t}.reshape(2, -1)", "{t}.view(torch.int32)", "{t}.t()"]
SHARING += ["{t}[::2]", "{t}.data"]
SIZES = ["(2, 2)", "(5,)", "(3, 4)", "(40,)", "(0,)", "(2, 3, 2, 5)", "(2, 3, 2, 5), memory_format=torch.channels_last"]


def statements(seed):
    """Statements that create tensors sharing a storage, resize some of them, and write to them."""
    rng = random.Random(seed)
    lines, names = [f"a = torch.arange({rng.choice([0, 1, 6, 24])}.) + 1"], ["a"]
    for i in range(rng.randint(2, 6)):
        t, kind = rng.choice(names), rng.random()
        if kind < 0.5:
            lines.append(f"b{i} = {rng.choice(SHARING).format(t=t)}")
            names.append(f"b{i}")
        elif kind < 0.75:
            lines.append(f"{t}.resize_({rng.choice(SIZES)})")
        elif kind < 0.85:
            lines.append(f"{t}.resize_as_({rng.choice(names)})")
        else:
            lines.append(rng.choice(["a.mul_(2)", f"{t}.zero_()", f"{t}.fill_(3)"]))
    return lines


def run(lines):
    """The tensors of a program by name, and the statements that PyTorch accepts."""
    scope, done = {"torch": torch}, []
    for line in lines:
        try:
            exec(line, scope)
        except (RuntimeError, NameError):
            continue
        done.append(line)
    return {name: value for name, value in scope.items() if isinstance(value, torch.Tensor)}, done


def geometry(tensors):
    return {name: (t.shape, t.stride(), t.storage_offset(), t.dtype) for name, t in tensors.items()}


def written(tensor):
    """The written elements, as floats: PyTorch can be told to fill uninitialized memory with NaN."""
    return tensor.detach().reshape(-1).float()


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_resizing_keeps_storages_shared(first):
    seen = 0
    for seed in range(first, first + 50):
        torch.use_deterministic_algorithms(True)
        try:
            expected, done = run(statements(seed))
        finally:
            torch.use_deterministic_algorithms(False)
        seen += any("resize" in line for line in done)
        with fl.deferred():
            actual, also_done = run(done)
        assert also_done == done
        assert geometry(actual) == geometry(expected), done
        names = list(actual)
        random.Random(seed).shuffle(names)
        for name in names:
            fl.materialize_tensor(actual[name])
        for name, tensor in expected.items():
            if tensor.dtype == torch.float32:
                kept = ~written(tensor).isnan()
                assert torch.equal(written(tensor)[kept], written(actual[name])[kept]), (name, done)
        for one, other in itertools.combinations(expected, 2):
            shared = [t[one].untyped_storage()._cdata == t[other].untyped_storage()._cdata for t in (expected, actual)]
            assert shared[0] == shared[1], (one, other, done)
    assert seen > 20


DATA = {
    "alike": lambda: torch.full((4,), 2.0),
    "larger": lambda: torch.randn(7),
    "another dtype": lambda: torch.randn(4, dtype=torch.float64),
    "complex": lambda: torch.randn(2, 3, dtype=torch.complex64),
}


@pytest.mark.parametrize("real", ["weight", "data", "neither"])
@pytest.mark.parametrize("data", DATA)
def test_a_weight_keeps_the_gradient_that_it_had_before_its_data_was_assigned(data, real):
    def construct():
        layer = outside if real == "weight" else nn.BatchNorm1d(4)
        layer.weight.grad = torch.ones_like(layer.weight)
        layer.weight.data = content if real == "data" else DATA[data]()
        return layer

    result = []
    for build in (lambda: construct(), lambda: fl.materialize_module(fl.deferred_init(construct))):
        torch.manual_seed(0)
        outside, content = nn.BatchNorm1d(4), DATA[data]()
        result.append(build().weight)
    assert torch.equal(*result)
    assert torch.equal(result[0].grad, result[1].grad)
    assert result[0].dtype == result[1].dtype and result[0].grad.dtype == result[1].grad.dtype


FREEZE = {
    "requires_grad_": lambda p: p.requires_grad_(False),
    "requires_grad": lambda p: setattr(p, "requires_grad", False),
    "data first": lambda p: (setattr(p, "data", p.data.double()), p.requires_grad_(False)),
    "edited again": lambda p: (p.requires_grad_(False), p.fill_(2.0)),
}


@pytest.mark.parametrize("freeze", FREEZE)
def test_a_view_of_a_weight_that_is_frozen_after_an_edit_keeps_its_history(freeze):
    def construct():
        layer = nn.Linear(3, 3)
        layer.part = layer.weight.narrow(0, 1, 2)
        nn.init.ones_(layer.weight)
        FREEZE[freeze](layer.weight)
        layer.row = layer.part[0]
        return layer

    actual, expected = fl.deferred_init(construct), construct()
    for _ in range(2):
        for name in ("part", "row"):
            assert getattr(actual, name).requires_grad and getattr(expected, name).requires_grad
            assert not getattr(actual, name).is_leaf and not getattr(expected, name).is_leaf
        assert not actual.weight.requires_grad
        fl.materialize_module(actual)
    assert torch.equal(actual.part, expected.part) and torch.equal(actual.row, expected.row)


@pytest.mark.parametrize("content", ["deferred", "real"])
@pytest.mark.parametrize("computed", ["deferred", "real"])
def test_a_computed_tensor_whose_data_is_assigned_is_still_no_leaf(computed, content):
    def construct():
        weight = outside if computed == "real" else nn.Parameter(torch.ones(2))
        layer = nn.Module()
        layer.computed = weight * 2
        layer.content = new if content == "real" else torch.randn(2)
        layer.computed.data = layer.content
        layer.content.add_(1)
        return layer

    results = []
    for build in (lambda: construct(), lambda: fl.deferred_init(construct)):
        torch.manual_seed(0)
        outside, new = nn.Parameter(torch.ones(2)), torch.randn(2)
        results.append(build())
    expected, actual = results
    for name in ("computed", "content"):
        fl.materialize_tensor(getattr(actual, name))
    assert not actual.computed.is_leaf and not expected.computed.is_leaf
    assert torch.equal(actual.computed, expected.computed) and torch.equal(actual.content, expected.content)
    actual.content.mul_(2)
    assert torch.equal(actual.computed, actual.content)


QUIRKS = {
    "a parameter that is no leaf": lambda: copy.deepcopy(no_leaf()),
    "integers that are none": lambda: torch.randn_like(torch.ones(0, 3, dtype=torch.int64)),
}


def no_leaf():
    layer = nn.LayerNorm(4)
    layer.weight.requires_grad_(False).copy_(layer.bias)
    return layer


@pytest.mark.parametrize("quirk", QUIRKS)
def test_changes_that_pytorch_allows_match_eager(quirk):
    expected = QUIRKS[quirk]()
    with fl.deferred():
        actual = QUIRKS[quirk]()
    if isinstance(actual, nn.Module):
        fl.materialize_module(actual)
        actual, expected = actual.weight, expected.weight
    assert torch.equal(fl.materialize_tensor(actual), expected) and actual.dtype == expected.dtype


def nonsense():
    record = np.frombuffer(torch.get_rng_state().numpy().tobytes(), LAYOUT).copy()
    record["left"], record["next"] = 449, 0  # PyTorch accepts it
    torch.set_rng_state(torch.from_numpy(record.view(np.uint8)))
    return torch.randn(3)


REFUSED = {
    "an element in several places": (lambda: nn.init.eye_(torch.zeros(3).expand(2, 3)), "expanded tensor"),
    "a state that is none": (nonsense, "not a valid state"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_changes_name_the_users_line(name):
    state = torch.get_rng_state()
    construct, what = REFUSED[name]
    try:
        with pytest.raises(fl.errors.CaptureError, match=rf"test_storage_swap.py:\d+: .*{what}"):
            fl.deferred_init(construct)
    finally:
        torch.set_rng_state(state)


def swapped(of_view, second):
    base = torch.arange(16.0)
    first = base.reshape(-1) if of_view else base
    other = first.unfold(0, 2, 1) if second == "view" else torch.randn(3)
    first.mark = "first"
    torch.utils.swap_tensors(first, other)
    return base, first, other


@pytest.mark.parametrize("of_view, second", [(True, "view"), (True, "apart"), (False, "apart")])
def test_swapped_tensors_match_eager(of_view, second):
    torch.manual_seed(0)
    expected = swapped(of_view, second)
    torch.manual_seed(0)
    with fl.deferred():
        actual = swapped(of_view, second)
    for one, other in zip(expected, actual, strict=True):
        assert getattr(one, "mark", None) == getattr(other, "mark", None)
        assert torch.equal(one, fl.materialize_tensor(other))


def test_a_gradient_for_a_swapped_tensor_is_an_error():
    with fl.deferred():
        weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        total = weight.sum()
        torch.utils.swap_tensors(weight, other)
    with pytest.raises(RuntimeError, match="swap_tensors has swapped"):
        total.backward()
    assert weight.grad is None and other.grad is None


def test_a_real_tensor_set_to_a_computed_one_gets_its_history():
    def construct():
        layer = nn.Linear(2, 2)
        layer.kept = outside.clone()
        layer.kept.set_(layer.bias.double())
        return layer

    outside = torch.zeros(2, dtype=torch.float64)
    result = []
    for build in (construct, lambda: fl.materialize_module(fl.deferred_init(construct))):
        torch.manual_seed(0)
        result.append(build().kept)
    assert torch.equal(*result)
    assert result[0].requires_grad and result[1].requires_grad


def test_a_view_may_get_other_data_in_no_grad_mode():
    def construct():
        layer = nn.Linear(4, 4)
        flat = nn.utils.parameters_to_vector(layer.parameters())
        layer.view = flat.squeeze()
        flat.add_(flat, alpha=3)
        with torch.no_grad():
            layer.view.set_(flat)
        layer.view.masked_fill_(layer.view > 0.5, 2.0)
        return layer

    result = []
    for build in (construct, lambda: fl.deferred_init(construct)):
        torch.manual_seed(0)
        result.append(build().view)
    assert torch.equal(result[0], fl.materialize_tensor(result[1]))
