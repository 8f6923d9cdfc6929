"""The code of each rank in test_dtensor.py: a run that goes on over other numbers of ranks, by three kinds of files."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import firstloss as fl
from tests.init.dtensor_ranks import digest_of
from tests.init.test_loading import read_so_far

WIDTH = 1536  # so that shards are larger than what is read beside them, such as modules


def build():
    torch.manual_seed(dist.get_world_size())  # other weights than those that are loaded
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))


def shard(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def from_index(folder):
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {k: v for file in set(files.values()) for k, v in safetensors.torch.load_file(folder / file).items()}


FILES = {
    "safetensors": from_index,
    "bin": lambda folder: torch.load(folder / "pytorch_model.bin", mmap=True, weights_only=True),
}


def load(kind, folder, defer):
    """A model and an optimizer, loaded from one kind of files."""
    with fl.deferred() if defer else torch.device("cpu"):
        model = build()
        if kind in FILES:
            model.load_state_dict(FILES[kind](folder), assign=True)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "dcp":
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return fl.materialize_module(model) if defer else model, optimizer


def save(folder, model, optimizer):
    """Write the files of all kinds."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    digest = digest_of(model)
    if dist.get_rank() == 0:
        huggingface_hub.save_torch_state_dict(whole, str(folder), max_shard_size="8MB")
        torch.save(whole, folder / "pytorch_model.bin")
        (folder / "digest").write_text(digest)
    dist.barrier()


def step(model, optimizer):
    torch.manual_seed(7)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def begin(folder):
    model = shard(fl.deferred_init(build))
    fl.materialize_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    save(Path(folder), model, optimizer)


def go_on(folder):
    folder = Path(folder)
    losses = []
    for kind in (*FILES, "dcp"):
        before = read_so_far()
        plain, optimizer = load(kind, folder, defer=False)
        between = read_so_far()
        model, own_optimizer = load(kind, folder, defer=True)
        by_plain, read = between - before, read_so_far() - between
        assert digest_of(model) == (folder / "digest").read_text(), kind
        if kind == "dcp":  # which reads whole shards of those who wrote them
            assert read < 1.05 * by_plain, (read, by_plain)
        else:
            own = sum(p.to_local().nbytes for p in model.parameters())
            assert read < 1.25 * own, (kind, read, own)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), kind
        losses += [step(plain, optimizer), step(model, own_optimizer)]
        assert digest_of(model) == digest_of(plain), kind
    assert len(set(losses)) == 1, losses
    step(model, own_optimizer)
    save(folder, model, own_optimizer)
