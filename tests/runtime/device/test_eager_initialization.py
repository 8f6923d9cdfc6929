"""`lazy_initialization = False`: the same weights, with at most one module's weights on the host."""

import copy

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture.tensor import DeferredTensor
from tests.small_training import training_step


def on_host(tensors):
    """The bytes of `tensors` in host memory, pending edits included."""
    total = 0
    for t in tensors:
        if type(t) is not DeferredTensor:
            total += t.numel() * t.itemsize
        elif t._storage.resident._edited:
            total += t._storage.resident._host.numel() * t.itemsize
    return total


class Block(nn.Module):
    """Two layers and a weight of its own, which is filled after its layers."""

    created: list = []
    most = 0

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(64))
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.scale)
        Block.created += list(self.parameters())
        Block.most = max(Block.most, on_host(Block.created))


class Model(nn.Module):
    def __init__(self, tie=False):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(6)])
        self.norm = nn.LayerNorm(64)
        self.register_buffer("table", torch.arange(64.0), persistent=False)
        self.head = nn.Linear(64, 64, bias=False)
        if tie:
            self.head.weight = self.blocks[0].first.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            Block.most = max(Block.most, on_host(Block.created))

    def forward(self, x):
        for block in self.blocks:
            x = x + block.second(block.first(x)) * block.scale
        return self.head(self.norm(x)) * self.table


def construct(backend, make):
    backend.device.config.lazy_initialization = False
    torch.manual_seed(0)
    with backend.device:
        return make()


def equal(a, b):
    traced, eager = dict(a.state_dict()), dict(b.state_dict())
    assert traced.keys() == eager.keys()
    return all(torch.equal(traced[name].clone(), eager[name]) for name in traced)


def test_the_host_holds_the_weights_of_one_module_at_a_time(backend):
    Block.created, Block.most = [], 0
    model = construct(backend, Model)
    sizes = [sum(p.numel() * p.itemsize for p in m.parameters(recurse=False)) for m in model.modules()]
    assert 0 < Block.most <= max(sizes)
    assert sum(sizes) > 10 * max(sizes)
    assert all(type(t) is DeferredTensor for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("tie", [False, True])
def test_the_weights_are_those_of_eager_construction(backend, tie):
    model = construct(backend, lambda: Model(tie))
    ended = torch.get_rng_state()
    torch.manual_seed(0)
    reference = Model(tie)
    assert torch.equal(ended, torch.get_rng_state())
    assert equal(model, reference)
    assert (model.head.weight is model.blocks[0].first.weight) == tie
    assert isinstance(model.head.weight, nn.Parameter)


def test_training_matches_eager(backend):
    model = construct(backend, Model)
    torch.manual_seed(0)
    reference = Model()
    step = training_step(fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=1e-6))
    eager = torch.optim.SGD(reference.parameters(), lr=1e-6)
    x = torch.randn(2, 64)
    for _ in range(3):
        expected = reference(x).square().mean()
        expected.backward()
        eager.step()
        eager.zero_grad()
        # float32 sums in another order
        torch.testing.assert_close(step(x).clone(), expected.detach(), rtol=1e-5, atol=0)


def test_a_weight_with_other_writers_is_moved_later(backend):
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.zeros(8)
            self.weight = nn.Parameter(memory)
            self.other = nn.Linear(4, 4)
            self.third = nn.Linear(4, 4)
            memory.fill_(3)

    model = construct(backend, Filled)
    assert type(model.weight) is DeferredTensor and model.weight.tolist() == [3.0] * 8


def test_copies_and_assigned_weights_match_eager(backend):
    def make():
        layer = nn.Linear(4, 4)
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight.copy_(layer.weight * 2)
            layer.weight.copy_(layer.weight)
        return nn.ModuleList([layer, twin, nn.Linear(2, 2)])

    model = construct(backend, make)
    torch.manual_seed(0)
    assert equal(model, make())


def test_a_failed_fill_keeps_the_old_values(backend):
    model = construct(backend, lambda: nn.Linear(4, 4))
    before = model.weight.tolist()
    with pytest.raises(RuntimeError, match="std"), torch.no_grad():
        model.weight.normal_(0, -1)
    assert model.weight.tolist() == before


def test_an_edited_weight_is_in_memory_once(backend):
    model = construct(backend, lambda: nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))
    with torch.no_grad():
        for layer in model:
            layer.weight += 1
            layer.weight[0] = 5
    buffers = [layer.weight._storage.resident for layer in model]
    assert all(buffer.is_exported and buffer.newest is None and buffer._host is None for buffer in buffers)
    assert all(layer.weight[0].tolist() == [5.0] * 4 for layer in model)
    torch._foreach_mul_([layer.weight.data for layer in model], 2)
    assert all(layer.weight[0].tolist() == [10.0] * 4 for layer in model)


def converted(model):
    return model.half()


def loaded(model):
    model.load_state_dict({name: torch.ones_like(t) for name, t in nn.Linear(4, 4).state_dict().items()})
    return model


@pytest.mark.parametrize("change", [converted, loaded])
def test_weights_can_be_swapped_during_construction(change, backend):
    """`torch.utils.swap_tensors` refuses tensors that have weak references."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        torch.manual_seed(0)
        model = construct(backend, lambda: change(nn.Linear(4, 4)))
        torch.manual_seed(0)
        assert equal(model, change(nn.Linear(4, 4)))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_lazy_modules_get_their_shape_later(backend):
    model = construct(backend, lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    assert model(torch.ones(3, 5)).shape == (3, 2)
