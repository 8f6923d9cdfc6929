"""Mixed precision under the names of `cerebras.pytorch.amp`, where setting a half dtype also enables it."""

from __future__ import annotations

from typing import Any

import torch

from ..amp import (
    GradScaler,
    autocast,
    enable_mixed_precision,
    get_floating_point_dtype,
    get_floating_point_dtype_str,
    is_cbfloat16_tensor,
    mixed_precision,
)
from ..amp import get_half_dtype as get_half_dtype_str
from ..amp import optimizer_step as _optimizer_step
from ..amp import set_half_dtype as _set_half_dtype


def set_half_dtype(value: str | torch.dtype) -> torch.dtype:
    """`firstloss.amp.set_half_dtype` followed by `enable_mixed_precision()`.

    Raises:
        PrecisionError: for another dtype.
    """
    dtype = _set_half_dtype(value)
    enable_mixed_precision()
    return dtype


def get_half_dtype() -> torch.dtype:
    """The torch dtype of the current half precision; `get_half_dtype_str` returns its name."""
    name = get_half_dtype_str()
    return torch.bfloat16 if name == "bfloat16" else torch.float16


def optimizer_step(
    loss: torch.Tensor,
    optimizer: Any,
    grad_scaler: GradScaler,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """`firstloss.amp.optimizer_step` with a required scaler."""
    _optimizer_step(loss, optimizer, grad_scaler, max_gradient_norm, max_gradient_value)


__all__ = [
    "GradScaler",
    "autocast",
    "enable_mixed_precision",
    "get_floating_point_dtype",
    "get_floating_point_dtype_str",
    "get_half_dtype",
    "get_half_dtype_str",
    "is_cbfloat16_tensor",
    "mixed_precision",
    "optimizer_step",
    "set_half_dtype",
]
