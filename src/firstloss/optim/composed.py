"""Composed schedules. Their parts are formulas only: they set nothing, and their own steps do not advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ScheduleError
from .schedule import Schedule, Tags

Tensor = torch.Tensor


class SequentialLR(Schedule):
    """One schedule after another, each from its own step 0: the first until `milestones[0]`, and so on.

    Args:
        optimizer: that of the schedules.
        schedulers: schedules of `optimizer`, one more than milestones.
        milestones: the steps at which the next schedule takes over, rising.
        last_epoch: the step of the whole before the one to begin at; -1 is the beginning.

    Raises:
        ScheduleError: for milestones that do not fit, or schedules of another optimizer or of other numbers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Schedule],
        milestones: Sequence[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
        **where: Any,
    ) -> None:
        self.schedulers = list(schedulers)
        self.milestones = check_milestones(milestones, len(self.schedulers))
        where = take_parts(self, optimizer, self.schedulers, param_group_tags, where)
        super().__init__(optimizer, last_epoch=last_epoch, **where)

    def value(self, step: Tensor) -> Tensor:
        out = self.schedulers[0].value(step)
        for begin, schedule in zip(self.milestones, self.schedulers[1:], strict=True):
            # Before its time a schedule is asked for its step 0, so that no formula meets a negative one.
            out = torch.where(step < begin, out, schedule.value((step - begin).clamp(min=0)))
        return out


class PiecewiseConstantLR(Schedule):
    """`learning_rates[i]` from the i-th milestone on, counting the beginning as the 0-th; one more than milestones.

    Args:
        learning_rates: the numbers, one more than milestones.
        milestones: the steps at which the next number takes over, rising.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rates: Sequence[float],
        milestones: Sequence[int],
        param_group_tags: Tags = None,
        **where: Any,
    ) -> None:
        self.learning_rates = list(learning_rates)
        self.milestones = check_milestones(milestones, len(self.learning_rates))
        super().__init__(optimizer, param_group_tags=param_group_tags, **where)

    @property
    def initial_learning_rate(self) -> float:
        return self.learning_rates[0]

    def value(self, step: Tensor) -> Tensor:
        out = torch.full_like(step, self.learning_rates[0], dtype=torch.float64)
        for begin, rate in zip(self.milestones, self.learning_rates[1:], strict=True):
            out = torch.where(step < begin, out, rate)
        return out


class ChainedLR(Schedule):
    """The first schedule, times what each of the others has become of its initial rate: PyTorch's `ChainedScheduler`,
    for schedules that multiply.

    Args:
        schedulers: schedules of one optimizer, which set the same number in the same groups.

    Raises:
        ScheduleError: if there is none, or one after the first has no initial rate, or 0.
    """

    def __init__(self, schedulers: Sequence[Schedule], param_group_tags: Tags = None, **where: Any) -> None:
        self.schedulers = list(schedulers)
        if not self.schedulers:
            raise ScheduleError("ChainedLR takes at least one schedule.")
        optimizer = self.schedulers[0].optimizer
        where = take_parts(self, optimizer, self.schedulers, param_group_tags, where)
        for schedule in self.schedulers[1:]:
            if not getattr(schedule, "initial_learning_rate", 0):
                raise ScheduleError(
                    f"ChainedLR multiplies by what {type(schedule).__name__} has become of its initial rate, which it "
                    "has to have and which must not be 0. Use SequentialLR for one after another."
                )
        super().__init__(optimizer, **where)

    @property
    def initial_learning_rate(self) -> float:
        return getattr(self.schedulers[0], "initial_learning_rate", 0)

    def value(self, step: Tensor) -> Tensor:
        out = self.schedulers[0].value(step)
        for schedule in self.schedulers[1:]:
            out = out * (schedule.value(step) / schedule.initial_learning_rate)  # type: ignore[attr-defined]
        return out


def check_milestones(milestones: Sequence[int], parts: int) -> list[int]:
    """The milestones between `parts` parts, as a list.

    Raises:
        ScheduleError: if they are not whole, do not rise, or are too many or too few.
    """
    found = [int(m) for m in milestones]
    if found != list(milestones) or any(a >= b for a, b in zip(found, found[1:], strict=False)):
        raise ScheduleError(f"milestones are whole numbers that rise, and not {list(milestones)}.")
    if parts != len(found) + 1:
        raise ScheduleError(f"{parts} parts have {parts - 1} milestones between them, and not {len(found)}.")
    return found


def take_parts(
    whole: Schedule, optimizer: torch.optim.Optimizer, parts: Sequence[Schedule], tags: Tags, where: dict[str, Any]
) -> dict[str, Any]:
    """The whole sets what its parts have set until now: where that is, as arguments of `Schedule`."""
    for part in parts:
        if part.optimizer is not optimizer:
            raise ScheduleError(f"{type(whole).__name__} is given a {type(part).__name__} of another optimizer.")
        if (part.param_group_key, part.param_group_tags) != (parts[0].param_group_key, parts[0].param_group_tags):
            raise ScheduleError(
                f"the parts of a {type(whole).__name__} have to set the same number in the same groups."
            )
    for part in parts:
        part.detach()
    tags = parts[0].param_group_tags if tags is None else tags
    return {"param_group_key": parts[0].param_group_key, **where, "param_group_tags": tags}


class ScalePerParamLR(Schedule):
    """A schedule, times each group's "adjust_learning_rate" or, if it has none, its "adjust_val"; 1 without both.

    As for muP (Yang et al., 2022), or rates that differ by layer. The factors are read when it is made.

    Args:
        optimizer: that of the schedule.
        scheduler: a schedule of `optimizer`; from here on it sets nothing itself.

    Attributes:
        adjustment_scalars: the factors, of all groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Schedule, param_group_tags: Tags = None, **where: Any
    ) -> None:
        self.scheduler = scheduler
        groups = optimizer.param_groups
        self.adjustment_scalars = [
            float(group.get("adjust_learning_rate", group.get("adjust_val", 1.0))) for group in groups
        ]
        self._scaled = {factor: torch.zeros((), dtype=torch.float64) for factor in self.adjustment_scalars}
        where = take_parts(self, optimizer, [scheduler], param_group_tags, where)
        super().__init__(optimizer, **where)

    def value(self, step: Tensor) -> Tensor:
        """The number at `step`, before it is scaled."""
        return self.scheduler.value(step)

    def numbers(self) -> list[Tensor]:
        return [self._value, *self._scaled.values()]

    def _number(self, group: dict[str, Any]) -> Tensor:
        index = next(i for i, other in enumerate(self.optimizer.param_groups) if other is group)
        if index >= len(self.adjustment_scalars):
            raise ScheduleError(
                "ScalePerParamLR was made before a parameter group was added, whose factor it does not know. Add the "
                "group first."
            )
        return self._scaled[self.adjustment_scalars[index]]

    def _follow(self) -> None:
        for factor, number in self._scaled.items():
            number.copy_(self._value * factor)
