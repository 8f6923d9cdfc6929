"""Mixed precision: weights and updates in float32, matrix products in a half precision.

`torch.autocast` works in a traced step as it is. This package adds a process-wide half precision, an emulated one that
PyTorch does not have, and loss scaling that needs no values on the host.
"""

from .grad_scaler import GradScaler
from .optimizer_step import optimizer_step
from .precision import (
    autocast,
    enable_mixed_precision,
    get_floating_point_dtype,
    get_floating_point_dtype_str,
    get_half_dtype,
    is_cbfloat16_tensor,
    mixed_precision,
    set_half_dtype,
)

__all__ = [
    "GradScaler",
    "autocast",
    "enable_mixed_precision",
    "get_floating_point_dtype",
    "get_floating_point_dtype_str",
    "get_half_dtype",
    "is_cbfloat16_tensor",
    "mixed_precision",
    "optimizer_step",
    "set_half_dtype",
]
