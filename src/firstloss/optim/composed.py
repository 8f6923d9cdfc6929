"""Composed schedules. Their parts serve only as formulas: they set nothing, and their own steps do not advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ScheduleError
from .schedule import Schedule, Tags

Tensor = torch.Tensor


class SequentialLR(Schedule):
    """Run schedules one after another, each from its own step 0: the first until `milestones[0]`, and so on.

    Args:
        optimizer: the schedules' optimizer.
        schedulers: schedules of `optimizer`, one more than milestones.
        milestones: the steps at which the next schedule takes over, ascending.
        last_epoch: the last step; -1 starts from the beginning.

    Raises:
        ScheduleError: for invalid milestones, or schedules of other optimizers or settings.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Schedule],
        milestones: Sequence[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.schedulers: list[Schedule] = list(schedulers)
        self.milestones: list[int] = check_milestones(milestones, len(self.schedulers))
        options = take_parts(self, optimizer, self.schedulers, param_group_tags, options)
        super().__init__(optimizer, last_epoch=last_epoch, **options)

    def value(self, step: Tensor) -> Tensor:
        out = self.schedulers[0].value(step)
        for begin, schedule in zip(self.milestones, self.schedulers[1:], strict=True):
            # Before its start, a schedule is evaluated at step 0, so that no formula has to handle negative steps.
            out = torch.where(step < begin, out, schedule.value((step - begin).clamp(min=0)))
        return out


class PiecewiseConstantLR(Schedule):
    """`learning_rates[i]` from the i-th milestone on, with the beginning as the 0-th.

    Args:
        learning_rates: the values, one more than milestones.
        milestones: the steps at which the next value takes over, ascending.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rates: Sequence[float],
        milestones: Sequence[int],
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.learning_rates: list[float] = list(learning_rates)
        self.milestones: list[int] = check_milestones(milestones, len(self.learning_rates))
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    @property
    def initial_learning_rate(self) -> float:
        return self.learning_rates[0]

    def value(self, step: Tensor) -> Tensor:
        out = torch.full_like(step, self.learning_rates[0], dtype=torch.float64)
        for begin, rate in zip(self.milestones, self.learning_rates[1:], strict=True):
            out = torch.where(step < begin, out, rate)
        return out


class ChainedLR(Schedule):
    """Multiply schedules: the first one's value by each other one's value relative to its initial value, like PyTorch's
    `ChainedScheduler`.

    Args:
        schedulers: schedules of one optimizer that set the same number in the same groups.

    Raises:
        ScheduleError: if there are none, or one after the first has no initial value, or 0.
    """

    def __init__(self, schedulers: Sequence[Schedule], param_group_tags: Tags = None, **options: Any) -> None:
        self.schedulers: list[Schedule] = list(schedulers)
        if not self.schedulers:
            raise ScheduleError("ChainedLR needs at least one schedule.")
        optimizer = self.schedulers[0].optimizer
        options = take_parts(self, optimizer, self.schedulers, param_group_tags, options)
        for schedule in self.schedulers[1:]:
            if not getattr(schedule, "initial_learning_rate", 0):
                raise ScheduleError(
                    f"ChainedLR multiplies by {type(schedule).__name__} relative to its initial value, which must "
                    "exist and not be 0. Use SequentialLR to run one after another."
                )
        super().__init__(optimizer, **options)

    @property
    def initial_learning_rate(self) -> float:
        return getattr(self.schedulers[0], "initial_learning_rate", 0)

    def value(self, step: Tensor) -> Tensor:
        out = self.schedulers[0].value(step)
        for schedule in self.schedulers[1:]:
            out = out * (schedule.value(step) / schedule.initial_learning_rate)  # type: ignore[attr-defined]
        return out


def check_milestones(milestones: Sequence[int], parts: int) -> list[int]:
    """Check the milestones between `parts` parts, and return them as a list.

    Raises:
        ScheduleError: if they are not integers, do not ascend, or are too many or too few.
    """
    steps = [int(m) for m in milestones]
    if steps != list(milestones) or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise ScheduleError(f"milestones must be ascending integers, not {list(milestones)}.")
    if parts != len(steps) + 1:
        raise ScheduleError(f"{parts} parts need {parts - 1} milestones, not {len(steps)}.")
    return steps


def take_parts(
    whole: Schedule, optimizer: torch.optim.Optimizer, parts: Sequence[Schedule], tags: Tags, options: dict[str, Any]
) -> dict[str, Any]:
    """Take over the number and groups that the parts have set, as arguments of `Schedule`."""
    for part in parts:
        if part.optimizer is not optimizer:
            raise ScheduleError(f"{type(whole).__name__} got a {type(part).__name__} of another optimizer.")
        if (part.param_group_key, part.param_group_tags) != (parts[0].param_group_key, parts[0].param_group_tags):
            raise ScheduleError(f"the parts of a {type(whole).__name__} must set the same number in the same groups.")
    for part in parts:
        part.detach()
    tags = parts[0].param_group_tags if tags is None else tags
    return {"param_group_key": parts[0].param_group_key, **options, "param_group_tags": tags}


class ScalePerParamLR(Schedule):
    """Scale a schedule by each group's "adjust_learning_rate" or, without one, its "adjust_val"; by 1 without both.

    For example for muP (Yang et al., 2022), or layer-wise rates. The factors are read at construction.

    Args:
        optimizer: the schedule's optimizer.
        scheduler: a schedule of `optimizer`, which itself sets nothing from here on.

    Attributes:
        adjustment_scalars: the factors of all groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Schedule, param_group_tags: Tags = None, **options: Any
    ) -> None:
        self.scheduler = scheduler
        groups = optimizer.param_groups
        self.adjustment_scalars: list[float] = [
            float(group.get("adjust_learning_rate", group.get("adjust_val", 1.0))) for group in groups
        ]
        self._scaled = {factor: torch.zeros((), dtype=torch.float64) for factor in self.adjustment_scalars}
        options = take_parts(self, optimizer, [scheduler], param_group_tags, options)
        super().__init__(optimizer, **options)

    def value(self, step: Tensor) -> Tensor:
        """The value at `step`, before scaling."""
        return self.scheduler.value(step)

    def numbers(self) -> list[Tensor]:
        return [self._value, *self._scaled.values()]

    def _number(self, group: dict[str, Any]) -> Tensor:
        index = next(i for i, other in enumerate(self.optimizer.param_groups) if other is group)
        if index >= len(self.adjustment_scalars):
            raise ScheduleError(
                "ScalePerParamLR was created before a parameter group was added, so it has no factor for that. Add the "
                "group first."
            )
        return self._scaled[self.adjustment_scalars[index]]

    def _follow(self) -> None:
        for factor, number in self._scaled.items():
            number.copy_(self._value * factor)
