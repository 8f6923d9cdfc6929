"""Gradient clipping as a callback."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TrainerError
from ..callback import Callback


class GradientClipping(Callback):
    """Clip gradients before each update, and log their norm before clipping as "grad_norm".

    Args:
        max_norm: clip the gradients' total norm to this.
        max_value: clip each element of the gradients to [-max_value, max_value]; excludes `max_norm`.
    """

    def __init__(self, max_norm: float | None = None, max_value: float | None = None) -> None:
        if (max_norm is None) == (max_value is None):
            raise TrainerError("GradientClipping clips by max_norm or by max_value. Pass exactly one of them.")
        limit = max_value if max_norm is None else max_norm
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise TrainerError(f"GradientClipping: {limit!r} is not a number above 0.")
        self.max_norm: float | None = max_norm
        self.max_value: float | None = max_value

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        if self.max_norm is not None:
            trainer.log_metrics(grad_norm=torch.nn.utils.clip_grad_norm_(weights, self.max_norm))
        else:
            assert self.max_value is not None
            trainer.log_metrics(
                grad_norm=torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
            )
            torch.nn.utils.clip_grad_value_(weights, self.max_value)
