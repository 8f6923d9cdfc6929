"""The code of each rank in test_unwritten.py: ways to initialize, and which weights each rank draws itself."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import firstloss as fl
from firstloss.errors import RankDependentWeightsWarning


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 6, padding_idx=1)
        self.layer = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("noise", torch.randn(4))

    def init_weights(self):
        self.embedding.reset_parameters()
        self.layer.reset_parameters()
        self.norm.reset_parameters()
        self.noise.copy_(torch.randn(4))


class Parallel(nn.Module):
    """A layer that cuts its weight by itself, as Megatron-LM's do: on a GPU first, on a CPU after it was drawn."""

    def __init__(self, draw_whole: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4 // dist.get_world_size(), 6))
        if draw_whole:
            whole = torch.empty(4, 6)
            nn.init.xavier_normal_(whole)
            parts = torch.split(whole.to(torch.float32), len(self.weight))[dist.get_rank() :: dist.get_world_size()]
            with torch.no_grad():
                self.weight.data.copy_(torch.cat(parts))
        else:
            with torch.random.fork_rng():
                torch.manual_seed(2718 + dist.get_rank())
                nn.init.xavier_normal_(self.weight)


def on_meta(seed=0):
    with torch.device("meta"):
        model = Net()
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    return model


def sharded(seed=0):
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model)
    return model


def deferred():
    torch.manual_seed(0)
    model = fl.deferred_init(Net)
    fully_shard(model)
    return fl.materialize_module(model)


def distributed(placement):
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.no_grad():
        model.layer.weight = nn.Parameter(distribute_tensor(torch.randn(4, 6) * 0.02, mesh, [placement]))
    return model


def redrawn(placement):
    """A DTensor is drawn again: whole on each rank, from the same seed, or cut."""
    model = distributed(placement)
    with torch.no_grad():
        model.layer.weight.normal_()
    return model


def of_other_seeds(then=lambda model: None):
    torch.manual_seed(dist.get_rank())
    model = Net()
    then(model)
    return model


def broadcast(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)


def sent_by_rank_0():
    """As accelerate's `cpu_ram_efficient_loading`: other ranks have memory only."""
    torch.manual_seed(0)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Net()
    if dist.get_rank():
        model.to_empty(device="cpu")
    broadcast(model)
    return model


def load(model):
    model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})


# A way to construct and initialize, and the names of those that each rank draws for itself.
DRAWN = ["embedding.weight", "layer.bias", "layer.weight"]
WAYS = {
    "on meta, then sharded": (on_meta, DRAWN),
    "on meta, other seeds": (lambda: on_meta(dist.get_rank()), [*DRAWN, "noise"]),
    "sharded": (sharded, []),
    "sharded, other seeds": (lambda: sharded(dist.get_rank()), ["noise"]),  # FSDP2 cuts what each rank has drawn
    "deferred": (deferred, []),
    "distributed": (lambda: distributed(Shard(0)), []),
    "distributed whole": (lambda: distributed(Replicate()), []),
    "redrawn": (lambda: redrawn(Shard(1)), ["layer.weight"]),
    "redrawn whole": (lambda: redrawn(Replicate()), []),
    "cut, then drawn": (lambda: Parallel(draw_whole=False), ["weight"]),
    "drawn, then cut": (lambda: Parallel(draw_whole=True), []),
    "one seed": (lambda: of_other_seeds(lambda model: (torch.manual_seed(0), model.init_weights())), []),
    "other seeds": (of_other_seeds, [*DRAWN, "noise"]),
    "broadcast": (lambda: of_other_seeds(broadcast), []),
    "sent by rank 0": (sent_by_rank_0, []),
    "loaded": (lambda: of_other_seeds(load), []),
}


def find() -> None:
    for name, (make, expected) in WAYS.items():
        with fl.check_init("report") as check:
            model = make()
            if isinstance(model, Parallel):
                model.weight.sum().backward()
        found = sorted(weight.name for weight in check.drawn_by_rank)
        assert found == expected, f"{name}: {found}"
        assert not check.unwritten, f"{name}: {check.unwritten}"
        del model


def warn() -> None:
    with warnings.catch_warnings(record=True) as seen, fl.check_init():
        model = on_meta()
    (warning,) = [w for w in seen if w.category is RankDependentWeightsWarning]
    lines = str(warning.message).splitlines()
    assert lines[0].startswith("3 parameters and buffers have values that depend on the number of ranks")
    line = next(line for line in lines if "layer.weight" in line)
    assert "(parameter, 2x6 on this rank, of Linear at " in line and line.endswith("as S(0) of (4, 6)"), line
    assert os.path.basename(__file__) in line, line  # where it was drawn
    assert "firstloss.deferred_init" in lines[-1] and model is not None
