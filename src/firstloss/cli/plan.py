"""`firstloss plan TARGET`: estimate memory, operations and communication of a training step on a mesh of any size."""

from __future__ import annotations

import argparse
import inspect
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import FirstlossError, PlanError, TargetError
from ..interpreter import paused
from . import mesh, output, target
from .batch import TensorSpec, parse_tensor, tensors_of
from .quantities import link_rates, quantity
from .specs import specs_of

if TYPE_CHECKING:
    import torch

    from ..runtime.step.plan import StepPlan

NAME = "plan"
HELP = "show what a training step takes on each device of a mesh: memory, communication, time; runs nothing"
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
        help="the devices, which need not exist: axes tp, tensor and model shard by the model's own plan, others shard "
        "the batch and, like FSDP, the weights (docs: What a plan counts)",
    )
    parser.add_argument(
        "--batch",
        metavar="[NAME=]SHAPE[:DTYPE]",
        action="append",
        required=True,
        help="the global batch: 512x8192 are a language model's tokens; other models' arguments in order or by name, "
        "as pixel_values=512x3x224x224:bfloat16 (default float32)",
    )
    mesh.add_shard_argument(parser, "others as --mesh says")
    parser.add_argument(
        "--optimizer", metavar="NAME", default="AdamW", help="the name of an optimizer in torch.optim (default AdamW)"
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="activation checkpointing: recompute the forward pass in the backward pass, with the model's own "
        "gradient_checkpointing_enable()",
    )
    parser.add_argument("--memory", metavar="BYTES", help="a device's memory, to check whether the step fits, as 80GiB")
    parser.add_argument("--flops", metavar="RATE", help="a device's floating-point operations per second, as 989T")
    parser.add_argument("--hbm", metavar="RATE", help="a device's memory bandwidth, as 3.35TB/s")
    parser.add_argument(
        "--link",
        metavar="[AXIS=]RATE",
        help="the bandwidth between devices, as 50GB/s; by axis, as fsdp=50GB/s,tp=450GB/s",
    )
    parser.add_argument("--picture", metavar="FILE", help="also draw the plan, as SVG")


def run(args: argparse.Namespace) -> int:
    with paused():  # nearly everything imported and traced lives until the end
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    wanted = target.load(args.target, args.arg)
    axes = mesh.parse(args.mesh)
    memory = None if args.memory is None else quantity("--memory", args.memory)
    rate = None if args.flops is None else quantity("--flops", args.flops)
    hbm = None if args.hbm is None else quantity("--hbm", args.hbm)
    if hbm is not None and (rate is None or args.link is None):
        raise PlanError("--hbm needs --flops and --link, too, to estimate a step's time")
    links = None if args.link is None else link_rates(args.link, axes)
    if args.picture is not None and not args.picture.endswith(".svg"):
        raise PlanError(f"--picture {args.picture}: the picture is an SVG file, so its name must end in .svg")
    batch = [parse_tensor(text) for text in args.batch]

    with _backend(axes):
        plan = _planned(wanted, axes, batch, args)
    seconds = plan.seconds(rate, links, hbm or math.inf) if rate is not None and links is not None else None
    took = time.perf_counter() - began
    report = {"target": wanted.text, "batch": args.batch, "optimizer": args.optimizer, **plan.to_dict()}
    report |= {"memory": memory, "fits": None if memory is None else plan.peak_bytes <= memory, "plan_seconds": took}
    if seconds is not None:
        report["seconds"] = vars(seconds)
    if args.picture is not None:
        from . import plan_picture

        plan_picture.draw(args.picture, plan, seconds, memory, wanted.text)
    if args.json:
        output.print_json(report)
    else:
        from . import plan_table

        plan_table.show(plan, seconds, memory)
        output.console().print(f"planned in {took:.1f} s; nothing was allocated, compiled or run", soft_wrap=True)
    return 0


@contextmanager
def _backend(axes: mesh.Axes) -> Iterator[None]:
    """Set a backend on an abstract mesh, whose steps are only traced."""
    import jax

    jax.config.update("jax_platforms", "cpu")

    import firstloss as fl

    devices = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    with tempfile.TemporaryDirectory(prefix="firstloss-plan-") as folder:
        fl.backend("XLA", mesh=devices, artifact_dir=folder, validate_only=True)
        yield


def _planned(wanted: target.Target, axes: mesh.Axes, batch: list[TensorSpec], args: argparse.Namespace) -> StepPlan:
    import torch

    import firstloss as fl

    optimizer_class: Any = getattr(torch.optim, args.optimizer, None)
    if not (isinstance(optimizer_class, type) and torch.optim.Optimizer in optimizer_class.__mro__):
        raise PlanError(
            f"--optimizer {args.optimizer}: torch.optim has no optimizer of this name. Write for example AdamW"
        )
    backend = fl.current_backend()
    with backend.device:
        model = wanted()
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"TARGET {wanted.text!r} makes a {type(model).__name__}: only a Module can be trained")
    if args.recompute:
        enable: Any = getattr(model, "activation_checkpointing_enable", None)  # its name in transformers 5.0 and later
        enable = enable or getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise PlanError(
                f"--recompute: {type(model).__name__} has no gradient_checkpointing_enable(), which transformers' "
                "models have. Plan a step of your own that uses checkpointing: step.plan(batch)"
            )
        enable()
    inputs, named = tensors_of(model, batch, axes)
    specs = specs_of(model, axes, args.shard)
    if specs:
        fl.shard(model, specs, axes)
    compiled = fl.compile(model, backend)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise PlanError(f"TARGET {wanted.text!r} has no trainable parameters, so there is no step to plan")
    optimizer = optimizer_class(trained, lr=1e-3)

    @fl.trace
    def step(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        loss = _loss(compiled(*inputs, **named))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the plan itself shows which weights are replicated
        try:
            return step.plan(inputs, named)
        except FirstlossError:
            raise
        except Exception as error:
            raise PlanError(
                f"TARGET {wanted.text!r}: with --batch {' '.join(args.batch)} the step raises {type(error).__name__}: "
                f"{error}. forward takes {inspect.signature(model.forward)}: pass each argument, as --batch x=512x64"
            ) from error


def _loss(outputs: Any) -> Any:
    """The model's loss, if it returns one; otherwise a scalar that depends on its first output tensor."""
    import torch

    loss = getattr(outputs, "loss", None)
    if loss is None:
        loss = outputs if isinstance(outputs, torch.Tensor) else next(_tensors(outputs), None)
    if loss is None:
        raise PlanError(f"the model returns {type(outputs).__name__}, which holds no tensor for a loss")
    return loss if loss.dim() == 0 else loss.float().square().mean()


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for item in outputs.values():
            yield from _tensors(item)
    elif isinstance(outputs, (list, tuple)):
        for item in outputs:
            yield from _tensors(item)
