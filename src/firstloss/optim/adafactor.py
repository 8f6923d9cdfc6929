"""PyTorch's Adafactor without reading values: its data-dependent Python code is replaced by tensor operations.

`torch.optim.Adafactor` (Shazeer and Stern, 2018) limits the rate and the root mean squares of weights and updates with
`min` and `max` of Python numbers, reading values of every weight. A traced step has no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture import session
from ..capture.op_call import is_symbolic
from ..capture.symbolic_scalars import tensor_of
from ..compat.patches import replaces

Tensor = torch.Tensor


@replaces(*(f"torch.optim._adafactor.{name}" for name in ("_single_tensor_adafactor", "_multi_tensor_adafactor")))
def update_if_traced(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """As `original`; in a step that is being traced, by `update`."""
    (original if session.trace is None else update)(*args, **kwargs)


def update(
    params: list[Tensor],
    grads: list[Tensor],
    row_vars: list[Tensor],
    col_vars: list[Tensor],
    variances: list[Tensor],
    state_steps: list[Tensor],
    *unused: Any,
    d: float,
    lr: Any,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    **unused_too: Any,
) -> None:
    """Update each weight, with operations in the order of PyTorch's own."""
    for p, grad, row, column, variance, step in zip(
        params, grads, row_vars, col_vars, variances, state_steps, strict=True
    ):
        least = torch.finfo(p.dtype).eps if eps1 is None else eps1
        grad = -grad if maximize else grad
        step.add_(1)
        decay: Any = beta2_decay
        fading = step ** (tensor_of(decay).to(step.dtype) if is_symbolic(decay) else decay)
        rate = torch.minimum(step.rsqrt(), torch.as_tensor(lr, dtype=step.dtype))
        rate = rate * (p.norm(2) / p.numel() ** 0.5).clamp(min=eps2)
        if weight_decay != 0:
            p.mul_(1 - lr * weight_decay)
        if grad.dim() > 1:
            row.lerp_(grad.norm(dim=-1, keepdim=True).square() / grad.size(-1), fading)
            column.lerp_(grad.norm(dim=-2, keepdim=True).square() / grad.size(-2), fading)
            estimate = (row @ column) / row.mean(dim=-2, keepdim=True).clamp(min=least)
        else:
            variance.lerp_(grad * grad, fading)
            estimate = variance
        change = estimate.clamp(min=least * least).rsqrt() * grad
        p.sub_(change * (rate / (change.norm(2) / (change.numel() ** 0.5 * d)).clamp(min=1.0)))
