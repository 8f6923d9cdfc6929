"""Load a mixture of experts in its published layout under accelerate's FSDP2: wall time and peak memory of all ranks.

    python -m benchmarks.load_experts [--layers 5] [--intermediate 14336] [--ranks 8] [--rounds 3] [--folder DIR]

The checkpoint has Mixtral-8x7B's layers, and as published one tensor for each matrix of each expert, which transformers
joins while it loads them. Ways: `from_pretrained` under `fl.deferred()`, as `firstloss run` has it, then
`accelerator.prepare`; the same with `cpu_ram_efficient_loading`, where rank 0 loads the model and sends each rank its
rows. Imports are not included. Afterwards the ranks' weights are compared bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import harness
from benchmarks.ranks import Taken, run

WAYS = ("firstloss", "cpu_ram_efficient_loading")
NAME = "load a mixture of experts, stored one by one, into FSDP2's shards"
GOAL = "3 times sooner than cpu_ram_efficient_loading, with at most 1.15 times the checkpoint's bytes"
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "vocab_size": 32000,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "vocab_size": 256, "num_hidden_layers": 2,
}  # fmt: skip


def published(shape: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors in mistralai/Mixtral-8x7B-v0.1."""
    wide, narrow = shape["hidden_size"], shape["intermediate_size"]
    keys = wide // shape["num_attention_heads"] * shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", (shape["vocab_size"], wide)
    for number in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows in (("q", wide), ("k", keys), ("v", keys), ("o", wide)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, wide)
        yield f"{layer}.block_sparse_moe.gate.weight", (shape["num_local_experts"], wide)
        for expert in range(shape["num_local_experts"]):
            for name, size in (("w1", (narrow, wide)), ("w2", (wide, narrow)), ("w3", (narrow, wide))):
                yield f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight", size
        yield f"{layer}.input_layernorm.weight", (wide,)
        yield f"{layer}.post_attention_layernorm.weight", (wide,)
    yield "model.norm.weight", (wide,)
    yield "lm_head.weight", (shape["vocab_size"], wide)


def write(folder: str, shape: dict[str, int]) -> int:
    """Write the checkpoint, if it is not there; returns its bytes."""
    import torch
    from transformers import MixtralConfig

    import firstloss as fl

    tensors = dict(published(shape))
    if not os.path.exists(os.path.join(folder, "model.safetensors.index.json")):
        root = torch.nn.Module()
        with fl.deferred():
            for name, size in tensors.items():
                *path, last = name.split(".")
                module = root
                for part in path:
                    if part not in module._modules:
                        module.add_module(part, torch.nn.Module())
                    module = module.get_submodule(part)
                weight = torch.empty(size, dtype=torch.bfloat16)
                module.register_parameter(last, torch.nn.Parameter(torch.nn.init.normal_(weight, std=0.02)))
        fl.save_initialized(root, folder)
        config = MixtralConfig(**shape, tie_word_embeddings=False, dtype="bfloat16").to_dict()
        config["architectures"] = ["MixtralForCausalLM"]
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
    return 2 * sum(torch.Size(size).numel() for size in tensors.values())


def work(rank: int, world: int, argument: str) -> Callable[[], Callable[[], Any]]:
    """One rank of one of the ways."""
    way, folder = argument.split("|")
    from tests.integrations.example_ranks import take_fsdp_on_a_cpu

    take_fsdp_on_a_cpu()
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for; the group exists already
    import accelerate
    import torch
    import transformers

    import firstloss as fl

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    fl.materialize_module(fl.deferred_init(torch.nn.Linear, 3, 3))  # imports at first use
    accelerator = accelerate.Accelerator(
        cpu=True,
        fsdp_plugin=accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["MixtralDecoderLayer"],
            cpu_ram_efficient_loading=way != "firstloss",
        ),
    )

    def load() -> Callable[[], Any]:
        if way == "firstloss":
            with fl.deferred():
                model = transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        else:
            model = transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        fl.materialize_module(model)
        return lambda: _sums(model)

    return load


def _sums(model: Any) -> list[int]:
    import torch

    parts = [p.to_local().detach().to(torch.bfloat16) for p in model.parameters()]
    return [int(part.contiguous().view(torch.int16).sum(dtype=torch.int64)) for part in parts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=5, help="of the model's 32: 2.9 GB each (default 5: 15 GB)")
    parser.add_argument(
        "--intermediate", type=int, default=SHAPE["intermediate_size"],
        help="of an expert. With 14336 and 8 ranks, cpu_ram_efficient_loading takes 15 GB beside the model",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--folder", help="folder to read the checkpoint from, or to keep it in")


def measure(args: argparse.Namespace) -> harness.Figure:
    if importlib.util.find_spec("accelerate") is None:
        return harness.Figure(NAME, GOAL, [("accelerate", "is not installed")], None, {})
    shape = {**SHAPE, "num_hidden_layers": args.layers, "intermediate_size": args.intermediate}
    shape |= TINY if args.tiny else {}
    ranks = 2 if args.tiny else args.ranks
    best: dict[str, Taken] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        nbytes = write(folder, shape)
        for _ in range(args.rounds):
            for way in args.ways:
                print(f"  {way}, ranks: {ranks}", file=sys.stderr, flush=True)
                taken = run("benchmarks.load_experts:work", f"{way}|{folder}", ranks)
                if way not in best or taken.wall < best[way].wall:
                    best[way] = taken
    assert all(taken.said == best[args.ways[0]].said for taken in best.values()), "the ways differ"
    rows, found = [], []
    for way, taken in best.items():
        one = {"ranks": ranks, "way": way, "bytes": nbytes, "wall": taken.wall, "cpu": taken.cpu}
        found.append({**one, "peak": taken.peak, "net": taken.net, "ratio": taken.net / nbytes})
        sizes = f"peak {taken.peak / 1e9:.2f} GB, without imports {taken.net / nbytes:.2f} times the checkpoint"
        rows.append((f"{way}, ranks: {ranks}", f"{taken.wall:.1f} s, {taken.cpu:.1f} CPU s, {sizes}"))
    met = None
    if len(best) == len(WAYS):
        ours, theirs = (best[way] for way in WAYS)
        met = 3 * ours.wall <= theirs.wall and ours.net <= 1.15 * nbytes
    return harness.Figure(NAME, GOAL, rows, met, {"runs": found})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
