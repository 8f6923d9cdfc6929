"""On a GPU: replacements of PyTorch functions match them, and have the intended effect."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import firstloss as fl
from firstloss.gpu import probe, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine"),
]


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_float32_has_the_cpus_bits(name):
    assert probe.cpu_bits(torch.cuda.current_device(), name, torch.float32), probe.refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_cudas_layout_is_known(name, dtype):
    assert probe.cuda_layout_of(torch.cuda.current_device(), name, dtype), probe.refused


def build():
    module = nn.Sequential(nn.Embedding(3000, 700), nn.Linear(700, 900), nn.LayerNorm(900), nn.Linear(900, 300))
    nn.init.normal_(module[1].weight, std=0.02)
    return module


@pytest.mark.parametrize("captured", ["cpu", "cuda"])
def test_a_models_weights_are_made_by_kernels(captured, monkeypatch):
    counts, make = [], weights.materialize

    def counted(values, *args):
        values = list(values)
        computed = make(values, *args)
        counts.append((len(computed), len(values)))
        return computed

    monkeypatch.setattr(weights, "make", counted)
    torch.manual_seed(5)
    with torch.device(captured):
        expected = build()
    torch.manual_seed(5)
    with fl.deferred(), torch.device(captured):
        computed = build()
    fl.materialize_module(computed, device="cuda")
    assert counts == [(8, 8)]
    for a, b in zip(expected.parameters(), computed.parameters(), strict=True):
        assert b.is_cuda and torch.equal(a.cpu(), b.cpu())


def test_a_fill_of_more_than_32_bits_index():
    numel = (1 << 30) + 5  # in bfloat16: more than 2^31 bytes
    if torch.cuda.mem_get_info()[0] < 3 * 2 * numel:
        pytest.skip("there is no room for it on this GPU")
    torch.manual_seed(1)
    expected = torch.empty(numel, dtype=torch.bfloat16, device="cuda").normal_()
    after = torch.cuda.get_rng_state()
    torch.manual_seed(1)
    with fl.deferred():
        actual = torch.empty(numel, dtype=torch.bfloat16, device="cuda").normal_()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert torch.equal(fl.materialize_tensor(actual), expected)


def test_fsdp2_draws_its_shard_on_its_gpu(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    expected = build()
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        torch.manual_seed(3)
        actual = fl.deferred_init(build)
        fully_shard(actual, mesh=mesh)
        fl.materialize_module(actual, device="cuda")
        for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
            assert torch.equal(a, b.full_tensor().cpu())
    finally:
        dist.destroy_process_group()
