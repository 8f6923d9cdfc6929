"""`firstloss init TARGET -o DIR`: write a target's initial weights, of any size, directly to safetensors."""

from __future__ import annotations

import argparse
import time

from ..errors import TargetError
from . import output, target

NAME = "init"
HELP = "write a target's initial weights, of any size, to safetensors without holding a whole weight in memory"
EXAMPLE = "firstloss init path/to/config.json -o weights --seed 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="the output folder, created if necessary")
    target.add_random_arguments(parser)
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="maximal size of a file, as 200MB or 2GiB (default 5GB)"
    )


def run(args: argparse.Namespace) -> int:
    wanted = target.load(args.target, args.arg)

    import torch

    import firstloss as fl

    torch.manual_seed(args.seed)
    began = time.perf_counter()
    with fl.deferred(rng=args.rng):
        module = wanted()
    if not isinstance(module, torch.nn.Module):
        raise TargetError(
            f"TARGET {wanted.text!r} makes a {type(module).__name__}, but only a Module has a state dict to save"
        )
    captured = time.perf_counter()
    console = output.console(args.json)
    size = 0
    with output.progress(console) as bar:
        task = bar.add_task(f"writing {args.out} (MB)", total=None)

        def progress(done: int, total: int) -> None:
            nonlocal size
            size = total
            bar.update(task, completed=done // 10**6, total=total // 10**6)

        fl.save_initialized(module, args.out, max_shard_size=args.max_shard_size, progress=progress)
    seconds = {"capture": captured - began, "write": time.perf_counter() - captured}
    if args.json:
        described = {"target": wanted.text, "out": args.out, "seed": args.seed, "rng": args.rng}
        output.print_json({**described, "bytes": size, "seconds": seconds})
    else:
        console.print(
            f"{args.out}: {output.size(size)} in {seconds['write']:.2f} s, captured in {seconds['capture']:.2f} s",
            markup=False,
            soft_wrap=True,
        )
    return 0
