"""A map over the tensors of nested data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(obj: Any, change: Callable[[torch.Tensor, str], Any], where: str = "") -> Any:
    """`obj` with each tensor replaced by `change(tensor, path)`; dicts keep their attributes, such as `_metadata`."""
    if isinstance(obj, torch.Tensor):
        return change(obj, where)
    if isinstance(obj, dict):
        out = copy.copy(obj)
        for key, value in obj.items():
            out[key] = map_tensors(value, change, f"{where}.{key}" if where else str(key))
        return out
    if type(obj) in (list, tuple):
        return type(obj)(map_tensors(item, change, f"{where}.{i}" if where else str(i)) for i, item in enumerate(obj))
    return obj
