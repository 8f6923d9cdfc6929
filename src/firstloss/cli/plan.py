"""`firstloss plan TARGET`: what a training step takes on each device of a mesh of any size; nothing is made or run."""

from __future__ import annotations

import argparse
import inspect
import math
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..errors import FirstlossError, PlanError, TargetError
from ..uncollected import uncollected
from . import mesh, output, target

if TYPE_CHECKING:
    import torch

    from ..runtime.step.plan import StepPlan

NAME = "plan"
HELP = "show what a training step takes on each device of a mesh: memory, what is sent, time; runs nothing"
EXAMPLE = (
    "firstloss plan path/to/config.json --mesh fsdp=64,tp=8 --batch 128x8192 --memory 80GiB --flops 989T "
    "--link fsdp=50GB/s,tp=450GB/s"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        required=True,
        help="the devices, which need not be there: axes tp, tensor and model cut as the model's own plan says, others "
        "the batch and, as FSDP, the weights (docs: Training on a mesh)",
    )
    parser.add_argument(
        "--batch",
        metavar="[NAME=]SHAPE[:DTYPE]",
        action="append",
        required=True,
        help="the whole batch, for all devices: 512x8192 are a language model's tokens; any other model's arguments in "
        "turn or by name, as pixel_values=512x3x224x224:bfloat16 (default float32)",
    )
    parser.add_argument(
        "--cut",
        metavar="PATTERN=CUTS",
        action="append",
        default=[],
        help="how weights of such names are cut instead: for each dimension axes or -, as '*.q_proj.weight=tp,fsdp'",
    )
    parser.add_argument(
        "--optimizer", metavar="NAME", default="AdamW", help="one of torch.optim, by its name (default AdamW)"
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="keep little of the forward pass and compute it again in the backward pass: the model's own "
        "gradient_checkpointing_enable()",
    )
    parser.add_argument("--memory", metavar="BYTES", help="say whether it fits in so much, as 80GiB")
    parser.add_argument("--flops", metavar="RATE", help="a device's floating-point operations in a second, as 989T")
    parser.add_argument(
        "--link",
        metavar="[AXIS=]RATE",
        help="what a device sends in a second, as 50GB/s; by axis, as fsdp=50GB/s,tp=450GB/s",
    )
    parser.add_argument("--picture", metavar="FILE", help="also draw it, as SVG")


def run(args: argparse.Namespace) -> int:
    with uncollected():  # nearly all that is imported and traced lives to the end
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    wanted = target.load(args.target, args.arg)
    axes = mesh.parse(args.mesh)
    memory = None if args.memory is None else _number("--memory", args.memory)
    rate = None if args.flops is None else _number("--flops", args.flops)
    links = None if args.link is None else _links(args.link, axes)
    if args.picture is not None and not args.picture.endswith(".svg"):
        raise PlanError(f"--picture {args.picture}: the picture is SVG. Give it such a name, as plan.svg")
    batch = [_tensor_said(text) for text in args.batch]

    with _backend(axes):
        plan = _planned(wanted, axes, batch, args)
    seconds = plan.seconds(rate, links) if rate is not None and links is not None else None
    took = time.perf_counter() - began
    found = {"target": wanted.text, "batch": args.batch, "optimizer": args.optimizer, **plan.to_dict()}
    found |= {"memory": memory, "fits": None if memory is None else plan.peak_bytes <= memory, "plan_seconds": took}
    if seconds is not None:
        found["seconds"] = vars(seconds)
    if args.picture is not None:
        from . import plan_picture

        plan_picture.draw(args.picture, plan, seconds, memory, wanted.text)
    if args.json:
        output.print_json(found)
    else:
        from . import plan_table

        plan_table.show(plan, seconds, memory)
        output.console().print(f"planned in {took:.1f} s; nothing was made, compiled or sent", soft_wrap=True)
    return 0


@contextmanager
def _backend(axes: mesh.Axes) -> Iterator[None]:
    """A backend on a mesh that is not there, in which steps are only traced."""
    import jax

    jax.config.update("jax_platforms", "cpu")

    import firstloss as fl

    devices = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    with tempfile.TemporaryDirectory(prefix="firstloss-plan-") as folder:
        fl.backend("XLA", mesh=devices, artifact_dir=folder, validate_only=True)
        yield


