"""`firstloss check-init TARGET`: which weights scripts for the meta device leave unwritten, or give other values."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from ..errors import TargetError, UnwrittenWeightsError
from . import output, target
from .verify import difference

if TYPE_CHECKING:
    import torch

NAME = "check-init"
HELP = "construct a target on the meta device and initialize it as FSDP scripts do, and name the weights that are wrong"
EXAMPLE = "firstloss check-init torch.nn:Transformer --arg d_model=64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="also shard it over N ranks, as by fully_shard, and name the weights of which each draws its own part",
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of both (default 0)")


def run(args: argparse.Namespace) -> int:
    """Construct twice, on the meta device and (deferred) as on a CPU, and initialize both in the same way."""
    wanted = target.load(args.target, args.arg)

    import torch

    import firstloss as fl

    torch.manual_seed(args.seed)
    model = fl.deferred_init(wanted)
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{wanted.text} returns an object of type {type(model).__name__}, not a module")
    fl.materialize_module(model)
    torch.manual_seed(args.seed + 1)
    how = initialize(model)
    expected = tensors_of(model)

    torch.manual_seed(args.seed)
    with fl.check_init("report") as check:
        with torch.device("meta"):
            on_meta = wanted()
        on_meta.to_empty(device="cpu")
        torch.manual_seed(args.seed + 1)
        initialize(on_meta)
    unwritten = {weight.name: weight for weight in check.unwritten if weight.name in expected}
    wrong = []
    for name, tensor in tensors_of(on_meta).items():
        found = unwritten.get(name)
        if found is None and name in expected and difference(expected[name], tensor) is None:
            continue
        why, owner = "unwritten", type(on_meta.get_submodule(name.rpartition(".")[0])).__qualname__
        if found is None:
            why = "other values"
        elif found.elements < tensor.numel():
            why = f"{found.elements:,} of {tensor.numel():,} elements unwritten"
        wrong.append({"name": name, "shape": list(tensor.shape), "why": why, "class": found.owner if found else owner})
    result = {"target": wanted.text, "initialization": how, "tensors": len(expected), "wrong": wrong}
    if args.ranks > 1:
        result["drawn_by_rank"] = drawn_by_rank(wanted, args)
    if args.json:
        output.print_json(result)
    else:
        _print(result)
    if wrong:
        raise UnwrittenWeightsError(
            f"{wanted.text}: {len(wrong)} of {len(expected)} tensors are not what the constructor makes; first "
            f"{wrong[0]['name']}: {wrong[0]['why']}"
        )
    return 0


def initialize(model: torch.nn.Module) -> str:
    """Make the calls of a script for the meta device after `to_empty`; returns which."""
    import torch

    with torch.no_grad():
        of_transformers: Any = getattr(model, "_init_weights", None)
        if of_transformers is not None and hasattr(model, "config"):
            model.apply(of_transformers)
            return "model.apply(model._init_weights)"
        if callable(init_weights := getattr(model, "init_weights", None)):
            init_weights()
            return "model.init_weights()"
        for module in model.modules():
            if callable(reset_parameters := getattr(module, "reset_parameters", None)):
                reset_parameters()
        return "reset_parameters() of each module"


def drawn_by_rank(wanted: target.Target, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each weight that ranks draw for themselves, if the model is sharded before it is initialized."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import firstloss as fl

    from ..compat.torch_names import FakeStore

    warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)  # on CPUs; the numbers are not used
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    try:
        with fl.check_init("report") as check:
            with torch.device("meta"):
                model = wanted()
            numbers = {p for p in model.parameters() if p.dim() == 0}  # which it cannot shard
            fully_shard(model, mesh=init_device_mesh("cpu", (args.ranks,)), ignored_params=numbers)
            model.to_empty(device="cpu")
            torch.manual_seed(args.seed + 1)
            initialize(model)
    finally:
        distributed.destroy_process_group()
    why = f"each of {args.ranks} ranks draws its own part"
    return [
        {"name": weight.name, "shape": list(weight.shape), "why": why, "class": weight.owner}
        for weight in check.drawn_by_rank
    ]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, including those that are not saved."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _print(result: dict[str, Any]) -> None:
    console = output.console()
    rows = [
        (row["name"], "x".join(map(str, row["shape"])) or "a number", row["why"], row["class"])
        for row in [*result["wrong"], *result.get("drawn_by_rank", ())]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        console.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
    console.print(
        f"on the meta device, then to_empty() and {result['initialization']}: {len(result['wrong'])} of "
        f"{result['tensors']} tensors differ from construction and the same initialization on a CPU",
        soft_wrap=True,
    )
