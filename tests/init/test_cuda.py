"""Tests that need a GPU: weights on it, and models constructed for it."""

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import cuda_random_ops
from firstloss.rng import cuda_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]


def build():
    return nn.Sequential(nn.Embedding(300, 70), nn.Linear(70, 90), nn.LayerNorm(90))


def test_weights_on_the_gpu_have_the_cpus_bits():
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    actual = fl.deferred_init(build)
    fl.materialize_module(actual, device="cuda")
    for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu())


def test_the_host_never_holds_the_whole_model(monkeypatch):
    from firstloss.capture import materialize_tensors
    from firstloss.gpu import weights

    monkeypatch.setattr(materialize_tensors, "_BATCH_BYTES", 1 << 16)
    monkeypatch.setattr(weights, "make", lambda *_: {})
    model = fl.deferred_init(build)
    fl.materialize_module(model, device="cuda")
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_the_counter_policy_is_the_same_on_any_device():
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with fl.deferred(rng="counter"), torch.device(device):
            module = build()
        fl.materialize_module(module)
        weights.append(list(module.parameters()))
    for a, b in zip(*weights, strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu())


def on_gpu():
    with torch.device("cuda"):
        module = nn.Sequential(nn.Embedding(3000, 700), nn.Linear(700, 900), nn.LayerNorm(900), nn.Linear(5, 3).half())
        module.order = torch.randperm(100)  # drawn right away, like the next one
        nn.init.trunc_normal_(module[1].weight, std=0.02, a=-0.03, b=0.03)
        nn.init.normal_(module[0].weight, std=0.02)
        module.register_buffer("noise", torch.empty(1001, dtype=torch.float64).uniform_(-1, 1))
        torch.cuda.manual_seed(8)
        module.register_buffer("seeded", torch.randn(333, 777).mul_(2))
    return module


def assert_same_bits(expected, actual):
    for (name, a), (_, b) in zip(expected.state_dict().items(), actual.state_dict().items(), strict=True):
        assert b.is_cuda and torch.equal(a, b), name


@pytest.mark.parametrize("reverse", [False, True])
def test_captured_on_the_gpu_weights_have_the_gpus_bits(reverse):
    torch.manual_seed(0)
    expected = on_gpu()
    state = torch.cuda.get_rng_state()
    torch.manual_seed(0)
    weights = fl.deferred_init(on_gpu)
    assert fl.is_deferred(weights[0]) and torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.manual_seed(77)
    children = list(weights.children())
    for child in reversed(children) if reverse else children:
        fl.materialize_module(child)
    fl.materialize_module(weights)
    assert_same_bits(expected, weights)
    after = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(77)
    assert torch.equal(torch.cuda.get_rng_state(), after)


def test_a_part_is_a_slice_of_what_the_gpu_would_have_drawn():
    torch.manual_seed(0)
    expected = torch.empty(3000, 700, device="cuda").normal_()
    torch.manual_seed(0)
    with fl.deferred():
        whole = torch.empty(3000, 700, device="cuda").normal_()
        parts = [whole[1000:2000].clone(), whole[:, 100:200].clone()]
    del whole
    for part in parts:
        fl.materialize_tensor(part)
    assert torch.equal(parts[0], expected[1000:2000]) and torch.equal(parts[1], expected[:, 100:200])


def test_uniforms_follow_the_layout():
    index = torch.cuda.current_device()
    assert cuda_random_ops.layout_is_supported(index)
    device = cuda_random_ops.gpu(index)
    for numel in (5, 100_003, 3_000_001):
        generator = torch.Generator("cuda").manual_seed(9)
        values = torch.empty(numel, device="cuda").uniform_(generator=generator).cpu().numpy()
        for element in {0, numel // 3, numel - 1}:
            place = cuda_layout.element_position(element, numel, device)
            word = cuda_layout.words(9, place.subsequence, place.offset)[place.lane]
            # curand_uniform returns (0, 1]; PyTorch maps 1 to 0.
            expected = np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)
            assert values[element] == (0 if expected == 1 else expected)


def test_constant_fills_need_no_random_numbers():
    module = fl.deferred_init(nn.LayerNorm, 3, device="cuda")
    fl.materialize_module(module)
    assert module.weight.is_cuda
