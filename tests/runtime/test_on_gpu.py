"""The XLA backend on a GPU that PyTorch has too: what of it can be tried without one, on the CPU in a GPU's place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firstloss.runtime.device import on_gpu
from tests.gpu.emulated import compiler, vectorised

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler on this machine")
@pytest.mark.skipif(not vectorised(), reason="PyTorch's normals are not those of AVX2 on this machine")
@pytest.mark.parametrize("first_loss", ["eager", "compiled"])
def test_weights_are_made_in_xlas_memory_and_donated_from_there(first_loss):
    """By kernels of ours; the first loss by PyTorch's, in the same memory."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.runtime.gpu_stand_in", first_loss]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
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
    on_gpu.leave_memory_to_pytorch()
    found = {name: os.environ[name] for name in on_gpu._SHARES if name in os.environ}
    assert found == (said or {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def test_without_a_gpu_nothing_is_made_there():
    assert on_gpu.device() is None and on_gpu.make([]) == {}
