"""The process's half precision, and the autocast context that uses it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from ..capture import session
from ..errors import PrecisionError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "cbfloat16": torch.float16,  # replaced when it is lowered
}


@dataclass
class Precision:
    """The process's settings.

    Attributes:
        half: the name of the half precision.
        mixed: whether mixed precision is enabled.
        device_type: that of the current backend's tensors.
    """

    half: str = "float16"
    mixed: bool = False
    device_type: str = "cpu"


current: Precision = Precision()


def set_device_type(device_type: str) -> None:
    """Set the device type whose cast lists `autocast` follows; called when a backend becomes the current one."""
    current.device_type = device_type


def set_half_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Set the half precision of `autocast` for the whole process; float16 by default.

    Examples:
        >>> fl.amp.set_half_dtype("bfloat16")
        torch.bfloat16

    Args:
        dtype: "bfloat16", "float16" or "cbfloat16" (1 sign, 6 exponent and 9 mantissa bits), or a torch dtype.

    Returns:
        The torch dtype of tensors in this precision. PyTorch has no cbfloat16: such tensors are float16, and in a step
        with a cbfloat16 region all float16 tensors are cbfloat16.

    Raises:
        PrecisionError: for another dtype.
    """
    current.half = _name(dtype)
    return _DTYPES[current.half]


def _name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise PrecisionError(f"{dtype!r} is not one of the half precisions: {', '.join(_DTYPES)}.")
    return name


def get_half_dtype() -> str:
    """The name of the current half precision.

    Returns:
        "bfloat16", "float16" or "cbfloat16".
    """
    return current.half


def enable_mixed_precision(enable: bool = True) -> bool:
    """Call models compiled by `firstloss.compile` under `autocast` in traced steps. Off by default.

    Args:
        enable: False switches it off again.

    Returns:
        Whether it is on.

    Raises:
        PrecisionError: if `enable` is neither True nor False.
    """
    if not isinstance(enable, bool):
        raise PrecisionError(f"enable_mixed_precision({enable!r}): write True or False.")
    current.mixed = enable
    return current.mixed


def mixed_precision() -> bool:
    """Whether `enable_mixed_precision` is on.

    Returns:
        True from `enable_mixed_precision()` until `enable_mixed_precision(False)`.
    """
    return current.mixed


def get_floating_point_dtype(default: torch.dtype = torch.float32) -> torch.dtype:
    """The torch dtype in which models compute.

    Args:
        default: the result if `mixed_precision` is off.

    Returns:
        The half precision's dtype if `mixed_precision` is on, else `default`.
    """
    return _DTYPES[current.half] if current.mixed else default


def get_floating_point_dtype_str(default: str = "float32") -> str:
    """The name of the dtype in which models compute.

    Args:
        default: the result if `mixed_precision` is off.

    Returns:
        The half precision's name if `mixed_precision` is on, else `default`.
    """
    return current.half if current.mixed else default


def is_cbfloat16_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be cbfloat16 in a traced step.

    Args:
        tensor: any tensor.

    Returns:
        Whether cbfloat16 is set, and `tensor` has the dtype float16, which stands for it.
    """
    return current.half == "cbfloat16" and tensor.dtype == _DTYPES[current.half]


class autocast(contextlib.ContextDecorator):
    """Context in which matrix products are computed in half precision.

    Like `torch.autocast`, whose lists determine which operations are cast to half precision, which to float32 and which
    follow their operands; the innermost region, of this or of `torch.autocast`, applies. On the XLA backend the lists
    are those of `torch.autocast("cpu")`.

    Examples:
        >>> with fl.amp.autocast("bfloat16"):
        ...     product = nn.Linear(8, 4)(torch.ones(1, 8))
        >>> product.dtype
        torch.bfloat16

    Args:
        dtype: as for `set_half_dtype`, whose dtype is the default.
        enabled: if False, nothing is cast in the region.

    Raises:
        PrecisionError: for another dtype, or if `enabled` is not a bool; when a cbfloat16 region is entered outside of
            a traced step, as it is emulated by XLA.
    """

    def __init__(self, dtype: str | torch.dtype | None = None, enabled: bool = True) -> None:
        if isinstance(dtype, bool) or not isinstance(enabled, bool):
            wrong = dtype if isinstance(dtype, bool) else enabled
            raise PrecisionError(f"autocast(enabled=...) must be True or False, not {wrong!r}.")
        self._dtype = None if dtype is None else _name(dtype)
        self._enabled = enabled
        self._open: list[torch.autocast] = []

    def __enter__(self) -> autocast:
        half = self._dtype or current.half
        if self._enabled and half == "cbfloat16":
            if session.trace is None:
                raise PrecisionError(
                    "cbfloat16 is emulated in traced steps on the XLA backend only. Use "
                    'set_half_dtype("bfloat16") or "float16" here.'
                )
            session.trace.cbfloat16 = True
        region = torch.autocast(current.device_type, dtype=_DTYPES[half], enabled=self._enabled)
        region.__enter__()
        self._open.append(region)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.pop().__exit__(*exception)
