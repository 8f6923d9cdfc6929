"""Cyclical learning rates and the 1cycle policy (Smith)."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ScheduleError
from .curves import cosine, positive
from .schedule import Schedule, Tags

Tensor = torch.Tensor


class CyclicLR(Schedule):
    """Up from `base_lr` to `max_lr` and down again, in straight lines (Smith, 2017). As PyTorch's `CyclicLR` without
    its momentum, for which a second schedule can be made with `param_group_key="momentum"`.

    Args:
        base_lr: the number at the beginning and the end of each cycle.
        max_lr: the highest number of the first cycle.
        step_size_up, step_size_down: how many steps up and down; down as up, if it is not given.
        mode: "triangular", always as high; "triangular2", half as high in each cycle as in the one before;
            "exp_range", gamma^x as high, where x is the step or, by `scale_mode`, the cycle.
        gamma: of "exp_range" only.
        scale_mode: "cycle" or "iterations". The modes have their own, as in PyTorch: "exp_range" counts iterations, and
            the others cycles; another one is an error.

    Raises:
        ScheduleError: for a mode that there is none, or arguments of another mode.
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
        **where: Any,
    ) -> None:
        if mode not in ("triangular", "triangular2", "exp_range"):
            raise ScheduleError(f"CyclicLR has the modes triangular, triangular2 and exp_range, and not {mode!r}.")
        own = "iterations" if mode == "exp_range" else "cycle"
        if scale_mode not in (None, own):
            raise ScheduleError(f"CyclicLR's mode {mode!r} counts by {own!r}, and not by scale_mode={scale_mode!r}.")
        if gamma != 1.0 and mode != "exp_range":
            raise ScheduleError(f"gamma={gamma!r} is of CyclicLR's mode 'exp_range', and the mode is {mode!r}.")
        self.base_lr = self.initial_learning_rate = base_lr
        self.max_lr = max_lr
        self.step_size_up = positive("step_size_up", step_size_up)
        self.step_size_down = positive("step_size_down", step_size_up if step_size_down is None else step_size_down)
        self.mode = mode
        self.gamma = gamma
        self.scale_mode = own
        super().__init__(optimizer, param_group_tags=param_group_tags, **where)

    def value(self, step: Tensor) -> Tensor:
        length = self.step_size_up + self.step_size_down
        cycle = step // length
        place = (step - cycle * length).double()
        height = torch.where(
            place <= self.step_size_up, place / self.step_size_up, (length - place) / self.step_size_down
        )
        if self.mode == "triangular2":
            height = height * 0.5 ** cycle.double()
        elif self.mode == "exp_range":
            height = height * self.gamma ** step.double()
        return self.base_lr + (self.max_lr - self.base_lr) * height


class OneCycleLR(Schedule):
    """Up from initial to `max_lr`, then down to initial / `final_div_factor` (Smith and Topin, 2018), and that from
    `total_steps` - 1 on. As PyTorch's `OneCycleLR` without its momentum; PyTorch's `div_factor` is max_lr / initial.

    Args:
        initial_learning_rate: the number at t = 0.
        max_lr: the highest number.
        total_steps: of all phases.
        pct_start: which part of the steps goes up.
        final_div_factor: initial / the last number.
        three_phase: down to initial as fast as up, and then further down.
        anneal_strategy: "cos", half a cosine in each phase, or "linear".

    Raises:
        ScheduleError: if a phase takes no step, or for another `anneal_strategy`.
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
        **where: Any,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ScheduleError(f"anneal_strategy is 'cos' or 'linear', and not {anneal_strategy!r}.")
        phases = 2 if three_phase else 1
        if not 1 < pct_start * total_steps < (total_steps + phases - 1) / phases:
            raise ScheduleError(
                f"with total_steps={total_steps} and pct_start={pct_start}, a phase of OneCycleLR takes no step."
            )
        self.initial_learning_rate = initial_learning_rate
        self.max_lr = max_lr
        self.total_steps = total_steps
        self.pct_start = pct_start
        self.final_div_factor = final_div_factor
        self.three_phase = three_phase
        self.anneal_strategy = anneal_strategy
        super().__init__(optimizer, param_group_tags=param_group_tags, **where)

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
