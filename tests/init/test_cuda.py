"""What needs a GPU: weights on it, and models constructed for it."""

import pytest
import torch
from torch import nn

import firstloss as fl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")


def build():
    return nn.Sequential(nn.Embedding(300, 70), nn.Linear(70, 90), nn.LayerNorm(90))


def test_materialized_on_the_gpu_with_the_cpus_bits():
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    found = fl.deferred_init(build)
    fl.materialize_module(found, device="cuda")
    for a, b in zip(expected.parameters(), found.parameters(), strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu())


def test_the_host_never_holds_all_of_it(monkeypatch):
    from firstloss.init import materialize

    monkeypatch.setattr(materialize, "_BATCH_BYTES", 1 << 16)
    found = fl.deferred_init(build)
    fl.materialize_module(found, device="cuda")
    assert all(parameter.is_cuda for parameter in found.parameters())


def test_the_counter_policy_is_the_same_on_any_device():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with fl.deferred(rng="counter"), torch.device(device):
            module = build()
        fl.materialize_module(module)
        found.append(list(module.parameters()))
    for a, b in zip(*found, strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu())


def test_the_eager_policy_knows_the_cpus_stream_only():
    with pytest.raises(fl.errors.CaptureError, match=r"draws on device 'cuda.*materialize_module"):
        fl.deferred_init(nn.Linear, 3, 3, device="cuda")
    module = fl.deferred_init(nn.LayerNorm, 3, device="cuda")  # nothing is drawn
    fl.materialize_module(module)
    assert module.weight.is_cuda
