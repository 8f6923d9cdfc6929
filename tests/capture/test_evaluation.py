"""Reading values of deferred tensors: each read computes what it needs; the rest stays deferred."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.engine import replay
from tests.capture.eager_comparison import deferred, eager

READS = {
    "item": lambda t: t[0, 0].item(),
    "float": lambda t: float(t[1, 2]),
    "int": lambda t: int(t.abs().sum() * 100),
    "bool": lambda t: bool(t[0, 0] > 0),
    "branch": lambda t: 1 if t.sum() > 0 else 2,
    "tolist": lambda t: t.tolist(),
    "str": str,
    "repr": repr,
    "format": lambda t: f"{t[0, 0]:.4f}",
    "len": len,
    "in": lambda t: 3.0 in t,
    "iterate": lambda t: [x.item() for x in t[0]],
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t, t + 1e-9),
    "nonzero": lambda t: (t > 0).nonzero().tolist(),
    "unique": lambda t: t.round().unique().tolist(),
    "isnan": lambda t: bool(t.isnan().any()),
    "index": lambda t: list(range(10))[t.abs().argmax() % 10],
    "numpy": lambda t: t.detach().numpy().tolist(),
    "asarray": lambda t: np.asarray(t.detach()).sum(),
    "complex": lambda t: complex(t[0, 0]),
    "round": lambda t: round(t[0, 0].item(), 3),
    "hash": lambda t: isinstance(hash(t), int),
    "is_nonzero": lambda t: t[0, 0].is_nonzero(),
    "count": lambda t: torch.count_nonzero(t).item(),
    "bincount": lambda t: (t > 0).long().view(-1).bincount().tolist(),
}


def model():
    return nn.ModuleList([nn.Linear(3, 4), nn.Linear(30, 40)])


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads_match_eager(read):
    expected, _ = eager(model)
    module, _ = deferred(model)
    assert read(module[0].weight) == read(expected[0].weight)
    assert fl.is_deferred(module[1].weight) and fl.is_deferred(module[0].bias)
    fl.materialize_module(module)
    for a, b in zip(expected.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads_inside_the_constructor_match_eager(read):
    def build():
        module = model()
        answer = read(module[0].weight)
        module.append(nn.Linear(2, 2))
        return module, answer

    (expected, answer), state = eager(build)
    (module, actual), our_state = deferred(build)
    assert actual == answer and state == our_state
    assert fl.is_deferred(module[2].weight)
    fl.materialize_module(module)
    assert torch.equal(module[2].weight, expected[2].weight)


def test_a_read_runs_only_the_recipe_it_needs(monkeypatch):
    module, _ = deferred(model)
    ran = []
    original = replay.Replay._run_one
    monkeypatch.setattr(replay.Replay, "_run_one", lambda self, node: (ran.append(node), original(self, node))[1])
    module[1].bias.sum().item()
    assert {node.op._schema.name for node in ran} <= {"aten::empty", "aten::uniform_", "aten::sum"}
    assert sum(node.draw is not None for node in ran) == 1


def test_the_second_read_of_a_small_value_costs_nothing(monkeypatch):
    module, _ = deferred(model)
    first = module[0].weight.tolist()
    monkeypatch.setattr(replay.Replay, "_run_one", lambda self, node: pytest.fail("computed again"))
    assert module[0].weight.tolist() == first


def test_an_edit_after_a_read_is_recorded():
    def build():
        weight = torch.randn(4, 4)
        total = weight.sum().item()
        weight.mul_(total)
        again = weight[0, 0].item()
        weight.add_(again)
        return weight

    expected, _ = eager(build)
    module, _ = deferred(build)
    assert torch.equal(fl.materialize_tensor(module), expected)


def test_numpy_shows_the_tensors_own_memory():
    module, _ = deferred(lambda: torch.randn(3))
    array = module.numpy()
    array[0] = 5
    assert module[0].item() == 5 and not fl.is_deferred(module)


def test_data_ptr_and_storage_show_the_tensors_own_memory():
    module, _ = deferred(lambda: [torch.randn(3), torch.randn(4)])
    assert module[0].data_ptr() == module[0].untyped_storage().data_ptr()
    assert not fl.is_deferred(module[0]) and fl.is_deferred(module[1])


def weights_of_all_kinds():
    a, b = torch.randn(6), nn.Linear(3, 4)
    tied = nn.Linear(3, 4)
    tied.weight = b.weight
    return [a, a[:0], a[1:], a[1:4], a.view(2, 3), b.weight, b.weight.T, b.weight[1], b.weight.detach(), tied.weight,
            b.bias, torch.empty(0), torch.zeros(6), torch.randn(6).double(), *b.state_dict().values()]  # fmt: skip


def addresses_as_names(tensors, module):
    """Addresses used as names, as in a library's module of this name."""
    space = {"__name__": module, "tensors": tensors}
    exec("found = [tensor.data_ptr() for tensor in tensors]", space)
    return space["found"]


