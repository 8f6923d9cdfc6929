"""`fingerprint`: equal where the bytes are, and made without reading what is in files."""

import os

import safetensors.torch
import torch

import firstloss as fl
from firstloss.program.fingerprint import fingerprint


def _of(model):
    return fingerprint([parameter._ref() for parameter in model.parameters()])


def _loaded(path):
    with fl.deferred():
        state = safetensors.torch.load_file(path)
        model = torch.nn.Linear(256, 128, bias=False)
        model.weight = torch.nn.Parameter(state["weight"])
    return model


def _drawn(seed):
    torch.manual_seed(seed)
    return fl.deferred_init(torch.nn.Linear, 8, 4)


def test_recipes_that_give_other_bytes_have_other_fingerprints():
    assert _of(_drawn(0)) == _of(_drawn(0)) != _of(_drawn(1))
    given = [fl.deferred_init(lambda v=v: torch.nn.ParameterList([torch.tensor(v)])) for v in ([1.0, 2.0], [1.0, 3.0])]
    assert _of(given[0]) != _of(given[1])


def test_loaded_weights_are_not_read(tmp_path, monkeypatch):
    path = str(tmp_path / "weights.safetensors")
    safetensors.torch.save_file({"weight": torch.randn(128, 256), "other": torch.randn(128, 256)}, path)
    model = _loaded(path)
    reads = []
    monkeypatch.setattr("firstloss.capture.mapped_file._read", lambda *args: reads.append(args))
    first = _of(model)
    assert _of(_loaded(path)) == first and not reads
    before = os.stat(path)
    safetensors.torch.save_file({"weight": torch.zeros(128, 256), "other": torch.randn(128, 256)}, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert _of(_loaded(path)) != first
