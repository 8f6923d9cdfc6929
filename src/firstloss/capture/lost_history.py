"""Tensors that a constructor computed from its weights, with gradients on: their values are made, their history is not.

Eager PyTorch could send gradients through such a tensor to the weights, once. Here what was recorded are the operations
on values, below autograd, so a gradient that arrives is an error rather than lost. Models that keep such tensors
(`torch.nn.utils.weight_norm`, of old) compute them anew in each forward pass, and never notice.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MaterializeError


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, boxed: tuple[torch.Tensor], where: str) -> torch.Tensor:
        ctx.where = where
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise MaterializeError(
            f"{ctx.where}: a gradient has come to a tensor that was computed from weights while they were deferred. "
            "Its value was made, but not the history that would lead the gradient on to the weights. Compute it in "
            "forward, or after firstloss.materialize_module."
        )


def without_history(value: torch.Tensor, where: str) -> torch.Tensor:
    """`value` (detached) as a tensor that requires gradients, is no leaf, and says so when one arrives."""
    with torch.enable_grad():
        anchor = torch.empty(0, dtype=value.dtype, device=value.device, requires_grad=True)
        return _Lost.apply(anchor, (value,), where)
