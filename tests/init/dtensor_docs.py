"""The table in docs/sharded-init.md shows PyTorch's and Firstloss's actual values."""

import json
from pathlib import Path

import torch
from torch import nn

import firstloss as fl

DOCS = Path(__file__).parents[2] / "docs" / "sharded-init.md"


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 6))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)


def both_ways(path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        theirs = Weight()
    fully_shard(theirs)
    theirs.to_empty(device="cpu")
    torch.manual_seed(0)
    theirs.reset_parameters()

    torch.manual_seed(0)
    ours = fl.deferred_init(Weight)
    fully_shard(ours)
    fl.materialize_module(ours)
    found = [model.weight.full_tensor().flatten().tolist() for model in (theirs, ours)]
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))


def check_row(world, path):
    """The table's row for `world` processes agrees with the result of `both_ways`."""
    theirs, ours = json.loads(path.read_text())
    torch.manual_seed(0)
    eager = Weight().weight.flatten().tolist()
    assert ours == eager
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith(f"| {world} |"))
    shown = f"{theirs[0]:.4f}, {theirs[1]:.4f}, ... {theirs[-2]:.4f}, {theirs[-1]:.4f}"
    assert f"| {shown} | {len(set(theirs))} of 48 |" in row
    if world == 1:
        assert row.count(shown) == 2
