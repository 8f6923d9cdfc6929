"""The XLA backend on a GPU shared with PyTorch, as far as it can be tested with the CPU in place of the GPU."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.compat.torch_names import DisableTorchDispatch
from firstloss.program.graph import slice_for
from firstloss.runtime.device import on_gpu
from firstloss.runtime.step import first_loss
from firstloss.runtime.step.step_replay import StepReplay
from tests import forked
from tests.gpu.emulated import compiler, vectorised
from tests.small_training import build, training_step

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler on this machine")
@pytest.mark.skipif(not vectorised(), reason="PyTorch's normals are not those of AVX2 on this machine")
@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_weights_are_made_in_xlas_memory_and_donated_from_there(first):
    """Firstloss's kernels compute the weights, and PyTorch's the first loss, in the same memory."""
    done = forked.run(["-m", "tests.runtime.device.simulated_gpu", first], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "said", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}], ids=str
)
def test_jax_leaves_memory_to_pytorch_unless_told_otherwise(said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in on_gpu._SHARES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    on_gpu.disable_preallocation()
    variables = {name: os.environ[name] for name in on_gpu._SHARES if name in os.environ}
    assert variables == (said or {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def test_without_a_gpu_nothing_is_made_there():
    assert on_gpu.device() is None and on_gpu.materialize([]) == {}


class Attends(nn.Module):
    """The forward pass creates tensors, with and without a device, and uses attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.places = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.places(at) * torch.full((8,), 0.5)
        x = x[:, None] + torch.zeros_like(x)[:, None]
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x[:, 0].to("cpu", torch.float64).float())


def test_all_of_a_first_loss_is_computed_on_its_device(tmp_path, monkeypatch):
    """With the meta device in place of the GPU: no kernel gets tensors on two devices, and every result is on it."""
    seen, attempt = [], first_loss.FirstLoss.attempt
    monkeypatch.setattr(first_loss.FirstLoss, "attempt", lambda self, *args: seen.append(self) or attempt(self, *args))
    _, optimizer, compiled = build(fl.backend("XLA", artifact_dir=tmp_path), Attends)
    step = training_step(compiled, optimizer, lambda module, x: F.cross_entropy(module(x).flatten(0, 1), x.flatten()))
    step(torch.randint(20, (2, 5)))
    (program,) = seen
    kernels, nodes = StepReplay(torch.device("meta")), slice_for([r.value for r in program._refs], program.inputs)
    with DisableTorchDispatch():
        for value in program.inputs:
            kernels.buffers[value] = kernels.allocate(value)
        kernels.run(nodes)
    names = {str(node.op) for node in nodes}
    assert any("scaled_dot_product" in name for name in names) and any("arange" in name for name in names), names
    assert {buffer.device.type for buffer in kernels.buffers.values()} == {"meta"}
