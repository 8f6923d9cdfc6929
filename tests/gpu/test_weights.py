"""Weights and shards by the GPU kernels, run on the CPU: which recipes they support, and PyTorch's bits."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.gpu import probe, weights
from firstloss.gpu.fill_slices import recipe_of

from .emulated import HostLauncher, compiler, vectorised

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler on this machine"),
    pytest.mark.skipif(not vectorised(), reason="PyTorch's normals are not those of AVX2 on this machine"),
]
CPU = torch.device("cpu", 0)


def kernel_weights(tensors):
    """The kernels' results for deferred tensors, by index."""
    known = {i: tensor._storage.value for i, tensor in enumerate(tensors)}
    weights_by_value = weights.materialize(
        known.values(), CPU, HostLauncher(), lambda device, name, dtype: probe.cpu_type_is_supported(name, dtype)
    )
    return {
        i: weights_by_value[value].as_strided(tensors[i].shape, tensors[i].stride())
        for i, value in known.items()
        if value in weights_by_value
    }


def build():
    module = nn.Sequential(
        nn.Embedding(300, 70), nn.Linear(70, 90), nn.LayerNorm(90), nn.Conv2d(3, 8, 3), nn.Linear(5, 3)
    )
    nn.init.normal_(module[1].weight, std=0.02)
    module[0].weight.data.mul_(0.5).add_(0.25).clamp_(-0.3, 0.6)
    nn.init.xavier_uniform_(module[4].weight)
    return module


def test_a_models_weights_match_eager():
    torch.manual_seed(0)
    expected = list(build().parameters())
    torch.manual_seed(0)
    deferred = list(fl.deferred_init(build).parameters())
    actual = kernel_weights(deferred)
    assert actual.keys() == set(range(len(expected)))
    for i, tensor in actual.items():
        assert torch.equal(tensor, expected[i]), i


SHARDS = {
    "rows": lambda w: w[10:20].clone(),
    "columns": lambda w: w[:, 3:17].clone(),
    "a block": lambda w: w[5:30, 3:17].clone(),
    "experts": lambda w: w.view(4, 25, 64)[1:3].clone(),
    "columns of experts": lambda w: w.view(4, 25, 64)[:, :, 8:16].clone(),
    "flat": lambda w: w.view(-1)[777:1500].clone(),
    "twice": lambda w: w[10:60].clone()[5:10].clone(),
    "edited": lambda w: w[10:20].clone().mul_(3.0),
    "every third row": lambda w: w[1::3].clone(),
    "a copy": lambda w: torch.empty(10, 64).copy_(w[20:30]),
}
LEFT = {
    "transposed": lambda w: w.t().clone(),
    "every other element": lambda w: w.view(-1)[::2].clone(),
    "divided": lambda w: w[10:20].clone().div_(3.0),
    "patched": lambda w: w.clone().index_fill_(0, torch.tensor([1]), 0.0),
    "a function of it": lambda w: w.exp(),
    "in double precision": lambda w: w.double(),
}


def weight():
    torch.manual_seed(0)
    return torch.empty(100, 64).normal_(0.0, 0.5)


@pytest.mark.parametrize("name", SHARDS)
def test_shards_match_slices_of_the_whole(name):
    expected = SHARDS[name](weight())
    with fl.deferred():
        deferred = SHARDS[name](weight())
    actual = kernel_weights([deferred])
    assert torch.equal(actual[0], expected)


@pytest.mark.parametrize("name", LEFT)
def test_other_recipes_are_left_to_pytorch(name):
    expected = LEFT[name](weight())
    with fl.deferred():
        deferred = LEFT[name](weight())
    assert recipe_of(deferred._storage.value) is None and not kernel_weights([deferred])
    assert torch.equal(fl.materialize_tensor(deferred), expected)


def test_untrusted_fills_are_left_to_pytorch():
    with fl.deferred():
        deferred = weight()
    assert not weights.materialize([deferred._storage.value], CPU, HostLauncher(), lambda *_: False)


def test_few_normals_are_left_to_pytorch():
    with fl.deferred():
        deferred = torch.empty(15).normal_()
    assert not kernel_weights([deferred])


@pytest.mark.parametrize(
    "error", [RuntimeError("no driver"), AttributeError("cuLaunchKernel"), fl.errors.BackendError("x")]
)
def test_a_probe_that_fails_leaves_the_work_to_pytorch(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(probe, "refused", {})
    monkeypatch.setattr(probe, "CudaLauncher", fail)
    assert not probe.cpu_bits.__wrapped__(0, "normal", torch.float32)
    assert list(probe.refused.values()) == [str(error)]
    assert probe.cuda_layout_of.__wrapped__(0, "normal", torch.float32) is None
    assert len(probe.refused) == 3
