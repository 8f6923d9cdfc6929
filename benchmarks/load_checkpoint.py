"""Load a checkpoint with the shape of Llama-7B into shards: wall time, CPU seconds, peak memory of all ranks together.

    python -m benchmarks.load_checkpoint [--layers 12] [--ranks 1 4] [--rounds 3] [--folder DIR] [--json]

Ways: `from_pretrained` under `fl.deferred()`, then `fully_shard` and `materialize_module`; `from_pretrained`, then
`fully_shard`; construction on meta, `fully_shard`, `to_empty` and a distributed checkpoint; the same with
`fl.deferred()` in place of meta. Imports are not included. Afterwards the ranks' weights are compared bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.ranks import Taken, run

WAYS = ("firstloss", "from_pretrained", "meta and DCP", "firstloss and DCP")
NAME = "load a checkpoint of a Llama-7B's shape, cut to a few layers, into shards"
GOAL = "faster than from_pretrained, with at most 1.1 times the checkpoint's bytes"
SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
TINY = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_hidden_layers": 2}


def write(folder: str, shape: dict[str, int]) -> int:
    """Write the checkpoint, both as safetensors and as a distributed one; returns its bytes."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM

    import firstloss as fl

    config = LlamaConfig(**shape, dtype="bfloat16")
    if not os.path.exists(os.path.join(folder, "dcp", ".metadata")):
        config.save_pretrained(folder)
        with fl.deferred():
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        fl.save_initialized(model, folder)
        del model
        with fl.deferred():
            model = LlamaForCausalLM.from_pretrained(folder)
        fl.materialize_module(model)
        dcp.save(model.state_dict(), checkpoint_id=os.path.join(folder, "dcp"), no_dist=True)
        del model
    with torch.device("meta"):
        return sum(p.nbytes for p in LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).parameters())


def work(rank: int, world: int, argument: str) -> Callable[[], Callable[[], Any]]:
    """One rank of one of the ways."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    import firstloss as fl

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    way, folder = argument.split("|")
    mesh = init_device_mesh("cpu", (world,))
    fl.materialize_module(fl.deferred_init(torch.nn.Linear, 3, 3))  # imports at first use

    def shard(model: Any) -> Any:
        if world > 1:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def distributed(model: Any) -> Any:
        shard(model)
        if way.startswith("meta"):
            model.to_empty(device="cpu")
        state = model.state_dict()
        dcp.load(state, checkpoint_id=os.path.join(folder, "dcp"), no_dist=world == 1)
        return model

    def load() -> Callable[[], Any]:
        if way == "firstloss":
            with fl.deferred():
                model = LlamaForCausalLM.from_pretrained(folder)
            fl.materialize_module(shard(model))
        elif way == "from_pretrained":
            model = shard(LlamaForCausalLM.from_pretrained(folder))
            if world == 1:  # mapped files are not loaded yet
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        else:
            config = LlamaConfig.from_pretrained(folder)
            with torch.device("meta") if way.startswith("meta") else fl.deferred():
                model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
            model = distributed(model)
            if way.startswith("firstloss"):
                fl.materialize_module(model)
        return lambda: _sums(model)

    return load


def _sums(model: Any) -> list[int]:
    import torch

    locals_ = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    return [int(part.contiguous().view(torch.int16).sum(dtype=torch.int64)) for part in locals_]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", type=int, default=12, help="layers, of the model's 32, which take 13.5 GB (default 12)"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--folder", help="folder to read the checkpoint from, or to keep it in")


def measure(args: argparse.Namespace) -> harness.Figure:
    shape = {**SHAPE, "num_hidden_layers": args.layers, **(TINY if args.tiny else {})}
    ranks = [1, 2] if args.tiny else args.ranks
    found, rows, met = [], [], None
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        nbytes = write(folder, shape)
        for world in ranks:
            best: dict[str, Taken] = {}
            for _ in range(args.rounds):
                for way in args.ways:
                    print(f"  {way}, ranks: {world}", file=sys.stderr, flush=True)
                    taken = run("benchmarks.load_checkpoint:work", f"{way}|{folder}", world, threads=2 // world or 1)
                    if way not in best or taken.wall < best[way].wall:
                        best[way] = taken
            assert all(taken.said == best[args.ways[0]].said for taken in best.values()), "the ways differ"
            for way, taken in best.items():
                one = {"ranks": world, "way": way, "bytes": nbytes, "wall": taken.wall, "cpu": taken.cpu}
                found.append({**one, "peak": taken.peak, "net": taken.net, "ratio": taken.net / nbytes})
                sizes = f"peak {taken.peak / 1e9:.2f} GB, without imports {taken.net / nbytes:.2f} times the checkpoint"
                rows.append((f"{way}, ranks: {world}", f"{taken.wall:.1f} s, {taken.cpu:.1f} CPU s, {sizes}"))
            if {"firstloss", "from_pretrained"} <= best.keys():
                ours, theirs = best["firstloss"], best["from_pretrained"]
                met = met is not False and ours.wall <= theirs.wall and ours.net <= 1.1 * nbytes
    return harness.Figure(NAME, GOAL, rows, met, {"runs": found})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