def test_addresses_that_serve_as_names_are_equal_where_those_of_memory_are():
    expected, _ = eager(weights_of_all_kinds)
    module, _ = deferred(weights_of_all_kinds)
    reference, actual = (addresses_as_names(tensors, "accelerate.accelerator") for tensors in (expected, module))
    assert actual == addresses_as_names(module, "accelerate.accelerator")
    assert all(fl.is_deferred(tensor) for tensor in module)
    for i, j in itertools.combinations(range(len(expected)), 2):
        if expected[i].numel() and expected[j].numel():  # eager PyTorch's addresses of empty tensors are arbitrary
            assert (reference[i] == reference[j]) == (actual[i] == actual[j]), (i, j)
    reserved = set(actual)
    real = addresses_as_names(module, "another.library")
    assert not any(fl.is_deferred(tensor) for tensor in module) and not reserved & set(filter(None, real))
    assert real == addresses_as_names(module, "accelerate.accelerator")


def test_deferred_tensors_can_be_pickled_and_saved(tmp_path):
    expected, _ = eager(model)
    module, _ = deferred(model)
    again = pickle.loads(pickle.dumps(module))
    torch.save(deferred(model)[0].state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt")
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
        assert torch.equal(parameter, loaded[name])


def test_copies_made_after_the_constructor_match_eager():
    expected, _ = eager(model)
    module, _ = deferred(model)
    copied, shallow = copy.deepcopy(module), copy.copy(module[0].weight)
    assert fl.is_deferred(copied) and fl.is_deferred(shallow)
    with torch.no_grad():
        module[0].weight.add_(1)
    assert torch.equal(fl.materialize_tensor(copied[0].weight), expected[0].weight)
    assert torch.equal(fl.materialize_tensor(shallow), expected[0].weight + 1)


def test_arithmetic_with_real_tensors_matches_eager():
    expected, _ = eager(model)
    module, _ = deferred(model)
    x = torch.ones(2, 3)
    assert torch.equal(module[0](x).detach() + 0, expected[0](x).detach())
    assert torch.equal(fl.materialize_tensor(module[0](x).detach()), expected[0](x).detach())


def test_a_differentiable_view_stays_one():
    def build():
        module = nn.Linear(3, 4)
        module.turned = module.weight.t()
        return module

    (expected, _), (actual, _) = eager(build), deferred(build)
    fl.materialize_module(actual)
    for module in (expected, actual):
        (torch.ones(2, 4) @ module.turned.t() * 3).sum().backward()
    assert torch.equal(actual.weight.grad, expected.weight.grad)


def test_the_repr_matches_torchs():
    (expected, _), (module, _) = eager(model), deferred(model)
    assert repr(module[0].weight) == repr(expected[0].weight)
    assert repr(module) == repr(expected)
    assert fl.is_deferred(module[0].weight)
