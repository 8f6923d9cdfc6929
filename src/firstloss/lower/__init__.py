"""ATen to StableHLO: the table of rules, a file per family, and the driver that runs a Program through them.

`fl.lower(Model)` is `init.init_program.lower`. Importing this package gives its name to the package, so the package can
be called.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Lower(types.ModuleType):
    """This package, which calls `fl.lower`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("firstloss.init.init_program").lower(*args, **kwargs)


sys.modules[__name__].__class__ = _Lower
