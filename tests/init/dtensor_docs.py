"""The table in docs/concepts.md shows PyTorch's and Firstloss's actual values."""

import json
from pathlib import Path

import torch
from torch import nn

import firstloss as fl

DOCS = Path(__file__).parents[2] / "docs" / "concepts.md"


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
        pytorchs = Weight()
    fully_shard(pytorchs)
    pytorchs.to_empty(device="cpu")
    torch.manual_seed(0)
    pytorchs.reset_parameters()

    torch.manual_seed(0)
    deferred = fl.deferred_init(Weight)
    fully_shard(deferred)
    fl.materialize_module(deferred)
    values = [model.weight.full_tensor().flatten().tolist() for model in (pytorchs, deferred)]
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(values))


def check_row(world, path):
    """The table's row for `world` processes agrees with the result of `both_ways`."""
    pytorchs, deferred = json.loads(path.read_text())
    torch.manual_seed(0)
    eager = Weight().weight.flatten().tolist()
    assert deferred == eager
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith(f"| {world} |"))
    abbreviated = f"{pytorchs[0]:.4f}, {pytorchs[1]:.4f}, ... {pytorchs[-2]:.4f}, {pytorchs[-1]:.4f}"
    assert f"| {abbreviated} | {len(set(pytorchs))} of 48 |" in row
    if world == 1:
        assert row.count(abbreviated) == 2
