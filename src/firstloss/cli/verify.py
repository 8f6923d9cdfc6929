"""`firstloss verify TARGET`: compare the deferred model with the eager one, bit for bit, or steps on two meshes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import FirstlossError
from . import output, target, verify_mesh

if TYPE_CHECKING:
    import torch

NAME = "verify"
HELP = "compare every weight of a target, eager and deferred, bit for bit; with --mesh, training steps on two meshes"
EXAMPLE = "firstloss verify torch.nn:Linear --arg in_features=512 --arg out_features=512"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="the seed of both (default 0)")
    verify_mesh.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.mesh is not None:
        return verify_mesh.run(args)
    wanted = target.load(args.target, args.arg)

    import torch

    import firstloss as fl

    torch.manual_seed(args.seed)
    began = time.perf_counter()
    eager = wanted()
    eager_seconds = time.perf_counter() - began
    eager_generator = torch.get_rng_state()

    torch.manual_seed(args.seed)
    began = time.perf_counter()
    deferred = fl.deferred_init(wanted)
    deferred_generator = torch.get_rng_state()
    materialize(deferred)
    deferred_seconds = time.perf_counter() - began

    names = dict(named_tensors(eager))
    differences = compare(names, dict(named_tensors(deferred)))
    if not torch.equal(eager_generator, deferred_generator):
        differences["(random generator)"] = "ends in another state than after eager construction"
    bytes_compared = sum(tensor.numel() * tensor.element_size() for tensor in names.values())
    result = {
        "target": wanted.text,
        "seed": args.seed,
        "tensors": len(names),
        "bytes": bytes_compared,
        "identical": not differences,
        "differences": differences,
        "eager_seconds": eager_seconds,
        "deferred_seconds": deferred_seconds,
    }
    if args.json:
        output.print_json(result)
    else:
        console = output.console()
        for name, why in differences.items():
            console.print(f"{name}: {why}", markup=False, soft_wrap=True)
        if not differences:
            console.print(
                f"{len(names)} tensors, {output.size(bytes_compared)}, and the random generator are bit-identical: "
                f"eager {eager_seconds:.2f} s, deferred {deferred_seconds:.2f} s",
                soft_wrap=True,
            )
    if differences:
        name, why = next(iter(differences.items()))
        raise FirstlossError(f"{wanted.text}: {len(differences)} of {len(names) + 1} differ; first {name}: {why}")
    return 0


def named_tensors(result: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in what a constructor returned, attributes included, by name; tied tensors once for each name."""
    import torch

    if isinstance(result, torch.Tensor):
        yield prefix or "(the tensor)", result
    elif isinstance(result, torch.nn.Module):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in result.named_parameters(remove_duplicate=False):
            yield dot + name, parameter
        for name, buffer in result.named_buffers(remove_duplicate=False):
            yield dot + name, buffer
        for path, module in result.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    yield f"{dot}{path}.{name}" if path else dot + name, value
    elif isinstance(result, dict):
        for name, value in result.items():
            yield from named_tensors(value, f"{prefix}[{name!r}]")
    elif isinstance(result, list | tuple):
        for number, value in enumerate(result):
            yield from named_tensors(value, f"{prefix}[{number}]")


def materialize(result: Any) -> None:
    """Materialize all deferred tensors in what a constructor returned."""
    import torch

    import firstloss as fl

    if isinstance(result, torch.nn.Module):
        fl.materialize_module(result)
    else:
        for part in result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ():
            materialize(part)
        if isinstance(result, torch.Tensor):
            fl.materialize_tensor(result)


def compare(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> dict[str, str]:
    """How tensors differ, by name; empty if all are bit-identical and tied alike."""
    ties, got_ties = _first_names(expected), _first_names(actual)
    differences = {}
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            differences[name] = "is missing from the deferred model"
        elif name not in expected:
            differences[name] = "is in the deferred model only"
        elif why := difference(expected[name], actual[name]):
            differences[name] = why
        elif ties[name] != got_ties[name]:
            differences[name] = f"is tied to {got_ties[name]}, but to {ties[name]} in the eager model"
    return differences


def _first_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """For each name, the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    for attribute in ("shape", "dtype", "device", "requires_grad"):
        a, b = getattr(expected, attribute), getattr(actual, attribute)
        if a != b:
            return f"{attribute} is {b}, but {a} in the eager model"
    count = verify_mesh.differing_elements(expected, actual)
    return f"{count} of {expected.numel()} elements differ" if count else None
