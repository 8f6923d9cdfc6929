"""Patches of Python's `max` and `min`: of numbers that only a traced step has, they are computed on the device.

`max(eps, norm)` compares its arguments, and so would read a value: `max_norm / max(norm, 1e-6)`, `min(1.0, scale)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..compat.patches import replaces
from . import session
from .constant_folding import known_value
from .tensor import DeferredTensor


@replaces("builtins.max")
def maximum(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `max`."""
    return _extremum(original, torch.gt, args, kwargs)


@replaces("builtins.min")
def minimum(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `min`."""
    return _extremum(original, torch.lt, args, kwargs)


def _extremum(
    original: Callable[..., Any], exceeds: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if session.trace is None or kwargs:
        return original(*args, **kwargs)
    if len(args) == 1 and type(args[0]) not in (list, tuple, set, dict):
        if not isinstance(args[0], Iterable) or isinstance(args[0], torch.Tensor):
            return original(*args)
        args = (list(args[0]),)  # an iterator, which can be read once
    numbers = args[0] if len(args) == 1 else args
    if not any(type(number) is DeferredTensor for number in numbers) or not all(map(_is_single, numbers)):
        return original(*args)
    if all(known_value(number) is not None for number in numbers if type(number) is DeferredTensor):
        return original(*args)

    def better(a: Any, b: Any) -> Any:  # the first one of equal numbers, and of those that cannot be compared
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return original(a, b)
        return torch.where(exceeds(b, a) if isinstance(b, torch.Tensor) else exceeds(-a, -b), b, a)

    return functools.reduce(better, numbers)


def _is_single(number: Any) -> bool:
    if isinstance(number, torch.Tensor):
        return number.numel() == 1
    return isinstance(number, (int, float))
