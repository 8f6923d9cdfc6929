"""Early stopping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import TrainerError
from .callback import Callback

if TYPE_CHECKING:
    from .trainer import Trainer


class EarlyStop(Callback):
    """Stop the run when `metric` has not improved for `patience` validations in a row.

    Args:
        metric: a validation metric, such as "val_loss".
        patience: how many validations in a row may bring no improvement.
        mode: "min" if smaller values are better, "max" if larger ones are.
        min_delta: the smallest change that counts as an improvement.

    Raises:
        TrainerError: for another `mode`; in `fit` without a validation loader, or if `metric` is not reported.
    """

    def __init__(self, metric: str = "val_loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise TrainerError(f'EarlyStop: mode={mode!r}: write "min" or "max".')
        self.metric: str = metric
        self.patience: int = patience
        self.mode = mode
        self.min_delta: float = min_delta
        self.best: float = math.inf
        self.waited: int = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.val_dataloader is None:
            raise TrainerError(
                f"EarlyStop waits for {self.metric!r} of validations, but fit was given no val_dataloader. Write "
                "fit(train_dataloader, val_dataloader)."
            )

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.metric not in metrics:
            raise TrainerError(
                f"EarlyStop waits for {self.metric!r}, which validation did not report, only {', '.join(metrics)}."
            )
        value = metrics[self.metric] * (1 if self.mode == "min" else -1)
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(f"{self.metric} has not improved in {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and the number of validations since.

        Returns:
            A dict of numbers and None, for a checkpoint.
        """
        return {"best": None if math.isinf(self.best) else self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint.

        Args:
            state: what `state_dict` returned.
        """
        self.best = math.inf if state["best"] is None else state["best"]
        self.waited = state["waited"]
