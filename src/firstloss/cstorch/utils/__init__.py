"""Utilities, as in `cerebras.pytorch.utils`."""

import importlib
from typing import Any

from . import data as data

__all__ = ["data", "tensorboard"]


def __getattr__(name: str) -> Any:
    if name != "tensorboard":
        raise AttributeError(f"module 'firstloss.cstorch.utils' has no attribute {name!r}; see docs/cstorch-names.md")
    return importlib.import_module(".tensorboard", __name__)
