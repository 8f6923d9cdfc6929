"""Adafactor with the arguments of transformers and Cerebras."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import OptimizerError
from ...optim.adam_base import check_numbers, is_zero
from ...optim.optimizer import Optimizer

Tensor = torch.Tensor


class Adafactor(Optimizer):
    """Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018).

    The second moment of a weight with two or more dimensions is factored into rows and columns. `torch.optim.Adafactor`
    has other arguments, limits `lr` by 1 / sqrt(t), and always scales by the weight.

    Args:
        lr: the learning rate; None with `relative_step`.
        eps: a pair: added to the squared gradient; lower limit of a weight's root mean square.
        clip_threshold: upper limit of an update's root mean square.
        decay_rate: of the second moment, whose coefficient is 1 - t^decay_rate.
        beta1: coefficient of a first moment; None: no first moment.
        scale_parameter: whether to multiply the learning rate by the weight's root mean square.
        relative_step: whether the learning rate is min(1e-2, 1 / sqrt(t)).
        warmup_init: with `relative_step`, whether it is min(1e-6 t, 1 / sqrt(t)).

    Raises:
        OptimizerError: for invalid numbers, or arguments that exclude each other.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = False,
        warmup_init: bool = False,
    ) -> None:
        if (lr is None) != relative_step:
            raise OptimizerError(
                f"Adafactor: lr={lr!r} and relative_step={relative_step} exclude each other; one of them must set the "
                "rate."
            )
        if warmup_init and not relative_step:
            raise OptimizerError("Adafactor: warmup_init=True has no effect without relative_step=True.")
        if not isinstance(eps, (tuple, list)) or len(eps) != 2:
            raise OptimizerError(f"Adafactor: eps={eps!r} is not a pair of numbers.")
        numbers = {"eps[0]": eps[0], "eps[1]": eps[1], "clip_threshold": clip_threshold, "weight_decay": weight_decay}
        check_numbers("Adafactor", numbers if lr is None else {**numbers, "lr": lr}, () if beta1 is None else (beta1,))
        defaults = {
            "lr": lr,
            "eps": tuple(eps),
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults, enable_global_step=True)

    def update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        for p, gradient in zip(weights, gradients, strict=True):
            state, step = self._state(p, group), self.increment_global_step(p)
            lr = self._rate(p, step, group)
            fading = 1 - step ** group["decay_rate"]
            square = gradient * gradient + group["eps"][0]
            if p.dim() >= 2:
                row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
                row.mul_(fading).add_(square.mean(dim=-1) * (1 - fading))
                column.mul_(fading).add_(square.mean(dim=-2) * (1 - fading))
                rows = (row / row.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
                update = gradient * rows * column.rsqrt().unsqueeze(-2)
            else:
                moment = state["exp_avg_sq"]
                moment.mul_(fading).add_(square * (1 - fading))
                update = gradient * moment.rsqrt()
            update = update / (_rms(update) / group["clip_threshold"]).clamp(min=1.0) * lr
            if group["beta1"] is not None:
                update = state["exp_avg"].lerp_(update, 1 - group["beta1"])
            if not is_zero(group["weight_decay"]):
                p.sub_(p * (group["weight_decay"] * lr))
            p.sub_(update)

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        if p.dim() >= 2 and "exp_avg_sq_row" not in state:
            state["exp_avg_sq_row"] = torch.zeros(p.shape[:-1], dtype=p.dtype, device=p.device)
            state["exp_avg_sq_col"] = torch.zeros((*p.shape[:-2], p.shape[-1]), dtype=p.dtype, device=p.device)
        if p.dim() < 2 and "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if group["beta1"] is not None and "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    @staticmethod
    def _rate(p: Tensor, step: Tensor, group: dict[str, Any]) -> Any:
        lr = group["lr"]
        if group["relative_step"]:
            least = 1e-6 * step if group["warmup_init"] else torch.full_like(step, 1e-2)
            lr = torch.minimum(least, step.rsqrt())
        return lr * _rms(p).clamp(min=group["eps"][1]) if group["scale_parameter"] else lr


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