def _planned(wanted: target.Target, axes: mesh.Axes, batch: list[_Said], args: argparse.Namespace) -> StepPlan:
    import torch

    import firstloss as fl

    optimizer_class: Any = getattr(torch.optim, args.optimizer, None)
    if not (isinstance(optimizer_class, type) and torch.optim.Optimizer in optimizer_class.__mro__):
        raise PlanError(f"--optimizer {args.optimizer}: torch.optim has none of this name. Write for instance AdamW")
    backend = fl.current_backend()
    with backend.device:
        model = wanted()
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"TARGET {wanted.text!r} makes a {type(model).__name__}: only a Module can be trained")
    if args.recompute:
        enable: Any = getattr(model, "activation_checkpointing_enable", None)  # transformers' name since 5.0
        enable = enable or getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise PlanError(
                f"--recompute: {type(model).__name__} has no gradient_checkpointing_enable(), as transformers' models "
                "have. Plan a step of your own that checkpoints: step.plan(batch)"
            )
        enable()
    inputs, named = _batch(model, batch, axes)
    specs = _specs(model, axes, args.cut)
    if specs:
        fl.shard(model, specs, axes)
    compiled = fl.compile(model, backend)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise PlanError(f"TARGET {wanted.text!r} has no parameter that is trained, so there is no step to plan")
    optimizer = optimizer_class(trained, lr=1e-3)

    @fl.trace
    def step(inputs: tuple, named: dict[str, Any]) -> Any:
        loss = _loss(compiled(*inputs, **named))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is whole, the plan says
        try:
            return step.plan(inputs, named)
        except FirstlossError:
            raise
        except Exception as error:
            raise PlanError(
                f"TARGET {wanted.text!r}: with --batch {' '.join(args.batch)} the step raises {type(error).__name__}: "
                f"{error}. Its forward takes {inspect.signature(model.forward)}: give each of them, as --batch x=512x64"
            ) from error


def _loss(made: Any) -> Any:
    """What a model returns as its loss, if it has one; else something that all of its output goes into."""
    import torch

    loss = getattr(made, "loss", None)
    if loss is None:
        loss = made if isinstance(made, torch.Tensor) else next(_tensors(made), None)
    if loss is None:
        raise PlanError(f"the model returns {type(made).__name__}, in which there is no tensor for a loss")
    return loss if loss.dim() == 0 else loss.float().square().mean()


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, Mapping):
        for one in made.values():
            yield from _tensors(one)
    elif isinstance(made, (list, tuple)):
        for one in made:
            yield from _tensors(one)


# -- the batch -------------------------------------------------------------------------------------------------------

