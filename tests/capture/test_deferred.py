"""The capture context: nesting, errors, generators, constants, cleanup."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import firstloss as fl
from firstloss.capture import session
from tests.capture.eager_comparison import deferred, eager


def nothing_is_left():
    return session.depth == 0 and not session.constants and _get_current_dispatch_mode() is None and gc.isenabled()


def test_an_error_in_the_constructor_ends_the_capture():
    def build():
        nn.Linear(30, 40)
        raise KeyError("user")

    torch.manual_seed(0)
    with pytest.raises(KeyError):
        build()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.raises(KeyError, match="user"):
        fl.deferred_init(build)
    assert torch.equal(torch.get_rng_state(), state)
    assert nothing_is_left()
    assert type(torch.randn(2)) is torch.Tensor


def test_contexts_can_be_nested():
    def build():
        with fl.deferred():
            first = nn.Linear(3, 3)
        return nn.ModuleList([first, fl.deferred_init(nn.Linear, 4, 4), nn.Linear(2, 2)])

    def plain():
        return nn.ModuleList([nn.Linear(3, 3), nn.Linear(4, 4), nn.Linear(2, 2)])

    (expected, state), (actual, actual_state) = eager(plain), deferred(build)
    assert state == actual_state and nothing_is_left()
    fl.materialize_module(actual)
    for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_second_context_continues_the_stream():
    expected, state = eager(lambda: [nn.Linear(3, 3), torch.rand(5), nn.Linear(4, 4)])
    torch.manual_seed(0)
    first = fl.deferred_init(nn.Linear, 3, 3)
    middle = torch.rand(5)
    second = fl.deferred_init(nn.Linear, 4, 4)
    assert torch.get_rng_state().numpy().tobytes() == state
    fl.materialize_module(second)
    fl.materialize_module(first)
    assert torch.equal(middle, expected[1])
    assert torch.equal(first.weight, expected[0].weight) and torch.equal(second.weight, expected[2].weight)


def test_a_kept_generator_state_becomes_real():
    def build():
        layer = nn.Linear(5, 5)
        layer.state = torch.get_rng_state()
        layer.next = nn.Linear(2, 2)
        return layer

    (expected, _), (actual, _) = eager(build), deferred(build)
    assert torch.equal(torch.as_tensor(actual.state), expected.state)
    torch.set_rng_state(fl.materialize_tensor(actual.state))
    again = nn.Linear(2, 2)
    fl.materialize_module(actual)
    assert torch.equal(again.weight, actual.next.weight)


def test_an_outside_generator_ends_where_eager_leaves_it():
    actual, expected = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    a = fl.deferred_init(lambda: torch.randn(33, generator=actual))
    b = torch.randn(33, generator=expected)
    assert torch.equal(actual.get_state(), expected.get_state())
    assert torch.equal(fl.materialize_tensor(a), b)


def test_draws_between_capture_and_materialization_change_nothing():
    expected, _ = eager(lambda: nn.Linear(50, 50))
    actual, _ = deferred(lambda: nn.Linear(50, 50))
    torch.randn(1000)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    fl.materialize_module(actual)
    assert torch.equal(actual.weight, expected.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_dtype_at_materialization_does_not_matter():
    def build():
        return [
            nn.Linear(3, 3),
            torch.arange(4) / 3,
            torch.full((2,), 0.5),
            torch.arange(5) * 0.1,
            torch.arange(3).sin(),
        ]

    (expected, _), (actual, _) = eager(build), deferred(build)
    torch.set_default_dtype(torch.float64)
    try:
        fl.materialize_module(actual[0])
        rest = [fl.materialize_tensor(tensor) for tensor in actual[1:]]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual[0].weight, expected[0].weight)
    for a, b in zip(expected[1:], rest, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_small_constant_edited_after_capture_is_as_it_was():
    table = torch.arange(4.0)
    result = fl.deferred_init(lambda: torch.zeros(4) + table)
    table.add_(100)
    assert fl.materialize_tensor(result).tolist() == [0, 1, 2, 3]


def test_a_large_constant_edited_after_capture_is_an_error():
    table = torch.zeros(1 << 20)
    result = fl.deferred_init(lambda: torch.zeros(1 << 20) + table)
    table.add_(100)
    with pytest.raises(fl.errors.ConstantChangedError, match=r"edited after it had been captured.*deferred.py:\d+"):
        fl.materialize_tensor(result)


def test_a_large_constant_of_numpy_is_copied():
    array = np.zeros(1 << 20, dtype=np.float32)
    table = torch.from_numpy(array)
    result = fl.deferred_init(lambda: torch.zeros(1 << 20) + table)
    array += 100
    assert fl.materialize_tensor(result).sum() == 0


def test_a_constant_edited_within_the_constructor_has_its_value_at_each_use():
    table = torch.zeros(3)

    def build():
        first = torch.ones(3) + table
        table.add_(1)
        return [first, torch.ones(3) + table]

    first, second = fl.deferred_init(build)
    assert fl.materialize_tensor(first).tolist() == [1, 1, 1]
    assert fl.materialize_tensor(second).tolist() == [2, 2, 2]


def test_loaded_weights_are_never_initialised():
    saved = {name: tensor.clone() for name, tensor in nn.Linear(30, 30).state_dict().items()}
    result = fl.deferred_init(nn.Linear, 30, 30)
    result.load_state_dict(saved)
    recipes = fl.init_program(result).recipes
    assert not recipes["weight"].draws and not recipes["bias"].draws
    fl.materialize_module(result)
    assert torch.equal(result.weight, saved["weight"])


def test_state_dicts_can_be_loaded_by_assignment():
    saved = nn.Linear(3, 3).state_dict()
    result = fl.deferred_init(nn.Linear, 3, 3)
    result.load_state_dict(saved, assign=True)
    assert not fl.is_deferred(result) and torch.equal(result.weight, saved["weight"])
    other, source = fl.deferred_init(nn.Linear, 3, 3), fl.deferred_init(nn.Linear, 3, 3)
    other.load_state_dict(source.state_dict())
    fl.materialize_module(other)
    assert torch.equal(other.weight, fl.materialize_tensor(source.weight))


def test_operations_after_the_constructor_are_recorded():
    def change(module):
        module.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)
        with torch.no_grad():
            module[1].weight.mul_(0.1)
            module[1].bias[0] = 3
        module[0].weight = module[1].weight
        module[2] = nn.Linear(4, 4)
        module.half()
        return module

    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    expected, _ = eager(build)
    expected, state = change(expected), torch.get_rng_state()
    actual, _ = deferred(build)
    actual = change(actual)
    assert torch.equal(torch.get_rng_state(), state)
    fl.materialize_module(actual)
    assert actual[0].weight is actual[1].weight
    for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_real_weight_can_get_deferred_data():
    layer = nn.Linear(3, 3)
    weight = layer.weight
    layer.weight.data = fl.deferred_init(lambda: torch.ones(3, 3))
    assert layer.weight is weight and isinstance(weight, nn.Parameter) and weight.requires_grad
    fl.materialize_module(layer)
    assert type(weight) is nn.Parameter and weight.sum() == 9


def test_parameter_subclasses_are_materialized_at_once():
    class Tagged(nn.Parameter):
        pass

    def build():
        return [torch.Tensor._make_subclass(Tagged, torch.randn(3), True), torch.randn(4)]

    (expected, state), (actual, actual_state) = eager(build), deferred(build)
    assert type(actual[0]) is Tagged and torch.equal(actual[0], expected[0])
    assert fl.is_deferred(actual[1]) and state == actual_state


@pytest.mark.parametrize("result", [None, 3, "text", [1, 2], {}, nn.ReLU()], ids=str)
def test_a_constructor_without_tensors_is_refused(result):
    with pytest.raises(fl.errors.NothingDeferredError, match=r"test_deferred.py:\d+.*contains no tensor"):
        fl.deferred_init(lambda: result)
    assert nothing_is_left()


def test_a_constructor_that_is_not_callable_is_refused():
    with pytest.raises(TypeError, match=r"test_deferred.py:\d+: deferred_init takes a constructor"):
        fl.deferred_init(nn.Linear(2, 2).weight)


def test_an_instance_instead_of_a_class_is_refused():
    with pytest.raises(TypeError, match=r"test_deferred.py:\d+: .*a Linear instance.*init\(Linear, "):
        fl.deferred_init(nn.Linear(2, 2))


def test_an_unknown_policy_is_refused():
    with pytest.raises(fl.errors.CaptureError, match="not a policy"), fl.deferred(rng="quick"):
        pass
    assert nothing_is_left()


def test_is_deferred_follows_materialization():
    module = fl.deferred_init(nn.Linear, 2, 2)
    assert fl.is_deferred(module) and fl.is_deferred(module.weight)
    fl.materialize_tensor(module.weight)
    assert fl.is_deferred(module) and not fl.is_deferred(module.weight)
    fl.materialize_module(module)
    assert not fl.is_deferred(module)
    assert not fl.is_deferred(nn.Linear(2, 2))


def test_other_threads_are_not_captured():
    results = []

    def work():
        results.append(type(torch.ones(3) + 1))

    with fl.deferred():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        inside = torch.ones(3)
    assert results == [torch.Tensor] and fl.is_deferred(inside)


def test_tensors_made_like_a_deferred_one_are_deferred():
    weight = fl.deferred_init(lambda: torch.randn(4, 3))
    assert all(fl.is_deferred(t) for t in (weight.new_zeros(0, 3), torch.empty_like(weight), torch.rand_like(weight)))
