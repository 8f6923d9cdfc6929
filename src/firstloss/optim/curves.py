"""Schedules with a single formula, in which t is the step: 0 until `step()` is first called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import ScheduleError
from .schedule import Schedule, Tags

Tensor = torch.Tensor
N = TypeVar("N", int, float)


def cosine(start: float, end: float, t: Tensor) -> Tensor:
    """A half cosine from `start` at t = 0 to `end` at t = 1."""
    return end + (start - end) * (1 + torch.cos(math.pi * t)) / 2


def positive(name: str, number: N) -> N:
    """`number`, if it is positive.

    Raises:
        ScheduleError: if it is not.
    """
    if not number > 0:
        raise ScheduleError(f"{name} must be positive, not {number!r}.")
    return number


class ConstantLR(Schedule):
    """A constant `learning_rate`.

    Args:
        learning_rate: the value.
        total_iters: its intended duration, used by compositions only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.learning_rate = learning_rate
        self.total_iters: int | None = None if total_iters is None else positive("total_iters", total_iters)
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    @property
    def initial_learning_rate(self) -> float:
        return self.learning_rate

    def value(self, step: Tensor) -> Tensor:
        return torch.full_like(step, self.learning_rate, dtype=torch.float64)


class PolynomialLR(Schedule):
    """(initial - end) (1 - t / total_iters)^power + end; from `total_iters` on, end.

    Args:
        initial_learning_rate: the value at t = 0.
        end_learning_rate: the value from `total_iters` on.
        total_iters: the number of steps of the decay; positive.
        power: the exponent; 1 is linear.
        cycle: start over instead: multiply `total_iters` by max(1, ceil(t / total_iters)), as Keras' `PolynomialDecay`
            does.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.end_learning_rate = end_learning_rate
        self.total_iters: int = positive("total_iters", total_iters)
        self.power = power
        self.cycle = cycle
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        t = step.double() / self.total_iters
        t = t / t.ceil().clamp(min=1) if self.cycle else t.clamp(max=1)
        return (self.initial_learning_rate - self.end_learning_rate) * (1 - t) ** self.power + self.end_learning_rate


class LinearLR(PolynomialLR):
    """Linear from initial to end in `total_iters` steps, then constant.

    Examples:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
        >>> schedule = fl.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
        >>> rates = []
        >>> for _ in range(3):
        ...     rates.append(float(optimizer.param_groups[0]["lr"]))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [1.0, 0.75, 0.5]

    Args:
        initial_learning_rate: the value at t = 0.
        end_learning_rate: the value from `total_iters` on.
        total_iters: the number of steps of the decay; positive.
        cycle: start over, as in `PolynomialLR`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        super().__init__(
            optimizer, initial_learning_rate, end_learning_rate, total_iters, 1.0, cycle, param_group_tags, **options
        )


class ExponentialLR(Schedule):
    """initial * decay_rate^(t / total_iters). PyTorch's version has total_iters 1.

    Args:
        initial_learning_rate: the value at t = 0.
        total_iters: the number of steps per factor `decay_rate`; positive.
        decay_rate: the factor of `total_iters` steps.
        staircase: whether to round the exponent down.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.total_iters: int = positive("total_iters", total_iters)
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        exponent = step.double() / self.total_iters
        return self.initial_learning_rate * self.decay_rate ** (exponent.floor() if self.staircase else exponent)


class InverseExponentialTimeDecayLR(Schedule):
    """initial / (1 + decay_rate * t^step_exponent / total_iters); with exponent 1, Keras' `InverseTimeDecay`.

    Args:
        initial_learning_rate: the value at t = 0.
        step_exponent: the exponent of t.
        total_iters: the scale of t^step_exponent; positive.
        decay_rate: the rate of decay; 0 is constant.
        staircase: whether to round t^step_exponent / total_iters down.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_exponent: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.step_exponent = step_exponent
        self.total_iters: int = positive("total_iters", total_iters)
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        time = step.double() ** self.step_exponent / self.total_iters
        return self.initial_learning_rate / (1 + self.decay_rate * (time.floor() if self.staircase else time))


class InverseSquareRootDecayLR(Schedule):
    """initial * scale / sqrt(max(t, warmup_steps)).

    Args:
        initial_learning_rate: a factor, like `scale`.
        scale: a factor.
        warmup_steps: the number of steps during which the value is constant; positive.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.scale = scale
        self.warmup_steps: int = positive("warmup_steps", warmup_steps)
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        return self.initial_learning_rate * self.scale / step.double().clamp(min=self.warmup_steps).sqrt()


class CosineDecayLR(Schedule):
    """A half cosine from initial to end in `total_iters` steps, then constant, like Keras' `CosineDecay`.

    Args:
        initial_learning_rate: the value at t = 0.
        end_learning_rate: the value from `total_iters` on.
        total_iters: the number of steps of the decay; positive.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.end_learning_rate = end_learning_rate
        self.total_iters: int = positive("total_iters", total_iters)
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        t = (step.double() / self.total_iters).clamp(max=1)
        return cosine(self.initial_learning_rate, self.end_learning_rate, t)


