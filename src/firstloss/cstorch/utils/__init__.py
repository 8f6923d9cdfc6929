"""Utilities, as in `cerebras.pytorch.utils`."""

from __future__ import annotations

import importlib
from typing import Any

from ..accepted import make_constant, say
from . import data as data
from .data import DataExecutor, DataLoader, RestartableDataLoader, SyntheticDataset

_SUBMODULES = ("nest", "tensorboard", "tools", "tracker")

__all__ = [
    "CSConfig",
    "DataExecutor",
    "DataLoader",
    "RestartableDataLoader",
    "SyntheticDataset",
    "data",
    "make_constant",
    *_SUBMODULES,
]


class CSConfig:
    """Earlier versions' settings of Cerebras' cluster: kept as attributes, without effect. Pass a
    `cstorch.distributed.ClusterConfig` to `cstorch.backend`."""

    def __init__(self, **settings: Any) -> None:
        say("utils.CSConfig")
        vars(self).update(settings)


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES:
        raise AttributeError(f"module 'firstloss.cstorch.utils' has no attribute {name!r}; see docs/cstorch-names.md")
    return importlib.import_module(f".{name}", __name__)
