"""Reporting of training metrics to callbacks and loggers, with the batch that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import firstloss as fl

from ..errors import TrainerError
from .logging import Rates, learning_rates
from .pending_losses import AHEAD, Pending, Started
from .step import counts, logged_in_step

if TYPE_CHECKING:
    from .trainer import Trainer


class Reporter:
    """Reads losses when they are available and reports them, with everything else to be logged."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rates = Rates()
        self._began = 0.0
        self._seen_a_loss = False
        self._starting: dict[str, float] | None = None  # numbers of the step being started
        self.begin()

    def begin(self) -> None:
        """Start a run: drop what an earlier run has left unread when it failed."""
        self._began = fl.timeline.current().now()
        self._pending = Pending(self._report, self._trainer.folder.last_good, self._show)

    def logs(self, step: int) -> bool:
        """Whether the numbers of step `step` go to the loggers."""
        return step == 1 or step % self._trainer.logging.log_steps == 0

    @property
    def logs_now(self) -> bool:
        """Whether the numbers of the step being started, or else of the last one, go to the loggers."""
        return self.logs(self._trainer.state.step + (self._starting is not None))

    @contextmanager
    def starting(self, numbers: dict[str, float]) -> Iterator[None]:
        """Context in which a step is being started: logged numbers go into `numbers`, and so do the learning rates."""
        optimizer = self._trainer.optimizer
        assert optimizer is not None
        self._starting = numbers
        try:
            yield
            if self.logs_now:
                numbers.update(learning_rates(optimizer))
        finally:
            self._starting = None

    def log(self, metrics: dict[str, Any]) -> None:
        """See `Trainer.log_metrics`."""
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise TrainerError(f"log_metrics({name}=...) takes a number, not a tensor of {list(value.shape)}.")
        in_step = logged_in_step.get()
        if in_step is not None:
            in_step.update({name: torch.as_tensor(value).detach().reshape(()) for name, value in metrics.items()})
        elif self._starting is not None:
            if self.logs_now:
                self._starting.update({name: float(value) for name, value in metrics.items()})
        else:
            self._trainer.log(**{name: float(value) for name, value in metrics.items()})

    def add(self, started: Started) -> None:
        """Report a batch's numbers once they are available. Those of the first batch are when the call returns, and are
        reported at once.

        Raises:
            NaNLossError: for this batch or an earlier one, as in `wait`.
        """
        self._pending.add(started, AHEAD if self._seen_a_loss else 0)

    def wait(self) -> None:
        """Wait for all started batches and report them.

        Raises:
            NaNLossError: naming the step, the batch and the last good checkpoint.
        """
        self._pending.read()

    def restart_rates(self) -> None:
        """Exclude the time since the last report, which was not training, from the rates."""
        self._rates.restart()

    def _show(self, started: Started, values: dict[str, float]) -> None:
        """Call `on_values` with a batch's numbers; the loss may be NaN."""
        self._trainer.callbacks("on_values", self._trainer, values, started.step)

    def _report(self, started: Started, values: dict[str, float]) -> None:
        """Report a batch's numbers, which are finite."""
        trainer = self._trainer
        if not self._seen_a_loss:
            self._report_first_loss(values["loss"])
        samples, tokens = counts(started.batch)
        trainer.state.samples += samples
        trainer.state.tokens += tokens
        if started.timed:
            self._rates.add(int(started.updates), samples, tokens)
        else:
            self._rates.restart()
        if started.updates and self.logs(started.step):
            public = {name: value for name, value in values.items() if not name.startswith("_")}
            trainer.callbacks("on_metrics", trainer, {**public, **started.numbers, **self._rates.take()}, started.step)

    def _report_first_loss(self, loss: float) -> None:
        self._seen_a_loss = True
        clock = fl.timeline.current()
        if clock.first_loss is None:  # an eager backend does not mark it
            clock.mark(fl.timeline.FIRST_LOSS)
        first = clock.first_loss or 0.0
        # With another Trainer before it in the process, the process's first loss may be long past.
        self._trainer.callbacks("on_first_loss", self._trainer, loss, first if first > self._began else clock.now())
