"""Backward pass, clipping and optimizer step in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PrecisionError
from .grad_scaler import GradScaler


def optimizer_step(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    grad_scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """Run the backward pass of `loss`, scaled, and a step of `optimizer`, which is skipped if a gradient is not finite.

    Like Cerebras' `cstorch.amp.optimizer_step`. Gradients are added to existing ones, for example of earlier batches,
    as by any `backward()`; with a `grad_scaler` these must be scaled like this loss's. Gradients are cleared at the
    end.

    Examples:
        >>> model = nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> fl.amp.optimizer_step(model(torch.ones(1, 8)).sum(), optimizer, max_gradient_norm=1.0)
        >>> model.weight.grad is None or not model.weight.grad.any()
        True

    Args:
        loss: a scalar tensor.
        optimizer: one, or several that step together or not at all; their gradients are clipped together.
        grad_scaler: the scaler; without one, nothing is scaled.
        max_gradient_norm: clip the total norm of all gradients to this.
        max_gradient_value: clamp each element to plus and minus this; not together with a norm.

    Raises:
        PrecisionError: if both limits are given, or one is not positive; if there is no optimizer.
    """
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise PrecisionError("gradients can be clipped by norm or by value, not both: pass one of them.")
    limit = max_gradient_norm if max_gradient_value is None else max_gradient_value
    if limit is not None and not limit > 0:
        raise PrecisionError(f"the limit of gradients must be positive, not {limit}.")
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    wrong = [o for o in optimizers if not isinstance(o, torch.optim.Optimizer)]
    if wrong or not optimizers:
        description = f"an object of type {type(wrong[0]).__name__}" if wrong else "no optimizer"
        raise PrecisionError(f"optimizer_step takes a torch.optim.Optimizer, or a list of them, not {description}.")
    scaler = GradScaler() if grad_scaler is None else grad_scaler
    scaler.scale(loss).backward()
    for each in optimizers:
        scaler.unscale_(each)
    weights = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    if max_gradient_norm is not None:
        torch.nn.utils.clip_grad_norm_(weights, max_gradient_norm)
    elif max_gradient_value is not None:
        torch.nn.utils.clip_grad_value_(weights, max_gradient_value)
    scaler.together()
    for each in optimizers:
        scaler.step(each)
    scaler.update()
    for each in optimizers:
        each.zero_grad()
