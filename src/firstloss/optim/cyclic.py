"""Cyclical learning rates and the 1cycle policy (Smith)."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ScheduleError
from .curves import cosine, positive
from .schedule import Schedule, Tags

Tensor = torch.Tensor


class CyclicLR(Schedule):
    """Cycles that rise linearly from `base_lr` to `max_lr` and fall again (Smith, 2017). Like PyTorch's `CyclicLR`
    without its momentum, for which a second schedule with `param_group_key="momentum"` can be used.

    Args:
        base_lr: the value at the beginning and end of each cycle.
        max_lr: the maximum of the first cycle.
        step_size_up, step_size_down: the numbers of steps up and down; by default down as up.
        mode: "triangular": constant amplitude; "triangular2": the amplitude is halved after each cycle; "exp_range":
            the amplitude is scaled by gamma^x, where x is the step or, by `scale_mode`, the cycle.
        gamma: for "exp_range" only.
        scale_mode: "cycle" or "iterations". It is determined by the mode, as in PyTorch: "exp_range" counts iterations,
            the others cycles; the other one is an error.

    Raises:
        ScheduleError: for an unknown mode, or arguments of another mode.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_lr: float,
        max_lr: float,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str | None = None,
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        if mode not in ("triangular", "triangular2", "exp_range"):
            raise ScheduleError(f"CyclicLR has the modes triangular, triangular2 and exp_range, not {mode!r}.")
        own = "iterations" if mode == "exp_range" else "cycle"
        if scale_mode not in (None, own):
            raise ScheduleError(f"CyclicLR's mode {mode!r} has scale_mode={own!r}, not {scale_mode!r}.")
        if gamma != 1.0 and mode != "exp_range":
            raise ScheduleError(f"gamma={gamma!r} is for CyclicLR's mode 'exp_range', not {mode!r}.")
        self.base_lr = base_lr
        self.initial_learning_rate: float = base_lr
        self.max_lr = max_lr
        self.step_size_up: int = positive("step_size_up", step_size_up)
        self.step_size_down: int = positive(
            "step_size_down", step_size_up if step_size_down is None else step_size_down
        )
        self.mode = mode
        self.gamma = gamma
        self.scale_mode = own
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        length = self.step_size_up + self.step_size_down
        cycle = step // length
        offset = (step - cycle * length).double()
        height = torch.where(
            offset <= self.step_size_up, offset / self.step_size_up, (length - offset) / self.step_size_down
        )
        if self.mode == "triangular2":
            height = height * 0.5 ** cycle.double()
        elif self.mode == "exp_range":
            height = height * self.gamma ** step.double()
        return self.base_lr + (self.max_lr - self.base_lr) * height


class OneCycleLR(Schedule):
    """From initial up to `max_lr`, then down to initial / `final_div_factor` at step `total_steps` - 1, and constant
    from there on (Smith and Topin, 2018). Like PyTorch's `OneCycleLR` without its momentum; its `div_factor` is max_lr
    / initial.

    Args:
        initial_learning_rate: the value at t = 0.
        max_lr: the maximum.
        total_steps: the number of steps of all phases.
        pct_start: the fraction of the steps in which the value rises.
        final_div_factor: initial divided by the final value.
        three_phase: fall to initial as fast as it has risen, and then further.
        anneal_strategy: "cos", a half cosine in each phase, or "linear".

    Raises:
        ScheduleError: if a phase has no steps, or for another `anneal_strategy`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        max_lr: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: Tags = None,
        **options: Any,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ScheduleError(f"anneal_strategy is 'cos' or 'linear', not {anneal_strategy!r}.")
        phases = 2 if three_phase else 1
        if not 1 < pct_start * total_steps < (total_steps + phases - 1) / phases:
            raise ScheduleError(
                f"with total_steps={total_steps} and pct_start={pct_start}, a phase of OneCycleLR has no steps."
            )
        self.initial_learning_rate: float = initial_learning_rate
        self.max_lr = max_lr
        self.total_steps = total_steps
        self.pct_start = pct_start
        self.final_div_factor = final_div_factor
        self.three_phase = three_phase
        self.anneal_strategy = anneal_strategy
        super().__init__(optimizer, param_group_tags=param_group_tags, **options)

    def value(self, step: Tensor) -> Tensor:
        initial, least = self.initial_learning_rate, self.initial_learning_rate / self.final_div_factor
        up = self.pct_start * self.total_steps
        if self.three_phase:
            ends, rates = [0.0, up - 1, 2 * up - 2, self.total_steps - 1], [initial, self.max_lr, initial, least]
        else:
            ends, rates = [0.0, up - 1, self.total_steps - 1], [initial, self.max_lr, least]
        t = step.double()
        out = self._anneal(rates[0], rates[1], t / ends[1])
        for phase in range(1, len(ends) - 1):
            done = ((t - ends[phase]) / (ends[phase + 1] - ends[phase])).clamp(max=1)
            out = torch.where(t > ends[phase], self._anneal(rates[phase], rates[phase + 1], done), out)
        return out

    def _anneal(self, start: float, end: float, done: Tensor) -> Tensor:
        return cosine(start, end, done) if self.anneal_strategy == "cos" else start + (end - start) * done
