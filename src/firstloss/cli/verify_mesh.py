"""`firstloss verify TARGET --mesh ... --batch ...`: compare a training step on two meshes, bit for bit."""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FirstlossError, PlanError
from . import mesh, output, target, training_step
from .batch import TensorSpec, parse_tensor

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        action="append",
        help="compare training steps instead: on this mesh, and on a second --mesh or one device; on a CPU, on as many "
        "virtual devices",
    )
    parser.add_argument("--same-run", metavar="SHARDS", type=int, help="as of fl.backend: the same bits on any mesh")
    parser.add_argument("--steps", type=int, default=3, help="how many steps are compared (default 3)")
    training_step.add_arguments(parser, required=False)


def run(args: argparse.Namespace) -> int:
    wanted = target.load(args.target, args.arg)
    if not args.batch:
        raise PlanError("--mesh compares training steps, which take a batch. Pass for example --batch 16x128")
    meshes = [mesh.parse(text) for text in args.mesh]
    if len(meshes) == 1:
        meshes.append(dict.fromkeys(meshes[0], 1))
    if len(meshes) != 2:
        raise PlanError(f"--mesh is given {len(meshes)} times: a step is compared on two meshes")

    import jax

    jax.config.update("jax_num_cpu_devices", max(math.prod(axes.values()) for axes in meshes))
    batch = [parse_tensor(text) for text in args.batch]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of batches and weights that a mesh does not divide
        compared = _Compared(wanted, batch, args)
        (losses, weights), (others, other_weights) = map(compared.run, meshes)
        at_loss = next((n for n, (a, b) in enumerate(zip(losses, others, strict=True)) if a.hex() != b.hex()), None)
        different = [name for name, weight in weights.items() if differing_elements(weight, other_weights[name])]
        first = None
        if different or at_loss is not None:
            first = compared.first_operation(meshes, args.steps if at_loss is None else at_loss + 1)
    names = [",".join(f"{axis}={size}" for axis, size in axes.items()) for axes in meshes]
    result = {
        "target": wanted.text,
        "meshes": names,
        "same_run": args.same_run,
        "steps": args.steps,
        "identical": not different and at_loss is None,
        "losses": [losses, others],
        "different_weights": different,
        "first_operation": None if first is None else first._asdict(),
    }
    if args.json:
        output.print_json(result)
    if result["identical"]:
        if not args.json:
            output.console().print(
                f"{args.steps} losses and {len(weights)} weights after them are bit-identical on {names[0]} and "
                f"{names[1]}",
                soft_wrap=True,
            )
        return 0
    what = f"{len(different)} of {len(weights)} weights differ after {args.steps} steps"
    if at_loss is not None:
        what = f"loss {at_loss + 1} is {losses[at_loss]!r} on {names[0]} and {others[at_loss]!r} on {names[1]}; {what}"
    where = first or "no operation differs if all results are kept"
    hint = "" if args.same_run else ". With --same-run 8 (fl.backend(same_run=8)) it would be the same run"
    raise FirstlossError(f"{wanted.text}: {what}. {where}{hint}")


class Difference(NamedTuple):
    """The first operation whose results differ."""

    step: int
    operation: str
    line: str
    elements: int
    of: int
    largest: float

    def __str__(self) -> str:
        return (
            f"The first operation that differs, in step {self.step}, is {self.operation} at {self.line}: "
            f"{self.elements:,} of {self.of:,} elements, by {self.largest:.1e} at most"
        )


class _Compared:
    """A training step, run on one mesh after the other from the same seed."""

    def __init__(self, wanted: target.Target, batch: list[TensorSpec], args: argparse.Namespace) -> None:
        self._wanted = wanted
        self._batch = batch
        self._args = args

    def run(self, axes: mesh.Axes) -> tuple[list[float], dict[str, torch.Tensor]]:
        """The losses on a mesh, and the weights after them."""
        with self._training(axes) as training:
            losses = [self._loss(training, number) for number in range(self._args.steps)]
            state = training.model.state_dict()
            return losses, {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def first_operation(self, meshes: list[mesh.Axes], steps: int) -> Difference | None:
        """The first operation in these steps whose results differ between two meshes."""
        for number in range(steps):
            one, other = (self._intermediates(axes, number) for axes in meshes)
            for a, b in zip(one, other, strict=True):
                if count := differing_elements(a.value, b.value):
                    largest = (
                        (a.value.double() - b.value.double()).abs().max().item() if a.value.is_floating_point() else 1
                    )
                    return Difference(number + 1, a.operation, a.line, count, a.value.numel(), largest)
        return None

    def _intermediates(self, axes: mesh.Axes, number: int) -> list[Any]:
        with self._training(axes) as training:
            for earlier in range(number):
                self._loss(training, earlier)
            self._fill(training, number)
            with training.errors(self._args.batch):
                return training.step.lower(training.inputs, training.named).intermediates()

    @contextmanager
    def _training(self, axes: mesh.Axes) -> Iterator[training_step.Training]:
        import torch

        import firstloss as fl

        with tempfile.TemporaryDirectory(prefix="firstloss-verify-") as folder:
            fl.backend("XLA", mesh=axes, artifact_dir=folder, first_loss="compiled", same_run=self._args.same_run)
            torch.manual_seed(self._args.seed)
            yield training_step.make(self._wanted, axes, self._batch, self._args)

    def _loss(self, training: training_step.Training, number: int) -> float:
        self._fill(training, number)
        with training.errors(self._args.batch):
            return float(training.step(training.inputs, training.named).item())

    def _fill(self, training: training_step.Training, number: int) -> None:
        """Draw a batch: numbers, and indices that all embeddings have."""
        import torch

        generator = torch.Generator().manual_seed(self._args.seed + number)
        counts = [m.num_embeddings for m in training.model.modules() if isinstance(m, torch.nn.Embedding)]
        for tensor in (*training.inputs, *training.named.values()):
            if tensor.is_floating_point():
                tensor.normal_(generator=generator)
            else:
                tensor.random_(0, 2 if tensor.dtype is torch.bool else min(counts, default=2), generator=generator)


def differing_elements(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of two tensors of the same shape and dtype have other bits."""
    import torch

    a, b = (tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (a, b))
    return int((a != b).any(1).sum())
