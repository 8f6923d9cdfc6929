"""Utilities: `firstloss.utils.data`, and `firstloss.utils.tensorboard`, which needs tensorboard."""

import importlib
from typing import Any

from . import data as data

__all__ = ["data", "tensorboard"]


def __getattr__(name: str) -> Any:
    if name != "tensorboard":
        raise AttributeError(f"module 'firstloss.utils' has no attribute {name!r}")
    return importlib.import_module(".tensorboard", __name__)
