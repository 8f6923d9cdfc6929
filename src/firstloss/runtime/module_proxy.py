"""Proxies of a module, by which code that walks through objects comes to the module itself."""

from __future__ import annotations

import torch


class ModuleProxy:
    """Its attributes, all but `_model`, are those of the module that it stands for."""

    __slots__ = ()


def module_of(compiled: ModuleProxy) -> torch.nn.Module:
    """The module that `compiled` stands for."""
    return compiled.__dict__["_model"]
