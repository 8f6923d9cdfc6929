"""Capture for a GPU: offsets in its random stream, computed without a GPU; and the error if there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import firstloss as fl

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_offsets_are_counted_from_the_gpus_properties():
    path = os.pathsep.join([os.path.join(ROOT, "src"), ROOT])
    command = [sys.executable, "-m", "tests.capture.cuda_without_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_error_says_what_to_write():
    def build():
        with torch.device("cuda"):
            return nn.Linear(3, 3)

    for call in (build, lambda: nn.Linear(3, 3, device="cuda"), lambda: nn.Linear(3, 3).cuda()):
        with pytest.raises(fl.errors.CaptureError, match=r"test_cuda_random_ops.py:\d+: .*CUDA(.|\n)*device='cuda'"):
            fl.deferred_init(call)
    with pytest.raises(AssertionError, match="mine"), fl.deferred():
        raise AssertionError("mine")
