"""A training step of TARGET, for the commands that plan or compare one: `--batch`, `--optimizer`, `--shard`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FirstlossError, PlanError, TargetError
from . import mesh, target
from .batch import TensorSpec, tensors_of
from .specs import specs_of

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """The options that say what is trained, and how.

    Args:
        required: whether there must be a batch.
    """
    parser.add_argument(
        "--batch",
        metavar="[NAME=]SHAPE[:DTYPE]",
        action="append",
        required=required,
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


class Training(NamedTuple):
    """A traced step, and the tensors of zeros that it takes: `step(inputs, named)`."""

    wanted: target.Target
    model: torch.nn.Module
    step: Any
    inputs: tuple[Any, ...]
    named: dict[str, Any]

    @contextmanager
    def errors(self, batch: list[str]) -> Iterator[None]:
        """A block in which what the step raises names the target and its `--batch`."""
        try:
            yield
        except FirstlossError:
            raise
        except Exception as error:
            raise PlanError(
                f"TARGET {self.wanted.text!r}: with --batch {' '.join(batch)} the step raises {type(error).__name__}: "
                f"{error}. forward takes {inspect.signature(self.model.forward)}: pass each argument, as "
                "--batch x=512x64"
            ) from error


def make(wanted: target.Target, axes: mesh.Axes, batch: list[TensorSpec], args: argparse.Namespace) -> Training:
    """The target's training step on the current backend."""
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
        raise PlanError(f"TARGET {wanted.text!r} has no trainable parameters, so there is no step")
    optimizer = optimizer_class(trained, lr=1e-3)

    @fl.trace
    def step(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        loss = _loss(compiled(*inputs, **named))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(wanted, model, step, inputs, named)


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
