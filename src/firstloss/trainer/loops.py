"""Settings of training and validation loops: duration, gradient accumulation, when to validate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import TrainerError
from ..settings import Settings
from ..utils.data.steps import epoch_steps


@dataclass
class ValidationLoop(Settings):
    """A pass over the validation loader.

    Attributes:
        max_batches: stop after this many batches; None: all of them.
        metrics: metrics by name, objects with `update`, `compute` and `reset` like torchmetrics'. They are updated on
            the host, with what `metric_inputs` returns.
        metric_inputs: a function (batch, outputs) -> the arguments of `update`. By default the outputs' "logits", and
            the batch's "labels", "label", "targets" or "target", or its last element.
        eval_steps: another name of `max_batches`.
    """

    max_batches: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metric_inputs: Callable[[Any, Any], tuple[Any, ...]] | None = None
    eval_steps: int | None = None

    @property
    def most(self) -> int | None:
        """The maximal number of batches."""
        return self.max_batches if self.eval_steps is None else self.eval_steps

    def __post_init__(self) -> None:
        _positive(self, "max_batches")
        _positive(self, "eval_steps")
        if self.max_batches is not None and self.eval_steps is not None:
            raise TrainerError(
                "ValidationLoop: max_batches and eval_steps are two names of one setting. Pass one of them."
            )
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
                    f"ValidationLoop: metrics[{name!r}] is {kind}. Pass an object with update, compute and reset, like "
                    "torchmetrics'."
                )


@dataclass
class TrainingLoop(Settings):
    """How long to train, how often to validate, and how batches make up a step.

    Attributes:
        max_steps: total number of updates of the weights, including those before the run was resumed.
        max_epochs: total number of passes over the training loader. The run ends at whichever limit comes first; one
            of them is required.
        eval_every_steps, eval_every_epochs: when to validate, if `fit` is given a validation loader. By default at the
            end of each epoch. The end of the run is always validated.
        grad_accum_steps: batches per update, whose gradients are averaged.
        clip_grad_norm: clip the gradients' total norm to this.
        clip_grad_value: clip each element of the gradients to [-clip_grad_value, clip_grad_value].
        validation: how to validate.
        num_steps: as in Model Zoo: updates of the weights counted from the start of `fit`; excludes `num_epochs`.
        num_epochs: passes over the loader counted from the start of `fit`; needs a loader with a length.
        steps_per_epoch: with `num_epochs`: the batches that count as an epoch; by default the loader's length.
        eval_frequency: as in Model Zoo: when to validate, as a number of steps counted from the start of `fit` (int),
            or as a fraction of all steps of this `fit` (float): 0.5 is halfway and at the end, 1.0 at the end. 0:
            never. 1.0 by default with `num_steps` or `num_epochs`.
        eval_steps: short for `validation=ValidationLoop(max_batches=...)`.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    eval_every_steps: int | None = None
    eval_every_epochs: int | None = None
    grad_accum_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    validation: ValidationLoop = field(default_factory=ValidationLoop)
    num_steps: int | None = None
    num_epochs: int | None = None
    steps_per_epoch: int | None = None
    eval_frequency: int | float | None = None
    eval_steps: int | None = None

    def __post_init__(self) -> None:
        names = ("max_steps", "max_epochs", "eval_every_steps", "eval_every_epochs", "grad_accum_steps")
        model_zoo_names = ("num_steps", "num_epochs", "steps_per_epoch", "eval_steps")
        for name in (*names, *model_zoo_names, "clip_grad_norm", "clip_grad_value"):
            _positive(self, name)
        if not isinstance(self.validation, ValidationLoop):
            raise TrainerError(f"TrainingLoop: validation={self.validation!r}. Write validation=ValidationLoop(...).")
        self._check_model_zoo()
        if all(end is None for end in (self.max_steps, self.max_epochs, self.num_steps, self.num_epochs)):
            raise TrainerError("TrainingLoop has no end. Pass max_steps=... or max_epochs=....")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise TrainerError("TrainingLoop clips by norm or by value, not both. Leave one of them out.")

    def _check_model_zoo(self) -> None:
        if self.num_steps is not None and self.num_epochs is not None:
            raise TrainerError("TrainingLoop: num_steps and num_epochs both set the duration. Pass one of them.")
        if self.steps_per_epoch is not None and self.num_epochs is None:
            raise TrainerError("TrainingLoop: steps_per_epoch has no effect without num_epochs.")
        if self.eval_steps is not None and self.validation.most is not None:
            raise TrainerError(
                "TrainingLoop: eval_steps and validation=ValidationLoop(max_batches=...) are the same setting. Pass "
                "one."
            )
        often = self.eval_frequency
        if often is None:
            return
        if isinstance(often, bool) or not isinstance(often, (int, float)) or often < 0:
            raise TrainerError(
                f"TrainingLoop: eval_frequency={often!r} is neither a number of steps nor a fraction of them."
            )
        if isinstance(often, float) and often > 1:
            raise TrainerError(
                f"TrainingLoop: eval_frequency={often!r} is more than 1.0, all steps. Write {int(often)} for a number."
            )
        if self.eval_every_steps is not None or self.eval_every_epochs is not None:
            raise TrainerError("TrainingLoop: eval_frequency and eval_every_... both set when to validate. Pass one.")

    def begin(self, step: int, loader: Any) -> None:
        """Start a `fit` at `step`, from which `num_steps`, `num_epochs` and `eval_frequency` count.

        Args:
            step: updates so far.
            loader: the training loader, whose length `num_epochs` needs.
        """
        end = None
        if self.num_steps is not None:
            end = step + self.num_steps
        if self.num_epochs is not None:
            end = step + self.num_epochs * epoch_steps(loader, self.steps_per_epoch, self.grad_accum_steps)
        object.__setattr__(self, "_span", (step, end))  # not a setting

    @property
    def _began(self) -> int:
        return self.__dict__.get("_span", (0, None))[0]

    @property
    def _end(self) -> int | None:
        return self.__dict__.get("_span", (0, None))[1]

    def validation_loop(self) -> ValidationLoop:
        """The validation loop, with `eval_steps` applied.

        Returns:
            `validation`, or a copy with `max_batches` set.
        """
        return self.validation if self.eval_steps is None else replace(self.validation, max_batches=self.eval_steps)

    def last_step(self) -> int | None:
        """The step at which the run ends, if known.

        Returns:
            The total number of updates; None if epochs or early stopping decide.
        """
        ends = [end for end in (self.max_steps, self._end) if end is not None]
        return min(ends, default=None)

    def ends_at(self, step: int, epoch: int) -> bool:
        """Whether a run at this position has ended.

        Args:
            step: updates so far.
            epoch: completed epochs.

        Returns:
            True once either limit is reached.
        """
        last = self.last_step()
        return (last is not None and step >= last) or (self.max_epochs is not None and epoch >= self.max_epochs)

    def validates_after_step(self, step: int) -> bool:
        """Whether validation is due after update `step`.

        Args:
            step: updates so far.

        Returns:
            True if it is due.
        """
        if self.eval_frequency is not None:
            every = self.eval_frequency
            if isinstance(every, float) and every:
                last = self.last_step()
                every = 0 if last is None else max(1, int(every * (last - self._began)))
            return bool(every) and step > self._began and (step - self._began) % every == 0
        return self.eval_every_steps is not None and step % self.eval_every_steps == 0

    def validates_after_epoch(self, epoch: int) -> bool:
        """Whether validation is due after epoch `epoch`.

        Args:
            epoch: completed epochs.

        Returns:
            True if it is due.
        """
        every = self.eval_every_epochs
        uses_model_zoo_names = (
            self.eval_frequency is not None or self.num_steps is not None or self.num_epochs is not None
        )
        if every is None and self.eval_every_steps is None and not uses_model_zoo_names:
            every = 1
        return every is not None and epoch % every == 0

    @property
    def validates_at_end(self) -> bool:
        """Whether validation is due at the end of the run."""
        return self.eval_frequency != 0 or self.eval_frequency is None


def _positive(loop: Any, name: str) -> None:
    value = getattr(loop, name)
    whole = not name.startswith("clip")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int if whole else (int, float))):
        kind = "an integer" if whole else "a number"
        raise TrainerError(f"{type(loop).__name__}: {name}={value!r} is not {kind}.")
    if value is not None and not value > 0:
        raise TrainerError(
            f"{type(loop).__name__}: {name}={value!r} is not positive. Leave it out, or pass a positive number."
        )
