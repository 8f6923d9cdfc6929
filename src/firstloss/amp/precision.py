"""Which half precision, and the region in which it is used."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..capture import session
from ..errors import PrecisionError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "cbfloat16": torch.float16,  # in whose place the lowering puts it
}
_half = "float16"


def set_half_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Choose the half precision of `autocast`, for the whole process; float16 until then.

    Args:
        dtype: "bfloat16", "float16" or "cbfloat16" (1 sign, 6 exponent and 9 mantissa bits), or a torch dtype.

    Returns:
        The torch dtype that tensors of this precision have. PyTorch has none for cbfloat16: they have float16, and in
        a step with a cbfloat16 region all float16 tensors are cbfloat16.

    Raises:
        PrecisionError: for another dtype.
    """
    global _half
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise PrecisionError(f"{dtype!r} is not one of the half precisions: {', '.join(_DTYPES)}.")
    _half = name
    return _DTYPES[name]


def get_half_dtype() -> str:
    """The name of the half precision chosen."""
    return _half


class autocast(contextlib.ContextDecorator):
    """A region in which products are computed in the half precision chosen by `set_half_dtype`.

    As `torch.autocast`, whose lists say which operations are cast to half precision, which to float32 and which follow
    their operands; regions of `torch.autocast` inside override it, and it overrides those outside. On the XLA backend
    the lists are those of `torch.autocast("cpu")`.

    Args:
        enabled: False: nothing is cast in the region.

    Raises:
        PrecisionError: if `enabled` is neither; on entering with cbfloat16 anywhere but in a traced step: it is
            emulated by XLA.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise PrecisionError(
                f"autocast(enabled=...) is True or False, and not {enabled!r}. A dtype is chosen by set_half_dtype."
            )
        self._enabled = enabled
        self._open: list[torch.autocast] = []

    def __enter__(self) -> autocast:
        if self._enabled and _half == "cbfloat16":
            if session.trace is None:
                raise PrecisionError(
                    "cbfloat16 is emulated in traced steps on the XLA backend, and this is none. Choose "
                    'set_half_dtype("bfloat16") or "float16" here.'
                )
            session.trace.cbfloat16 = True
        region = torch.autocast(_device_type(), dtype=_DTYPES[_half], enabled=self._enabled)
        region.__enter__()
        self._open.append(region)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.pop().__exit__(*exception)


def _device_type() -> str:
    from ..runtime.backend import current_torch_device  # here: the backend is another room's, and may not be there

    return current_torch_device().type
