"""Constructor code that bypasses the dispatcher: storages, DLPack, swaps, generator states, custom kernels."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from tests.capture.eager_comparison import assert_same, assert_same_as_eager, materialize, seed_all

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


@case
def storages_copied():
    a = torch.randn(6)
    clone = a.untyped_storage().clone()
    own = torch.UntypedStorage(24)
    own.copy_(a.untyped_storage())
    double = torch.randn(6).storage().double()
    show = [torch.empty(0).set_(storage, 0, (6,), (1,)) for storage in (clone, own)]
    return [a, *show, torch.DoubleTensor(double)]


@case
def storages_written():
    storage = torch.UntypedStorage(24).fill_(1)
    storage[0] = 3
    a = torch.randn(6)
    before = a * 2
    a.untyped_storage()[2] = 7
    return [torch.empty(0, dtype=torch.uint8).set_(storage, 0, (24,), (1,)), a, before, a * 2]


@case
def shared_memory():
    layer = nn.Linear(5, 3)
    layer.share_memory()
    layer.more = nn.Linear(3, 2)
    return layer


@case
def dlpack():
    a, b, c = torch.randn(3), torch.randn(4), torch.ones(2)
    imported = torch.from_dlpack(a)
    capsule = torch.utils.dlpack.to_dlpack(b)
    imported[0] = 5
    return [a, a * 2, torch.utils.dlpack.from_dlpack(capsule) + 1, torch.from_numpy(np.from_dlpack(c).copy())]


@case
def swapped():
    a, b, c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)
    torch.utils.swap_tensors(a.weight, b.weight)
    with torch.no_grad():
        a.weight.mul_(2)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        c.half().load_state_dict(nn.Linear(4, 3).half().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return [a, b, c]


@case
def real_tensors_deep_copied():
    holder = nn.Linear(2, 2)
    holder.read = torch.randn(6)
    holder.read.numpy()
    holder.part = holder.read[1:]
    holder.array = torch.from_numpy(np.arange(3.0))
    holder.register_buffer("buffer", torch.randn(4))
    holder.buffer.data_ptr()
    return nn.ModuleList([holder, copy.deepcopy(holder)])


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(20, generator=self.generator))
        self.state = self.generator.get_state()
        self.register_buffer("as_buffer", self.generator.get_state())


@case
def states_kept():
    return nn.ModuleList([OwnGenerator(), nn.Linear(2, 2)])


# Custom operators with or without a meta kernel, which draw random numbers without saying so in the schema.
@torch.library.custom_op("firstloss_past::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("firstloss_past::noise", mutates_args=())
def noise(count: int) -> torch.Tensor:
    return torch.randn(count)


@noise.register_fake
def _(count):
    return torch.empty(count)


@torch.library.custom_op("firstloss_past::blur_", mutates_args=("x", "y"))
def blur_(x: torch.Tensor, y: torch.Tensor, by: torch.Tensor) -> None:
    x.normal_()
    y.add_(torch.rand_like(y) + by)


@case
def own_operations():
    a = torch.randn(20)
    b, c = scaled(a, 2.0), noise(20)
    x, y, array = torch.empty(30), torch.ones(4), torch.from_numpy(np.zeros(4, dtype=np.float32))
    blur_(x, y, torch.randn(4))
    blur_(x[3:9], array, y)
    return [a, b, c, x, y, array, torch.randn(3)]


@pytest.mark.parametrize("name", CASES)
def test_constructors_that_bypass_the_dispatcher_match_eager(name):
    assert_same_as_eager(CASES[name], anything=False)


def test_copies_of_generators_match_eager():
    seed_all(0)
    expected = copy.deepcopy(OwnGenerator())
    actual = fl.deferred_init(lambda: copy.deepcopy(OwnGenerator()))
    assert torch.equal(actual.generator.get_state(), expected.generator.get_state())


def test_a_generator_state_from_an_ended_capture_is_refused():
    generator = torch.Generator()
    with fl.deferred():
        torch.randn(5, generator=generator)
        state, real = generator.get_state(), torch.get_rng_state()
    with pytest.raises(fl.errors.CaptureError, match=r"test_dispatcher_bypass.py.*Generator.get_state"):
        torch.set_rng_state(state)
    torch.set_rng_state(real)


def test_deferred_tensors_swap_with_real_ones():
    seed_all(0)
    expected = [nn.Linear(3, 4), nn.Linear(3, 4)]
    seed_all(0)
    modules = [fl.deferred_init(nn.Linear, 3, 4), nn.Linear(3, 4)]
    for first, second in (expected, modules):
        torch.utils.swap_tensors(first.weight, second.weight)
    assert not fl.is_deferred(modules[0].weight) and fl.is_deferred(modules[1].weight)
    for layer in modules:
        materialize(layer)
    assert_same(expected, modules)
