"""Stop when a metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import TrainerError
from .callback import Callback

if TYPE_CHECKING:
    from .trainer import Trainer


class EarlyStop(Callback):
    """Stop the run when `metric` has not got better for `patience` validations in a row.

    Args:
        metric: a name among what validation finds, as "val_loss".
        patience: how many validations in a row may bring nothing better.
        mode: "min" if smaller is better, "max" if larger is.
        min_delta: better by no more than this does not count.

    Raises:
        TrainerError: for another `mode`; in `fit` without validation, or if that does not find `metric`.
    """

    def __init__(self, metric: str = "val_loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise TrainerError(f'EarlyStop: mode={mode!r} is not a direction. Write "min" or "max".')
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best, self.waited = math.inf, 0

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.val_dataloader is None:
            raise TrainerError(
                f"EarlyStop waits for {self.metric!r} of validations, and fit was given nothing to validate on. Write "
                "fit(train_dataloader, val_dataloader)."
            )

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.metric not in metrics:
            raise TrainerError(
                f"EarlyStop waits for {self.metric!r}, which validation did not find. It found: {', '.join(metrics)}."
            )
        value = metrics[self.metric] * (1 if self.mode == "min" else -1)
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(f"{self.metric} has not got better in {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and for how many validations it has been.

        Returns:
            Of numbers and None, for a checkpoint.
        """
        return {"best": None if math.isinf(self.best) else self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            state: what `state_dict` returned.
        """
        self.best = math.inf if state["best"] is None else state["best"]
        self.waited = state["waited"]
