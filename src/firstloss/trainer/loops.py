"""How long training goes on, and what each step of it is: the numbers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import TrainerError
from ..settings import Settings


@dataclass
class ValidationLoop(Settings):
    """One pass over the validation loader.

    Attributes:
        max_batches: stop after so many batches; None: all of them.
        metrics: {name: metric}, objects with `update`, `compute` and `reset` as torchmetrics has them. They are
            updated on the host, with what `metric_inputs` returns.
        metric_inputs: (batch, outputs) -> the arguments of `update`. Default: the outputs' "logits", and the batch's
            "labels", "label", "targets" or "target", or its last element.
    """

    max_batches: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metric_inputs: Callable[[Any, Any], tuple] | None = None

    def __post_init__(self) -> None:
        _positive(self, "max_batches")
        if not isinstance(self.metrics, Mapping):
            raise TrainerError(f"ValidationLoop: metrics={self.metrics!r} is not a dict of metrics by name.")
        if self.metric_inputs is not None and not callable(self.metric_inputs):
            raise TrainerError(
                f"ValidationLoop: metric_inputs={self.metric_inputs!r} is not a function of a batch and the outputs."
            )
        for name, metric in self.metrics.items():
            if isinstance(metric, type) or not all(hasattr(metric, part) for part in ("update", "compute", "reset")):
                kind = (
                    f"the class {metric.__name__}" if isinstance(metric, type) else f"of type {type(metric).__name__}"
                )
                raise TrainerError(
                    f"ValidationLoop: metrics[{name!r}] is {kind}. Give an object with update, compute and reset, as "
                    "torchmetrics' are."
                )


@dataclass
class TrainingLoop(Settings):
    """How long to train, how often to validate, and what a step is.

    Attributes:
        max_steps: updates of the weights in all, those before a resumption counted.
        max_epochs: passes over the training loader. At least one of the two; whichever comes first ends the run.
        eval_every_steps, eval_every_epochs: when to validate, if `fit` is given a validation loader. With neither,
            at the end of each epoch. The end of the run is always validated.
        grad_accum_steps: batches per update. Their gradients are averaged.
        clip_grad_norm: scale all gradients so that their norm together is at most this.
        clip_grad_value: cut each gradient's elements at plus and minus this.
        validation: how to validate.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    eval_every_steps: int | None = None
    eval_every_epochs: int | None = None
    grad_accum_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    validation: ValidationLoop = field(default_factory=ValidationLoop)

    def __post_init__(self) -> None:
        names = ("max_steps", "max_epochs", "eval_every_steps", "eval_every_epochs", "grad_accum_steps")
        for name in (*names, "clip_grad_norm", "clip_grad_value"):
            _positive(self, name)
        if not isinstance(self.validation, ValidationLoop):
            raise TrainerError(f"TrainingLoop: validation={self.validation!r}. Write validation=ValidationLoop(...).")
        if self.max_steps is None and self.max_epochs is None:
            raise TrainerError("TrainingLoop does not know when to stop. Give max_steps=... or max_epochs=....")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise TrainerError("TrainingLoop clips by norm or by value, not both. Leave one of them out.")

    def ends_at(self, step: int, epoch: int) -> bool:
        """Whether a run that has done so much is done."""
        return (self.max_steps is not None and step >= self.max_steps) or (
            self.max_epochs is not None and epoch >= self.max_epochs
        )

    def validates_after_step(self, step: int) -> bool:
        """Whether validation is due after update number `step`."""
        return self.eval_every_steps is not None and step % self.eval_every_steps == 0

    def validates_after_epoch(self, epoch: int) -> bool:
        """Whether validation is due after so many epochs."""
        every = self.eval_every_epochs
        if every is None and self.eval_every_steps is None:
            every = 1
        return every is not None and epoch % every == 0


def _positive(loop: Any, name: str) -> None:
    value = getattr(loop, name)
    whole = not name.startswith("clip")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int if whole else (int, float))):
        kind = "a whole number" if whole else "a number"
        raise TrainerError(f"{type(loop).__name__}: {name}={value!r} is not {kind}.")
    if value is not None and not value > 0:
        raise TrainerError(f"{type(loop).__name__}: {name}={value!r} is not above 0. Leave it out, or give a number.")
