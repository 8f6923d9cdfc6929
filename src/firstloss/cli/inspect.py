"""`firstloss inspect TARGET`: what a constructor would create, without creating it."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..errors import TargetError
from . import mesh, output, target

NAME = "inspect"
HELP = "show what a target would make: each weight, its recipe, its place in the random stream; makes nothing"
EXAMPLE = "firstloss inspect path/to/config.json --mesh fsdp=64,tp=8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    target.add_random_arguments(parser)
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="also what one rank of such a mesh would hold: axes tp, tensor and model cut as the model's own plan "
        "says, dp_replicate, replicate, replica and ddp hold copies, and any other cuts as FSDP does",
    )
    parser.add_argument(
        "--cut",
        metavar="PATTERN=CUTS",
        action="append",
        default=[],
        help="how weights of such names are cut instead: for each dimension axes or -, as '*.q_proj.weight=tp+fsdp,-'",
    )


def run(args: argparse.Namespace) -> int:
    wanted = target.load(args.target, args.arg)
    axes = mesh.parse(args.mesh) if args.mesh else None
    if args.cut and axes is None:
        raise TargetError("--cut says how weights are sharded: give the mesh as well, as --mesh fsdp=64,tp=8")

    import torch

    import firstloss as fl

    torch.manual_seed(args.seed)
    with fl.deferred(rng=args.rng):
        module = wanted()
    if not isinstance(module, torch.nn.Module):
        raise TargetError(f"TARGET {wanted.text!r} makes a {type(module).__name__}: only a Module's weights have names")
    report = fl.init_program(module).report()
    parts = None if axes is None else _parts(report, module, axes, args.cut)
    if args.json:
        found = {"target": wanted.text, "seed": args.seed, "rng": args.rng, **report.to_dict()}
        if parts is not None and axes is not None:
            found |= {"mesh": axes, "bytes_per_rank": sum(part.bytes for part in parts.values())}
            for row in found["weights"]:
                part = parts[row["weight"]]
                row |= {"cut": part.spec, "shape_per_rank": part.shape, "bytes_per_rank": part.bytes}
        output.print_json(found)
        return 0
    if parts is None or axes is None:
        print(report)
        return 0
    print(report.table({name: (_shape(part.shape), str(part)) for name, part in parts.items()}, ("a rank's", "cut")))
    for line in _summary(report, parts, axes):
        print(line)
    return 0


def _parts(report: Any, module: Any, axes: mesh.Axes, cuts: list[str]) -> dict[str, mesh.RankShard]:
    specs = mesh.parse_cuts(cuts, axes)
    for pattern in specs:
        if not any(mesh.fnmatchcase(row.weight, pattern) for row in report.rows):
            raise TargetError(f"--cut {pattern!r} matches no weight; they have names like {report.rows[0].weight}")
    plan = mesh.plan_of(module)
    return {
        row.weight: mesh.part_of(
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


def _summary(report: Any, parts: dict[str, mesh.RankShard], axes: mesh.Axes) -> list[str]:
    ranks = math.prod(axes.values())
    held = sum(part.bytes for part in parts.values())
    whole = sum(part.bytes for part in parts.values() if not any(part.spec))
    words = " x ".join(f"{name}={size}" for name, size in axes.items())
    lines = [
        f"mesh {words}, {ranks:,} ranks: each holds at most {held:,} bytes ({output.size(held)}), "
        f"a {report.bytes / max(held, 1):.1f}th of all; {whole:,} of them are the same on every rank"
    ]
    for axis in axes:
        if axis not in mesh.REPLICAS and not any(axis in entry for part in parts.values() for entry in part.spec):
            lines.append(f"axis {axis!r} cuts nothing: the model has no plan for it. Say how it cuts, with --cut")
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
