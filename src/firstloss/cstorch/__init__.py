"""Firstloss with the names and defaults of `cerebras.pytorch` 2.10: `import firstloss.cstorch as cstorch`.

Names that are not in the table below are `firstloss`'s. Where `firstloss` has PyTorch's defaults, such as AdamW's, this
has Cerebras'. docs/moving.md says which of the two to use, and docs/cstorch-names.md lists all names.
"""

from __future__ import annotations

import importlib
from typing import Any

import firstloss as _firstloss

from .submodules import register

# Name -> the module that defines it, if that is not firstloss.
_NAMES = {
    "install": ".install",
    "tensor": ".on_device",
    **dict.fromkeys(("full", "full_like", "ones", "ones_like", "zeros", "zeros_like"), ".filled"),
    **dict.fromkeys(("from_numpy", "to_numpy"), "..runtime.device.numpy_arrays"),
    **dict.fromkeys(("backend", "current_backend", "device", "load", "save"), ".renamed"),
    **dict.fromkeys(
        (
            "add_debug_name",
            "backends",
            "current_pol",
            "device_annotation",
            "get_debug_name",
            "make_constant",
            "name_scope",
            "pol",
            "register_decomposition",
            "set_debug_scope",
        ),
        ".accepted",
    ),
}
_MODULES = (
    "amp",
    "core",
    "distributed",
    "experimental",
    "mesh",
    "nn",
    "optim",
    "profiler",
    "sparse",
    "storage",
    "utils",
)

__all__ = sorted({*_firstloss.__all__, *_NAMES, *_MODULES} - {"cstorch", "lower"})  # lower is a package, too
register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'firstloss.cstorch' has no attribute {name!r}; see docs/cstorch-names.md")
    value: Any
    if name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    elif name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name], __name__), name)
    else:
        value = getattr(_firstloss, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
