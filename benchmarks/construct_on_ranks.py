"""Construct a model with the shape of Qwen3-30B-A3B, reduced to a few layers, on eight ranks of one machine.

    python -m benchmarks.construct_on_ranks [--layers 2] [--ranks 8] [--ways WAY ...] [--json]

The result is the CPU seconds of all ranks. Ways: `one` constructs in one process and is the baseline; `eager` does so
on each rank and then shards (one rank is run and its time multiplied by the number of ranks, since all of them would
not fit into memory); `meta` constructs on the meta device, calls `fully_shard`, `to_empty` and `_init_weights`;
`firstloss` is the same script with `fl.deferred()` in place of meta and without `_init_weights`. Weights are
bfloat16. Imports are not included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.ranks import run

NAME = "construct a Qwen3-30B-A3B's shape, cut to a few layers, on eight ranks of one machine"
GOAL = "all ranks together take no more CPU seconds than one process that constructs it eagerly"
WAYS = ("one", "eager", "meta", "firstloss")
ON_ALL = ("meta", "firstloss")  # these are run on all ranks
SHAPE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "vocab_size": 512, "num_hidden_layers": 1}


def work(rank: int, world: int, argument: str) -> Callable[[], Callable[[], Any]]:
    """One rank, constructed in one of the ways."""
    import contextlib

    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import firstloss as fl

    way, shape = json.loads(argument)
    transformers.logging.set_verbosity_error()
    config = Qwen3MoeConfig(**shape)
    mesh = init_device_mesh("cpu", (world,))
    fl.materialize_module(fl.deferred_init(torch.nn.Linear, 3, 3))  # imports at first use

    def construct() -> Callable[[], Any]:
        torch.manual_seed(0)
        around = {"meta": torch.device("meta"), "firstloss": fl.deferred()}.get(way, contextlib.nullcontext())
        with around:
            model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
        if way != "one":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if way == "meta":
            model.to_empty(device="cpu")
            with torch.no_grad():
                model.apply(model._init_weights)
        elif way == "firstloss":
            fl.materialize_module(model)
        return lambda: sum(p.numel() for p in model.parameters())

    return construct


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=2, help="number of layers, of the model's 48 (default 2)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)


def measure(args: argparse.Namespace) -> harness.Figure:
    shape = {**SHAPE, "num_hidden_layers": args.layers, **(TINY if args.tiny else {})}
    ranks = 2 if args.tiny else args.ranks
    found: dict[str, dict[str, Any]] = {}
    rows = []
    for way in args.ways:
        print(f"  {way}", file=sys.stderr, flush=True)
        taken = run("benchmarks.construct_on_ranks:work", json.dumps([way, shape]), ranks if way in ON_ALL else 1)
        times = ranks if way == "eager" else 1
        cpu, net = taken.cpu * times, taken.net * times
        found[way] = {"parameters": taken.said[0], "wall": taken.wall, "cpu": cpu, "net": net}
        more = f" (one rank, times {times})" if times > 1 else ""
        rows.append((way, f"{cpu:.1f} CPU s, {taken.wall:.1f} s, {net / 1e9:.1f} GB{more}"))
    both = {"one", "firstloss"} <= found.keys()
    met = found["firstloss"]["cpu"] <= found["one"]["cpu"] if both else None
    return harness.Figure(NAME, GOAL, rows, met, found)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
