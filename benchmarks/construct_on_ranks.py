"""Constructing a Qwen3-30B-A3B's shape, cut to a few layers, on eight ranks of one machine: CPU seconds of all ranks.

    python -m benchmarks.construct_on_ranks [--layers 8] [--ranks 8] [--ways WAY ...] [--json]

Ways: `one` constructs on one process, and is what the others are measured against; `eager` does so on a rank, and
shards (one rank is run, and counted as often as there are ranks: together they would not fit into memory); `meta`
constructs on the meta device, `fully_shard`s, `to_empty`s and calls `_init_weights`; `firstloss` is the same script
with `fl.deferred()` in the place of meta and no `_init_weights`. Weights are bfloat16. Imports are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

WAYS = ("one", "eager", "meta", "firstloss")


def work(rank: int, world: int, argument: str) -> Callable[[], Callable[[], Any]]:
    """One rank of one way."""
    import contextlib

    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import firstloss as fl

    way, layers = argument.split("|")
    transformers.logging.set_verbosity_error()
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        num_hidden_layers=int(layers),
    )
    mesh = init_device_mesh("cpu", (world,))
    fl.materialize_module(fl.deferred_init(torch.nn.Linear, 3, 3))  # what is imported at first use

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    from benchmarks.ranks import run

    found = []
    for way in args.ways:
        world = args.ranks if way in ("meta", "firstloss") else 1
        taken = run("benchmarks.construct_on_ranks:work", f"{way}|{args.layers}", world)
        times = args.ranks if way == "eager" else 1
        one = {"way": way, "parameters": taken.said[0], "wall": taken.wall, "cpu": taken.cpu * times}
        found.append({**one, "net": taken.net * times})
        if not args.json:
            said = f"{taken.cpu * times:7.1f} CPU s, {taken.wall:7.1f} s, {taken.net * times / 1e9:6.1f} GB"
            print(f"{way:10} {said}{f' (one rank, times {times})' if times > 1 else ''}", flush=True)
    if args.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
