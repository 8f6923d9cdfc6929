"""Whether two values are the same to a step's Python."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .native import native

_PLAIN = (int, float, bool, str, bytes, bytearray, complex, type(None), torch.dtype, torch.device, torch.Size)


def same(a: Any, b: Any) -> bool:
    """Whether they are the same object, or equal plain ones."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return bool(a == b) or a != a
    if isinstance(a, (tuple, frozenset)) and len(a) == len(b):
        return all(map(operator.is_, a, b)) or all(map(same, a, b)) if isinstance(a, tuple) else a == b
    return False


def same_items(a: list, b: list) -> bool:
    """Whether two lists hold the same. (Their own `==` asks tensors, and takes True for 1.)"""
    return _identical(a, b) or len(a) == len(b) and all(map(same, a, b))


def _same_objects(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


# The C part compares addresses, eight bytes at a time.
_identical = getattr(native, "same_items", _same_objects)