_Said = tuple[str, tuple[int, ...], str]  # name or "", shape, dtype or ""
_SHAPE = re.compile(r"(?:(?P<name>\w+)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


def _tensor_said(text: str) -> _Said:
    found = _SHAPE.fullmatch(text)
    if found is None or "0" in found["shape"].split("x"):
        raise PlanError(f"--batch {text}: write a shape, as 512x8192, or with name and dtype, as x=512x64:bfloat16")
    return found["name"] or "", tuple(map(int, found["shape"].split("x"))), found["dtype"] or ""


def _batch(model: torch.nn.Module, batch: list[_Said], axes: mesh.Axes) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments, by place and by name."""
    import torch

    from ..init.shardings import DATA_AXES

    takes = inspect.signature(model.forward).parameters
    ways = {axis: axes[axis] for axis in axes if axis in DATA_AXES}
    count = math.prod(ways.values())
    inputs: list[Any] = []
    named: dict[str, Any] = {}
    for name, shape, dtype in batch:
        if name and name not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise PlanError(f"--batch {name}=...: the model's forward takes {', '.join(takes)}")
        if shape[0] % count:
            more = -(-shape[0] // count) * count
            better = "x".join(map(str, (more, *shape[1:])))
            raise PlanError(
                f"--batch {'x'.join(map(str, shape))}: its {shape[0]} rows cannot be shared by the {count} devices of "
                f"{' x '.join(f'{axis}={size}' for axis, size in ways.items())}. Write {better}, or a smaller mesh"
            )
        tokens = not dtype and (name == "input_ids" or not name and "input_ids" in takes)
        kind = getattr(torch, dtype or ("int64" if tokens else "float32"), None)
        if not isinstance(kind, torch.dtype):
            raise PlanError(f"--batch: torch has no dtype {dtype!r}. Write for instance float32 or bfloat16")
        tensor = torch.zeros(shape, dtype=kind)
        if tokens:
            named["input_ids"] = tensor
            if "labels" in takes and not any(other == "labels" for other, _, _ in batch):
                named["labels"] = torch.zeros(shape, dtype=kind)
        elif name:
            named[name] = tensor
        else:
            inputs.append(tensor)
    return tuple(inputs), named


# -- how weights are cut ---------------------------------------------------------------------------------------------


def _specs(model: torch.nn.Module, axes: mesh.Axes, cuts: list[str]) -> dict[str, tuple]:
    """Specs for `fl.shard`: as --cut says, else as the model's own plan of tensor parallelism does, with the data axes
    on another dimension. Weights that neither names are cut by the default policy."""
    from ..init.shardings import DATA_AXES

    shapes = {name: tuple(p.shape) for name, p in (*model.named_parameters(), *model.named_buffers())}
    specs: dict[str, tuple] = {}
    for pattern, said in mesh.parse_cuts(cuts, axes).items():
        matching = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(f"--cut {pattern!r} matches no weight; they have names like {next(iter(shapes), 'none')}")
        for name in matching:
            _check_cut(name, shapes[name], said, axes, f"--cut {pattern!r}")
        specs[pattern] = said
    tensor = tuple(axis for axis in axes if axis in mesh.TENSOR and axes[axis] > 1)
    data = tuple(axis for axis in axes if axis in DATA_AXES)
    plan = mesh.plan_of(model)
    others = [axis for axis in axes if axis not in (*tensor, *data)]
    used = {axis for spec in specs.values() for entry in spec for axis in entry}
    unknown = [axis for axis in others if axis not in used and axes[axis] > 1]
    if unknown and data:
        raise PlanError(
            f"--mesh: nothing is cut over {unknown[0]!r}. Axes for data are {', '.join(sorted(DATA_AXES))}, for "
            f"tensor parallelism {', '.join(sorted(mesh.TENSOR))}; weights are cut over any axis with --cut"
        )
    if tensor and not plan and not set(tensor) & used:
        raise PlanError(
            f"--mesh: {type(model).__name__} has no plan of its own for tensor parallelism (tp_plan), so that nothing "
            f"is cut over {tensor[0]!r}. Say what is: --cut '*.up.weight={tensor[0]},-'"
        )
    if not tensor:
        return specs
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        dim = mesh.dimension(name, len(shape), plan)
        if dim is None or any(fnmatchcase(name, pattern) for pattern in specs):
            continue
        spec: list[tuple[str, ...]] = [()] * len(shape)
        spec[dim] = tensor
        _check_cut(name, shape, tuple(spec), axes, "the model's own plan")
        ways = math.prod(axes[axis] for axis in data)
        room = [d for d in range(len(shape)) if d != dim and shape[d] % ways == 0]
        if data and room:
            spec[max(room, key=lambda d: shape[d])] = data
        elif data and shape[dim] % (ways * math.prod(axes[axis] for axis in tensor)) == 0:
            spec[dim] = (*tensor, *data)
        specs[name] = tuple(spec)
    return specs


def _check_cut(name: str, shape: tuple[int, ...], spec: mesh.Spec, axes: mesh.Axes, whose: str) -> None:
    if len(spec) > len(shape):
        raise PlanError(f"{whose} has {len(spec)} dimensions, and {name} has {len(shape)}")
    for dim, entry in enumerate(spec):
        ways = math.prod(axes[axis] for axis in entry)
        if shape[dim] % ways:
            fits = max(size for size in range(1, ways + 1) if shape[dim] % size == 0)
            raise PlanError(
                f"{whose} cuts dimension {dim} of {name}, of shape {'x'.join(map(str, shape))}, over "
                f"{' x '.join(f'{axis}={axes[axis]}' for axis in entry)}: {ways} does not divide {shape[dim]}. "
                f"Write a mesh on which that is {fits}, or cut it otherwise with --cut '{name}=...'"
            )


# -- numbers ---------------------------------------------------------------------------------------------------------

_UNITS = {
    "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:[eE]\d+)?)\s*(?P<unit>[kMGTP]?i?)(?:B|FLOPS?|FLOP)?(?:/s)?")


def _number(option: str, text: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found["unit"] not in _UNITS or float(found["number"]) == 0:
        example = {"--memory": "80GiB", "--flops": "989T"}.get(option, "50GB/s")
        raise PlanError(f"{option} {text!r} is no quantity. Write for instance {option} {example}")
    return float(found["number"]) * _UNITS[found["unit"]]


def _links(text: str, axes: mesh.Axes) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        axis, equals, rate = part.strip().rpartition("=")
        if equals and axis not in axes:
            raise PlanError(f"--link {text!r} names an axis {axis!r}; the mesh has {', '.join(axes)}")
        found[axis] = _number("--link", rate)
    if "" not in found and (left := [axis for axis in axes if axis not in found and axes[axis] > 1]):
        raise PlanError(
            f"--link {text!r} does not say {left[0]!r}. Write for instance {left[0]}=50GB/s, or one for all"
        )
    return found
