"""`firstloss inspect TARGET`: show what a constructor would make, without making it."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..errors import TargetError
from . import mesh, output, target

NAME = "inspect"
HELP = "show what a target would make: each weight, its recipe and its stream position; makes nothing"
EXAMPLE = "firstloss inspect path/to/config.json --mesh fsdp=64,tp=8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    target.add_random_arguments(parser)
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="also show the shard of each weight on one rank of this mesh: axes tp, tensor and model shard by the "
        "model's own plan, dp_replicate, replicate, replica and ddp replicate, and all others shard like FSDP",
    )
    mesh.add_shard_argument(parser, "others as --mesh says")


def run(args: argparse.Namespace) -> int:
    wanted = target.load(args.target, args.arg)
    axes = mesh.parse(args.mesh) if args.mesh else None
    given = mesh.parse_specs(args.shard, axes)

    import torch

    import firstloss as fl

    torch.manual_seed(args.seed)
    with fl.deferred(rng=args.rng):
        module = wanted()
    if not isinstance(module, torch.nn.Module):
        raise TargetError(
            f"TARGET {wanted.text!r} makes a {type(module).__name__}, but only a Module's weights have names"
        )
    report = fl.init_program(module).report()
    shards = None if axes is None else _shards(report, module, axes, given)
    if args.json:
        found = {"target": wanted.text, "seed": args.seed, "rng": args.rng, **report.to_dict()}
        if shards is not None and axes is not None:
            found |= {"mesh": axes, "bytes_per_rank": sum(shard.bytes for shard in shards.values())}
            for row in found["weights"]:
                shard = shards[row["weight"]]
                row |= {"cut": shard.spec, "shape_per_rank": shard.shape, "bytes_per_rank": shard.bytes}
        output.print_json(found)
        return 0
    if shards is None or axes is None:
        print(report)
        return 0
    print(report.table({name: (_shape(s.shape), str(s)) for name, s in shards.items()}, ("a rank's", "cut")))
    for line in _summary(report, shards, axes):
        print(line)
    return 0


def _shards(report: Any, module: Any, axes: mesh.Axes, specs: dict[str, mesh.Spec]) -> dict[str, mesh.RankShard]:
    for pattern in specs:
        if not any(mesh.fnmatchcase(row.weight, pattern) for row in report.rows):
            raise TargetError(f"--shard {pattern!r} matches no weight; names look like {report.rows[0].weight}")
    plan = mesh.plan_of(module)
    return {
        row.weight: mesh.shard_of(
            row.weight,
            row.shape,
            row.bytes // max(math.prod(row.shape), 1),
            axes,
            row.kind == "parameter",
            plan,
            specs,
        )
        for row in report.rows
    }


def _summary(report: Any, shards: dict[str, mesh.RankShard], axes: mesh.Axes) -> list[str]:
    from ..init.shardings import REPLICA_AXES

    ranks = math.prod(axes.values())
    held = sum(shard.bytes for shard in shards.values())
    replicated = sum(shard.bytes for shard in shards.values() if not any(shard.spec))
    words = " x ".join(f"{name}={size}" for name, size in axes.items())
    lines = [
        f"mesh {words}, {ranks:,} ranks: each holds at most {held:,} bytes ({output.size(held)}), "
        f"a {report.bytes / max(held, 1):.1f}th of all; {replicated:,} of them are replicated on every rank"
    ]
    for axis in axes:
        if axis not in REPLICA_AXES and not any(axis in entry for shard in shards.values() for entry in shard.spec):
            lines.append(f"axis {axis!r} shards nothing: the model has no plan for it. Use --shard to shard weights")
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
