"""`firstloss plan TARGET`: estimate memory, operations and communication of a training step on a mesh of any size."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..interpreter import paused
from . import mesh, output, target, training_step
from .batch import TensorSpec, parse_tensor
from .quantities import link_rates, quantity

if TYPE_CHECKING:
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
    training_step.add_arguments(parser, required=True)
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
    training = training_step.make(wanted, axes, batch, args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the plan itself shows which weights are replicated
        with training.errors(args.batch):
            return training.step.plan(training.inputs, training.named)