class CosineAnnealingLR(Schedule):
    """eta_min + (initial - eta_min) (1 + cos(pi t / T_max)) / 2, periodically: SGDR without restarts (Loshchilov and
    Hutter, 2017).

    Args:
        initial_learning_rate: the value at t = 0.
        T_max: half the period, in steps; positive.
        eta_min: the minimum, at T_max.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.T_max: int = positive("T_max", T_max)
        self.eta_min = eta_min
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        return cosine(self.initial_learning_rate, self.eta_min, step.double() / self.T_max)


class CosineAnnealingWarmRestartsLR(Schedule):
    """Repeated half cosines from initial to `eta_min` (SGDR, Loshchilov and Hutter, 2017).

    Args:
        initial_learning_rate: the value at t = 0 and at each restart.
        T_0: the length of the first cycle, in steps.
        T_mult: the integer factor by which each cycle is longer than the previous one.
        eta_min: the value just before a restart.

    Raises:
        ScheduleError: if `T_0` or `T_mult` is not a positive integer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        if T_mult < 1 or T_mult != int(T_mult) or T_0 != int(T_0):
            raise ScheduleError(f"T_0 and T_mult must be positive integers, not {T_0} and {T_mult}.")
        self.initial_learning_rate = initial_learning_rate
        self.T_0 = int(positive("T_0", T_0))
        self.T_mult: int = int(T_mult)
        self.eta_min = eta_min
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        if self.T_mult == 1:
            t = (step % self.T_0).double() / self.T_0
        else:
            # Lengths and starts grow geometrically, so a short table covers all possible steps, without logarithms that
            # would have to be exact at the boundaries.
            lengths: list[int] = []
            begins: list[int] = []
            begin = 0
            while begin < 2**53:
                lengths.append(self.T_0 * self.T_mult ** len(lengths))
                begins.append(begin)
                begin += lengths[-1]
            begun = step[..., None] >= torch.tensor(begins, device=step.device)
            last = torch.where(begun, torch.tensor(begins, device=step.device), 0).amax(-1)
            length = torch.where(begun, torch.tensor(lengths, device=step.device), 0).amax(-1)
            t = (step - last).double() / length
        return cosine(self.initial_learning_rate, self.eta_min, t)


class StepLR(Schedule):
    """initial * gamma^floor(t / step_size).

    Args:
        initial_learning_rate: the value at t = 0.
        step_size: the number of steps between changes; positive.
        gamma: the factor of each change.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.step_size: int = positive("step_size", step_size)
        self.gamma = gamma
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        return self.initial_learning_rate * self.gamma ** (step.double() / self.step_size).floor()


class MultiStepLR(Schedule):
    """initial * gamma^(the number of milestones reached).

    Args:
        initial_learning_rate: the value at t = 0.
        gamma: the factor of each change.
        milestones: the steps of the changes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        gamma: float,
        milestones: Sequence[int],
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.gamma = gamma
        self.milestones: list[int] = list(milestones)
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        reached = sum(((step >= milestone).double() for milestone in self.milestones), torch.zeros_like(step).double())
        return self.initial_learning_rate * self.gamma**reached


class LambdaLR(Schedule):
    """initial * lr_lambda(t), where the function takes a float64 tensor; several functions are multiplied.

    A subclass may define `set_value_lambda(self)` instead, which returns a list of functions.

    Args:
        initial_learning_rate: a factor.
        lr_lambda: a function from a float64 tensor t of any shape to a tensor of that shape, or a list of them. None if
            a subclass defines `set_value_lambda`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        lr_lambda: Callable[[Tensor], Any] | Sequence[Callable[[Tensor], Any]] | None = None,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self._lambdas = [lr_lambda] if callable(lr_lambda) else list(lr_lambda or ())
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def set_value_lambda(self) -> list[Callable[[Tensor], Any]]:
        """The functions to be multiplied.

        Returns:
            `lr_lambda`, as a list.

        Raises:
            ScheduleError: if there are none.
        """
        if not self._lambdas:
            raise ScheduleError("LambdaLR needs a function: pass lr_lambda=lambda step: ..., which takes a tensor.")
        return self._lambdas

    def value(self, step: Tensor) -> Tensor:
        out = torch.full_like(step, self.initial_learning_rate, dtype=torch.float64)
        for function in self.set_value_lambda():
            out = out * function(step.double())
        return out


class MultiplicativeLR(Schedule):
    """initial * coefficient^t.

    Args:
        initial_learning_rate: the value at t = 0.
        coefficient: the factor of each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        coefficient: float,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        if callable(coefficient):
            raise ScheduleError(
                "MultiplicativeLR takes a number: a product with one factor for each step so far is not a function of "
                "the step. Write the product as a formula, and pass it to LambdaLR."
            )
        self.initial_learning_rate = initial_learning_rate
        self.coefficient = coefficient
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        return self.initial_learning_rate * self.coefficient ** step.double()
