"""`firstloss stablehlo TARGET -o FILE`: write a constructor as one StableHLO module."""

from __future__ import annotations

import argparse
import math
import time
import warnings

from ..errors import TargetError
from . import mesh, output, target

NAME = "stablehlo"
HELP = "write a target's constructor as one StableHLO module whose outputs are its weights, sharded over a mesh"
EXAMPLE = "firstloss stablehlo path/to/config.json -o weights.mlir --mesh fsdp=8 --shard '*.embed_tokens.weight=fsdp,-'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the file to write the module to, as text")
    parser.add_argument("--seed", type=int, default=0, help="the seed that the constructor starts from (default 0)")
    parser.add_argument("--rng", choices=("eager", "counter"), default="eager", help="the policy of random numbers")
    parser.add_argument(
        "--mesh", metavar="AXIS=SIZE[,...]", help="the device mesh, of any size, as data=16,tp=4; default one device"
    )
    mesh.add_shard_argument(parser, "by default the largest dimension of each weight is sharded over all data axes")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="also compile it for as many CPU devices on this machine, and print the memory that each needs",
    )


def run(args: argparse.Namespace) -> int:
    wanted = target.load(args.target, args.arg)
    axes = mesh.parse(args.mesh) if args.mesh else None
    shardings = mesh.parse_specs(args.shard, axes) or None
    if args.memory:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", math.prod(axes.values()) if axes else 1)

    import torch

    import firstloss as fl

    from ..files import atomic_write

    torch.manual_seed(args.seed)
    began = time.perf_counter()
    with fl.deferred(rng=args.rng):
        module = wanted()
    if not isinstance(module, torch.nn.Module):
        raise TargetError(
            f"TARGET {wanted.text!r} makes a {type(module).__name__}, but only a Module has named weights"
        )
    captured = time.perf_counter()
    program = fl.init_program(module)
    text = program.to_stablehlo(axes, shardings)
    seconds = {"capture": captured - began, "lower": time.perf_counter() - captured}
    with atomic_write(args.out) as file:
        file.write(text.encode())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to_stablehlo has raised the same warnings
        plan = program.plan(axes, shardings)
        memory = program.peak_bytes(axes, shardings) if args.memory else None
    if args.json:
        output.print_json(
            {
                "target": wanted.text,
                "out": args.out,
                "seed": args.seed,
                "bytes": len(text),
                "plan": plan.to_dict(),
                "memory": memory,
                "seconds": seconds,
            }
        )
    else:
        print(
            f"{args.out}: {output.size(len(text))} in {seconds['lower']:.2f} s, captured in {seconds['capture']:.2f} s"
        )
        print(plan)
        if memory is not None:
            print(
                f"compiled: each device makes {memory['weights']:,} bytes of weights and needs at most "
                f"{memory['temporary']:,} bytes of temporary memory"
            )
    return 0
