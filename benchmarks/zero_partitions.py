"""Make and load a Llama-7B's layers as ZeRO-3's partitions: wall time, CPU seconds, peak memory of all ranks together.

    python -m benchmarks.zero_partitions [--layers 12] [--ranks 1 8] [--rounds 3] [--folder DIR] [--json]

Ways: a deferred model given to `deepspeed.zero.Init(module=...)`, constructed or by `from_pretrained`; construction
within `deepspeed.zero.Init()`, in which each rank makes each module whole; `from_pretrained`, then
`deepspeed.zero.Init(module=...)`. Imports are not included. Where weights are the same on any number of ranks, as all
but those that are constructed within `zero.Init()` are said to be, they are compared bit for bit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.load_checkpoint import SHAPE, TINY, write
from benchmarks.ranks import Taken, run

WAYS = ("firstloss", "zero.Init", "firstloss, loaded", "from_pretrained")
NAME = "make and load a Llama-7B's layers as ZeRO-3's partitions"
GOAL = "on 8 ranks at most 1.2 times as long as on one, with at most 1.15 times the bytes of the weights"


def work(rank: int, world: int, argument: str) -> Callable[[], Callable[[], Any]]:
    """One rank of one of the ways."""
    way, folder = argument.split("|")
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    import deepspeed
    import torch
    import transformers

    import firstloss as fl

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    deepspeed.utils.logger.setLevel("ERROR")
    # Compiled at first use, and needed for speed alone.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}

    def partition(model: Any) -> Any:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        return model

    kind, shape = transformers.LlamaForCausalLM, transformers.LlamaConfig.from_pretrained(folder)
    importlib.import_module("torch._dynamo")  # it cannot be imported within zero.Init()

    def construct() -> Any:
        torch.manual_seed(0)
        return kind._from_config(shape, dtype=torch.bfloat16)

    def load() -> Any:
        return kind.from_pretrained(folder, dtype=torch.bfloat16)

    torch.manual_seed(0)
    partition(fl.deferred_init(torch.nn.Linear, 64, 64, dtype=torch.bfloat16))  # imports at first use

    def make() -> Callable[[], Any]:
        if way == "zero.Init":
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = construct()
        elif way == "firstloss":
            model = partition(fl.deferred_init(construct))
        elif way == "firstloss, loaded":
            with fl.deferred():
                model = load()
            partition(model)
        else:
            model = partition(load())
        return lambda: [int(p.ds_tensor.view(torch.int16).sum(dtype=torch.int64)) for p in model.parameters()]

    return make


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=12, help="of the model's 32: 0.4 GB each (default 12)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--folder", help="folder to read the checkpoint from, or to keep it in")


def measure(args: argparse.Namespace) -> harness.Figure:
    if importlib.util.find_spec("deepspeed") is None:
        return harness.Figure(NAME, GOAL, [("DeepSpeed", "is not installed (make trainers)")], None, {})
    shape = {**SHAPE, "num_hidden_layers": args.layers, **(TINY if args.tiny else {})}
    ranks = [1, 2] if args.tiny else args.ranks
    best: dict[tuple[str, int], Taken] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        nbytes = write(folder, shape)
        for _ in range(args.rounds):
            for way in args.ways:
                for world in ranks:
                    print(f"  {way}, ranks: {world}", file=sys.stderr, flush=True)
                    taken = run("benchmarks.zero_partitions:work", f"{way}|{folder}", world, threads=2 // world or 1)
                    if (way, world) not in best or taken.wall < best[way, world].wall:
                        best[way, world] = taken
    for world in ranks:
        loaded = [best[way, world].said for way in WAYS[2:] if (way, world) in best]
        assert all(said == loaded[0] for said in loaded), "the ways differ"
    rows, found, met = [], [], True
    for (way, world), taken in best.items():
        one = {"ranks": world, "way": way, "bytes": nbytes, "wall": taken.wall, "cpu": taken.cpu}
        found.append({**one, "peak": taken.peak, "net": taken.net, "ratio": taken.net / nbytes})
        longer = taken.wall / best[way, ranks[0]].wall
        sizes = f"{longer:.2f} times one rank's time, {taken.net / nbytes:.2f} times the bytes"
        rows.append((f"{way}, ranks: {world}", f"{taken.wall:.1f} s, {taken.cpu:.1f} CPU s, {sizes}"))
        if way.startswith("firstloss"):
            met = met and longer <= 1.2 and taken.net <= 1.15 * nbytes
    return harness.Figure(NAME, GOAL, rows, met, {"runs": found})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
