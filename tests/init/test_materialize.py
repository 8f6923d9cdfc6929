"""Materialization of all or some weights, in any order, with any number of threads, keeping the Python objects."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import materialize_tensors
from firstloss.engine import cpu_engine
from tests.capture.eager_comparison import assert_same, deferred, eager, tensors_of


def build():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Embedding(300, 40, padding_idx=0),
        nn.Linear(40, 300, bias=False),
        nn.BatchNorm1d(40),
        nn.LSTM(40, 20),
        nn.Linear(400, 500),
        nn.Linear(500, 400).bfloat16(),
    )
    model[1].weight = model[0].weight
    nn.init.trunc_normal_(model[4].weight, std=1.0)
    with torch.no_grad():
        model[4].bias.copy_(model[4].weight[:, 0])
        model[5].weight[3:5] *= 2
    model.turned = model[4].weight.detach().t()
    model.rope = 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8))
    return model


@pytest.mark.parametrize("seed", range(5))
def test_weights_can_be_materialized_in_any_order(seed):
    (expected, _), (actual, _) = eager(build), deferred(build)
    tensors = [tensor for _, tensor in tensors_of(actual)]
    order = random.Random(seed)
    order.shuffle(tensors)
    for tensor in tensors[: order.randrange(len(tensors))]:
        assert fl.materialize_tensor(tensor) is tensor
    fl.materialize_module(actual)
    assert_same(expected, actual)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_does_not_matter(threads):
    (expected, _), (actual, _) = eager(build), deferred(build)
    fl.materialize_module(actual, num_threads=threads)
    assert_same(expected, actual)


@pytest.mark.parametrize("size", [65536 * 2 - 1, 65536 * 2, 65536 * 2 + 1, 65536 * 3 + 17, 65536 * 5 + 3], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_fills_can_be_split_anywhere(size, threads):
    def fills():
        out = [torch.empty(size // 7).normal_()]
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            out.append(torch.empty(size, dtype=dtype).uniform_(-1, 2))
            out.append(torch.empty(size, dtype=dtype).normal_(0.5, 0.02))
        holder = nn.Module()
        holder.out = out
        return holder

    (expected, _), (actual, _) = eager(fills), deferred(fills)
    fl.materialize_module(actual, num_threads=threads)
    assert_same(expected, actual)


def test_buffers_only_leaves_parameters_deferred():
    (expected, _), (actual, _) = eager(build), deferred(build)
    fl.materialize_module(actual, buffers_only=True)
    assert all(not fl.is_deferred(buffer) for buffer in actual.buffers())
    assert fl.is_deferred(actual[3].weight_ih_l0)
    fl.materialize_module(actual)
    assert_same(expected, actual)


def test_check_fn_chooses_modules():
    (expected, _), (actual, _) = eager(build), deferred(build)
    fl.materialize_module(actual, check_fn=lambda module: isinstance(module, nn.LSTM))
    assert not any(fl.is_deferred(parameter) for parameter in actual[3].parameters())
    assert fl.is_deferred(actual[4].weight) and fl.is_deferred(actual[2].running_mean)
    fl.materialize_module(actual, check_fn=lambda module: module is actual)  # its own tensors, not its children's
    assert not fl.is_deferred(actual.rope) and fl.is_deferred(actual[2].running_mean)
    fl.materialize_module(actual)
    assert_same(expected, actual)


def test_an_optimizer_built_before_works_after():
    def train(model, optimizer):
        loss = (model(torch.ones(2, 4)) ** 2).sum()
        loss.backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def small():
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))

    expected, _ = eager(small)
    module, _ = deferred(small)
    before = [id(parameter) for parameter in module.parameters()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (expected, module)]
    fl.materialize_module(module)
    assert [id(parameter) for parameter in module.parameters()] == before
    for a, b in zip(train(expected, optimizers[0]), train(module, optimizers[1]), strict=True):
        assert torch.equal(a, b)


def test_gradients_hooks_and_attributes_are_kept():
    layer = fl.deferred_init(nn.Linear, 3, 3)
    layer.weight.tag = "kept"
    layer.weight.grad = torch.ones(3, 3)
    calls = []
    layer.register_forward_hook(lambda *a: calls.append(1))
    fl.materialize_module(layer)
    assert layer.weight.tag == "kept" and layer.weight.grad.sum() == 9
    layer(torch.ones(1, 3))
    assert calls == [1]


def test_weights_are_moved_and_converted():
    model = fl.deferred_init(lambda: nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)))
    fl.materialize_module(model, dtype=torch.bfloat16, device="cpu")
    expected, _ = eager(lambda: nn.Linear(30, 40).bfloat16())
    assert model[0].weight.dtype == torch.bfloat16 and model[1].num_batches_tracked.dtype == torch.int64
    torch.manual_seed(0)
    assert expected.weight.dtype == model[0].weight.dtype


def test_progress_is_reported():
    reports = []
    model = fl.deferred_init(nn.Linear, 600, 600)
    fl.materialize_module(model, progress=lambda done, total: reports.append((done, total)))
    assert reports and reports[-1][0] <= reports[-1][1] == (600 * 600 + 600) * 4
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_a_real_module_is_unchanged():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    fl.materialize_module(layer)
    assert layer.weight is weight and fl.materialize_tensor(weight) is weight


def test_materializing_twice_does_nothing():
    (_, _), (actual, _) = eager(build), deferred(build)
    fl.materialize_module(actual)
    before = {name: tensor.data_ptr() for name, tensor in actual.named_parameters()}
    fl.materialize_module(actual)
    assert {name: tensor.data_ptr() for name, tensor in actual.named_parameters()} == before


def test_edits_after_a_partial_materialization_match_eager():
    def more(model):
        with torch.no_grad():
            model[4].bias.add_(model[3].weight_ih_l0[0, 0])
            model[3].weight_ih_l0.mul_(2)
        return model

    expected = more(eager(build)[0])
    actual, _ = deferred(build)
    fl.materialize_tensor(actual[3].weight_ih_l0)
    more(actual)
    fl.materialize_module(actual)
    assert_same(expected, actual)


def test_a_gradient_through_a_constructors_computation_is_an_error():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.twice = self.weight * 2
            self.part = self.weight[:2]
            with torch.no_grad():
                self.plain = self.weight * 3

    torch.manual_seed(0)
    eager = Scaled()
    torch.manual_seed(0)
    module = fl.deferred_init(Scaled)
    module.twice.sum().backward()  # autograd works while it is deferred
    assert fl.materialize_tensor(module.weight.grad).tolist() == [2.0, 2.0, 2.0]
    fl.materialize_module(module)
    for name in ("twice", "part", "plain"):
        a, b = getattr(eager, name), getattr(module, name)
        assert torch.equal(a, b) and (a.requires_grad, a.is_leaf) == (b.requires_grad, b.is_leaf), name
    with pytest.raises(fl.errors.MaterializeError, match=r"test_materialize.py:\d+: a gradient has come.*in forward"):
        module.twice.sum().backward()
    module.part.sum().backward()
    assert module.weight.grad.tolist() == [3.0, 3.0, 2.0]
    with torch.no_grad():
        module.twice.add_(1)
    assert torch.equal(module.twice, eager.twice + 1)


def test_converted_weights_are_made_in_batches(monkeypatch):
    monkeypatch.setattr(materialize_tensors, "_BATCH_BYTES", 1000)
    batches, reports = [], []
    real = cpu_engine.materialize_values
    made_by = lambda values, **options: batches.append(len(values)) or real(values, **options)  # noqa: E731
    monkeypatch.setattr(cpu_engine, "materialize_values", made_by)
    expected, _ = eager(lambda: nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(90, 90)))
    actual, _ = deferred(lambda: nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(90, 90)))
    fl.materialize_module(actual, dtype=torch.bfloat16, progress=lambda *at: reports.append(at))
    assert batches == [4, 1, 1]
    assert_same(expected.bfloat16(), actual)
    sizes = [done for done, _ in reports]
    assert sizes == sorted(sizes) and reports[-1] == (reports[-1][1],) * 2


def test_a_missing_device_is_an_error_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr(cpu_engine, "materialize_values", lambda *a, **k: pytest.fail("made"))
    module = fl.deferred_init(nn.Linear, 3, 3)
    with pytest.raises(
        fl.errors.MaterializeError, match=r"test_materialize.py:\d+: .* device 'cuda:99'.*still deferred"
    ):
        fl.materialize_module(module, device="cuda:99")
    assert fl.is_deferred(module)
