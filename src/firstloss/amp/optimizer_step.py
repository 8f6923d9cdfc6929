"""Backward pass, clipping and update, in one call."""

from __future__ import annotations

import torch

from ..errors import PrecisionError
from .grad_scaler import GradScaler


def optimizer_step(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    grad_scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """The backward pass of `loss`, scaled, and a step of `optimizer`, left out where a gradient is not finite.

    Gradients of before are cleared first, and those of this step at the end. As Cerebras' `cstorch.amp.optimizer_step`.

    Args:
        loss: one number.
        grad_scaler: without one, nothing is scaled.
        max_gradient_norm: scale all gradients down together, so that their norm is at most this.
        max_gradient_value: clamp each element to plus and minus this; not together with a norm.

    Raises:
        PrecisionError: if the limits are both given, or not positive.
    """
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise PrecisionError("clip gradients by norm or by value, not by both: pass one of the two.")
    limit = max_gradient_norm if max_gradient_value is None else max_gradient_value
    if limit is not None and not limit > 0:
        raise PrecisionError(f"gradients are clipped to something positive, and not to {limit}.")
    scaler = GradScaler() if grad_scaler is None else grad_scaler
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if max_gradient_norm is not None:
        torch.nn.utils.clip_grad_norm_(weights, max_gradient_norm)
    elif max_gradient_value is not None:
        torch.nn.utils.clip_grad_value_(weights, max_gradient_value)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
