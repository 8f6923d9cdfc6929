"""Samples of our own, for the overloads of Core ATen that none of PyTorch's own samples come to.

Each is an operation in PyTorch's sense (an `OpInfo`), called by its overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64)
WHOLE = (torch.int64, torch.bool)


def _made(shape: tuple[int, ...], dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    """Numbers of both signs, none of them zero, no two alike up to eight."""
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 5 % 17 - 8.5) / 2
    x = x.round() + 1 if dtype == torch.int64 else x
    x = (x > 0) if dtype == torch.bool else x.to(dtype)
    return x.reshape(shape).requires_grad_(grad and x.is_floating_point())


def _direct(overload: Any, dtypes: tuple, *calls: Callable, grad: bool = True) -> OpInfo:
    """`overload` on the arguments that each of `calls` gives for a function that makes tensors."""

    def samples(op: Any, device: Any, dtype: torch.dtype, requires_grad: bool, **_: Any) -> Any:
        for call in calls:
            arguments = call(lambda *shape: _made(shape, dtype, requires_grad))
            first, *rest = arguments if isinstance(arguments, tuple) else (arguments,)
            keywords = rest.pop() if rest and isinstance(rest[-1], dict) else {}
            yield SampleInput(first, args=tuple(rest), kwargs=keywords)

    return OpInfo(
        f"core.{overload}",
        op=overload,
        dtypes=dtypes,
        sample_inputs_func=samples,
        supports_autograd=grad,
        supports_out=False,
        inplace_variant=None,
        method_variant=None,
    )


def _places(*values: int) -> torch.Tensor:
    return torch.tensor(values)


_IMAGE = (1, 2, 6, 6)

DIRECT: list[OpInfo] = []
