"""Base classes for schedules of one's own, with the constructor and the method of `cerebras.pytorch`'s.

A subclass defines `_get_closed_form()`, the number at the step `self.last_epoch`, and calls the constructor last.
"""

from __future__ import annotations

from typing import Any

import torch

from ...optim.schedule import Schedule, Tags


class Scheduler(Schedule):
    """A schedule of any number; a subclass also says of which: `param_group_key`.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        total_iters: kept as an attribute, for the formula.
        last_epoch, param_group_tags: as of `firstloss.optim.lr_scheduler.Schedule`.
    """

    param_group_key: Any = ""
    device: torch.device | None = None
    last_epoch: torch.Tensor

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_iters: int | None = None,
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        self.total_iters = total_iters
        super().__init__(optimizer, param_group_tags=param_group_tags, last_epoch=last_epoch)

    def _get_closed_form(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_closed_form()")

    def value(self, step: torch.Tensor) -> torch.Tensor:
        """See `Schedule.value`."""
        before, self.last_epoch = self.last_epoch, step
        try:
            result = torch.as_tensor(self._get_closed_form(), dtype=torch.float64, device="cpu")
        finally:
            self.last_epoch = before
        return result.expand(step.shape)

    def get(self) -> list[Any]:
        """The number of each group at the current step; None for groups that it does not set."""
        mine = {id(group) for group in self._groups()}
        number = self.value(self.last_epoch)
        return [number if id(group) in mine else None for group in self.optimizer.param_groups]


class LRScheduler(Scheduler, torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A schedule of learning rates, and one of PyTorch's."""

    param_group_key: Any = "lr"

    def get_lr(self) -> list[Any]:
        """As `get`."""
        return self.get()


class WeightDecayScheduler(Scheduler):
    """A schedule of weight decay."""

    param_group_key: Any = "weight_decay"
