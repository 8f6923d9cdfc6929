"""Logging settings, throughput and learning rates."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from ..errors import TrainerError
from ..settings import Settings


@dataclass
class Logging(Settings):
    """How often numbers go to the loggers.

    Attributes:
        log_steps: log every `log_steps` steps. The first and the last step are always logged.
        log_level: level of Python's logger "firstloss" during a run: "DEBUG", "INFO", "WARNING" or "ERROR", in
            either case.
    """

    log_steps: int = 10
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not isinstance(self.log_steps, int) or isinstance(self.log_steps, bool):
            raise TrainerError(f"Logging: log_steps={self.log_steps!r} is not an integer.")
        if self.log_steps < 1:
            raise TrainerError(f"Logging: log_steps={self.log_steps!r} is not positive.")
        if str(self.log_level).upper() not in logging.getLevelNamesMapping():
            raise TrainerError(f"Logging: log_level={self.log_level!r} is not one of Python's levels, such as INFO.")


class Rates:
    """Steps, samples and tokens per second since the rates were last taken."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart the measurement, to exclude what was not training (a compile, a validation)."""
        self._began = time.perf_counter()
        self._steps = self._samples = self._tokens = 0

    def add(self, steps: int, samples: int, tokens: int) -> None:
        self._steps, self._samples, self._tokens = self._steps + steps, self._samples + samples, self._tokens + tokens

    def take(self) -> dict[str, float]:
        """The rates by name, and restart; empty if no step has ended since the last time."""
        seconds = time.perf_counter() - self._began
        rates = {"steps_per_second": self._steps / seconds, "samples_per_second": self._samples / seconds}
        if self._tokens:
            rates["tokens_per_second"] = self._tokens / seconds
        current = rates if self._steps else {}
        self.restart()
        return current


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rate of each parameter group: "lr", "lr_1", ..."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return {f"lr_{i}" if i else "lr": rate for i, rate in enumerate(rates)}
