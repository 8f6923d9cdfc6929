"""Firstloss with the names and defaults of `cerebras.pytorch` 2.10: `import firstloss.cstorch as cstorch`.

The same package: what is not in the table below is `firstloss`'s. Where `firstloss` has PyTorch's defaults, as those of
AdamW, this has Cerebras'. docs/cstorch.md says which to take, and docs/cstorch-names.md goes through all names.
"""

from __future__ import annotations

import importlib
from typing import Any

import firstloss as _firstloss

# Name -> the module that has it, where it is another one than firstloss's.
_WHERE = {
    "amp": ".amp",
    "utils": ".utils",
    "optim": ".optim",
}

__all__ = sorted({*_firstloss.__all__, *_WHERE} - {"cstorch"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'firstloss.cstorch' has no attribute {name!r}; see docs/cstorch-names.md")
    value = importlib.import_module(_WHERE[name], __name__) if name in _WHERE else getattr(_firstloss, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
