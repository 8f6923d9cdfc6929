"""Losses of steps in progress, read with a delay, so that the device never waits for Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import NaNLossError
from ..runtime.pytrees import flatten
from .step import describe

AHEAD = 2
"""By how many batches Python runs ahead of the values that it reads."""


@dataclass
class Started:
    """A batch whose computation has been started."""

    step: int  # the update that the batch belongs to, from 1
    epoch: int
    index: int  # of the batch in its epoch, from 1
    batch: Any
    scalars: dict[str, torch.Tensor]
    updates: bool  # whether it ended in an update of the weights
    numbers: dict[str, float]  # additional numbers to log with it
    timed: bool  # whether it counts in the rates, unlike a call that compiled


class Pending:
    """A queue of started batches; `read` reads their values in order and raises at a loss that is not finite."""

    def __init__(
        self,
        on_values: Callable[[Started, dict[str, float]], None],
        last_good: Callable[[], str],
        look: Callable[[Started, dict[str, float]], None] = lambda started, values: None,
    ) -> None:
        self._queue: deque[Started] = deque()
        self._look = look  # called with all values, NaN included
        self._on_values = on_values
        self._last_good = last_good

    def add(self, started: Started, ahead: int = AHEAD) -> None:
        self._queue.append(started)
        self.read(ahead)

    def read(self, ahead: int = 0) -> None:
        """Read the values of all batches but the last `ahead`.

        Raises:
            NaNLossError: naming the step, the batch and the last good checkpoint.
        """
        while len(self._queue) > ahead:
            started = self._queue.popleft()
            values = {name: float(scalar) for name, scalar in started.scalars.items()}
            self._look(started, values)
            if not math.isfinite(values["loss"]):
                self._queue.clear()
                raise self._error(started, values["loss"])
            self._on_values(started, values)

    def _error(self, started: Started, loss: float) -> NaNLossError:
        error = NaNLossError(
            f"the loss is {loss} at step {started.step}, batch {started.index} of epoch {started.epoch + 1} "
            f"({describe(started.batch)}; {_suspects(started.batch)}). {self._last_good()} Lower the learning rate, "
            "clip gradients with TrainingLoop(clip_grad_norm=1.0), or inspect the batch, which is the error's .batch."
        )
        error.step, error.batch = started.step, started.batch
        return error


def _suspects(batch: Any) -> str:
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    bad = sum(int((~torch.isfinite(t)).sum()) for t in tensors if t.is_floating_point())
    return f"{bad} of its values are NaN or infinite" if bad else "all its values are finite"
