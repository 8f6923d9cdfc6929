"""The loops of a run: number of steps and epochs, gradient accumulation, when to validate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import TrainerError
from ..settings import Settings
from ..utils.data.steps import epoch_steps


@dataclass
class ValidationLoop(Settings):
    """One pass over the validation loader.

    Attributes:
        max_batches: stop after so many batches; None: all of them.
        metrics: {name: metric}, objects with `update`, `compute` and `reset` as torchmetrics has them. They are
            updated on the host, with what `metric_inputs` returns.
        metric_inputs: (batch, outputs) -> the arguments of `update`. Default: the outputs' "logits", and the batch's
            "labels", "label", "targets" or "target", or its last element.
        eval_steps: `max_batches` by another name.
    """

    max_batches: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metric_inputs: Callable[[Any, Any], tuple] | None = None
    eval_steps: int | None = None

    @property
    def most(self) -> int | None:
        """How many batches at most."""
        return self.max_batches if self.eval_steps is None else self.eval_steps

    def __post_init__(self) -> None:
        _positive(self, "max_batches")
        _positive(self, "eval_steps")
        if self.max_batches is not None and self.eval_steps is not None:
            raise TrainerError("ValidationLoop: max_batches and eval_steps say the same thing twice. Pass one of them.")
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
        num_steps: updates of the weights from where `fit` begins, as Model Zoo counts; not together with `num_epochs`.
        num_epochs: passes over the loader from where `fit` begins, in steps: it takes a loader with a length.
        steps_per_epoch: of `num_epochs`: batches that count as a pass; the loader's length by default.
        eval_frequency: when to validate, as Model Zoo says it: a whole number of steps from where `fit` begins, or a
            part of all steps of this `fit`, 0.5 after the half of them and at the end, 1.0 at the end. 0: not even
            there. With `num_steps` or `num_epochs` it is 1.0, if nothing else says when.
        eval_steps: `validation=ValidationLoop(max_batches=...)`, in short.
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
        theirs = ("num_steps", "num_epochs", "steps_per_epoch", "eval_steps")
        for name in (*names, *theirs, "clip_grad_norm", "clip_grad_value"):
            _positive(self, name)
        if not isinstance(self.validation, ValidationLoop):
            raise TrainerError(f"TrainingLoop: validation={self.validation!r}. Write validation=ValidationLoop(...).")
        self._check_theirs()
        if all(end is None for end in (self.max_steps, self.max_epochs, self.num_steps, self.num_epochs)):
            raise TrainerError("TrainingLoop does not know when to stop. Give max_steps=... or max_epochs=....")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise TrainerError("TrainingLoop clips by norm or by value, not both. Leave one of them out.")

    def _check_theirs(self) -> None:
        if self.num_steps is not None and self.num_epochs is not None:
            raise TrainerError("TrainingLoop: num_steps and num_epochs both say how long. Pass one of them.")
        if self.steps_per_epoch is not None and self.num_epochs is None:
            raise TrainerError("TrainingLoop: steps_per_epoch would do nothing without num_epochs.")
        if self.eval_steps is not None and self.validation.most is not None:
            raise TrainerError("TrainingLoop: eval_steps and validation=ValidationLoop(max_batches=...) are the same.")
        often = self.eval_frequency
        if often is None:
            return
        if isinstance(often, bool) or not isinstance(often, (int, float)) or often < 0:
            raise TrainerError(
                f"TrainingLoop: eval_frequency={often!r} is neither a number of steps nor a part of all."
            )
        if isinstance(often, float) and often > 1:
            raise TrainerError(
                f"TrainingLoop: eval_frequency={often!r} is more than all. Write {int(often)} for steps."
            )
        if self.eval_every_steps is not None or self.eval_every_epochs is not None:
            raise TrainerError("TrainingLoop: eval_frequency and eval_every_... both say when to validate. Pass one.")

    def begin(self, step: int, loader: Any) -> None:
        """A run begins at `step`: from there on its steps are counted, where the loop says so.

        Args:
            step: how many updates there have been.
            loader: the training loader, whose length `num_epochs` asks for.
        """
        end = None
        if self.num_steps is not None:
            end = step + self.num_steps
        if self.num_epochs is not None:
            end = step + self.num_epochs * epoch_steps(loader, self.steps_per_epoch, self.grad_accum_steps)
        object.__setattr__(self, "_span", (step, end))  # no setting of the loop's

    @property
    def _began(self) -> int:
        return self.__dict__.get("_span", (0, None))[0]

    @property
    def _end(self) -> int | None:
        return self.__dict__.get("_span", (0, None))[1]

    def validation_loop(self) -> ValidationLoop:
        """How to validate.

        Returns:
            `validation`, with `eval_steps` in it.
        """
        return self.validation if self.eval_steps is None else replace(self.validation, max_batches=self.eval_steps)

    def last_step(self) -> int | None:
        """The step at which the run ends, if that is known.

        Returns:
            A number of updates; None if epochs or an early stop decide.
        """
        ends = [end for end in (self.max_steps, self._end) if end is not None]
        return min(ends, default=None)

    def ends_at(self, step: int, epoch: int) -> bool:
        """Whether a run that has done so much is done.

        Args:
            step: updates so far.
            epoch: whole epochs so far.

        Returns:
            True once either limit is reached.
        """
        last = self.last_step()
        return (last is not None and step >= last) or (self.max_epochs is not None and epoch >= self.max_epochs)

    def validates_after_step(self, step: int) -> bool:
        """Whether validation is due after update number `step`.

        Args:
            step: updates so far.

        Returns:
            Whether it is.
        """
        if self.eval_frequency is not None:
            every = self.eval_frequency
            if isinstance(every, float) and every:
                last = self.last_step()
                every = 0 if last is None else max(1, int(every * (last - self._began)))
            return bool(every) and step > self._began and (step - self._began) % every == 0
        return self.eval_every_steps is not None and step % self.eval_every_steps == 0

    def validates_after_epoch(self, epoch: int) -> bool:
        """Whether validation is due after so many epochs.

        Args:
            epoch: whole epochs so far.

        Returns:
            Whether it is.
        """
        every = self.eval_every_epochs
        theirs = self.eval_frequency is not None or self.num_steps is not None or self.num_epochs is not None
        if every is None and self.eval_every_steps is None and not theirs:
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
        kind = "a whole number" if whole else "a number"
        raise TrainerError(f"{type(loop).__name__}: {name}={value!r} is not {kind}.")
    if value is not None and not value > 0:
        raise TrainerError(f"{type(loop).__name__}: {name}={value!r} is not above 0. Leave it out, or give a number.")
