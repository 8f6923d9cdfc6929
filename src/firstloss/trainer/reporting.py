"""Report training metrics to the loggers, with the batch they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import firstloss as fl

from ..errors import TrainerError
from .logging import Rates, learning_rates
from .pending_losses import Pending, Started
from .step import counts, logged_in_step

if TYPE_CHECKING:
    from .trainer import Trainer


class Reporter:
    """Reads losses when they have come, and tells callbacks and loggers of them, with all else that is to be logged."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rates = Rates()
        self._began = 0.0
        self._seen_a_loss = False
        self._starting: dict[str, float] | None = None  # the numbers of the step that is being started
        self.begin()

    def begin(self) -> None:
        """A run begins: what an earlier one has left unread, as it failed, is forgotten."""
        self._began = fl.timeline.current().now()
        self._pending = Pending(self._report, self._trainer.folder.last_good, self._show)

    def logs(self, step: int) -> bool:
        """Whether the numbers of this step go to the loggers."""
        return step == 1 or step % self._trainer.logging.log_steps == 0

    @property
    def logs_now(self) -> bool:
        """The same of the step that is being started, or was last."""
        return self.logs(self._trainer.state.step + (self._starting is not None))

    @contextmanager
    def starting(self, numbers: dict[str, float]) -> Iterator[None]:
        """The step's number is known in this block, and what is logged goes into `numbers`, with the learning rates."""
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
        """A batch is under way: its numbers are reported when they have come.

        Raises:
            NaNLossError: of an earlier batch, as of `settle`.
        """
        self._pending.add(started)

    def settle(self) -> None:
        """Wait for what is under way.

        Raises:
            NaNLossError: naming the step, the batch and the last good checkpoint.
        """
        self._pending.settle()

    def restart_rates(self) -> None:
        """What has been done since the last report was no training."""
        self._rates.restart()

    def _show(self, started: Started, values: dict[str, float]) -> None:
        """The numbers of a batch have come; the loss may be NaN."""
        self._trainer.callbacks("on_values", self._trainer, values, started.step)

    def _report(self, started: Started, values: dict[str, float]) -> None:
        """The numbers of a batch have come, and are finite."""
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
            shown = {name: value for name, value in values.items() if not name.startswith("_")}
            trainer.callbacks("on_metrics", trainer, {**shown, **started.numbers, **self._rates.take()}, started.step)

    def _report_first_loss(self, loss: float) -> None:
        self._seen_a_loss = True
        clock = fl.timeline.current()
        if clock.first_loss is None:  # an eager backend does not mark it
            clock.mark(fl.timeline.FIRST_LOSS)
        first = clock.first_loss or 0.0
        # Of another Trainer in the same process the first loss may have come long ago.
        self._trainer.callbacks("on_first_loss", self._trainer, loss, first if first > self._began else clock.now())
