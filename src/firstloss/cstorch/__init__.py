"""Firstloss with the names and defaults of `cerebras.pytorch` 2.10: `import firstloss.cstorch as cstorch`.

Names that are not in the table below are `firstloss`'s. Where `firstloss` has PyTorch's defaults, such as AdamW's, this
has Cerebras'. docs/cstorch.md says which of the two to use, and docs/cstorch-names.md lists all names.
"""

from __future__ import annotations

import importlib
from typing import Any

import firstloss as _firstloss

# Name -> the module that defines it, if that is not firstloss.
_MODULES = {
    "amp": ".amp",
    "utils": ".utils",
    "optim": ".optim",
}

__all__ = sorted({*_firstloss.__all__, *_MODULES} - {"cstorch"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'firstloss.cstorch' has no attribute {name!r}; see docs/cstorch-names.md")
    value = importlib.import_module(_MODULES[name], __name__) if name in _MODULES else getattr(_firstloss, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
