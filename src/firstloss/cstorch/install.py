"""`firstloss.cstorch.install()`: `import cerebras.pytorch` means Firstloss, for code that cannot be changed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..errors import BackendError
from .submodules import SUBMODULES, UNSUPPORTED

_THEIRS, _OURS = "cerebras.pytorch", "firstloss.cstorch"


def install() -> None:
    """Let `import cerebras.pytorch` and its submodules mean `firstloss.cstorch`, in this process.

    Call it first, before anything imports them: in the script, or in `sitecustomize.py`. Again, it does nothing.

    Raises:
        BackendError: if the real `cerebras.pytorch` is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _THEIRS in sys.modules:
        raise BackendError(
            "cerebras.pytorch has been imported before firstloss.cstorch.install(). Call it first in the script."
        )
    sys.meta_path.insert(0, _Finder())
    for name in (*SUBMODULES, *UNSUPPORTED):  # some are in modules that are no packages, where no finder is asked
        sys.modules[f"{_THEIRS}.{name}"] = sys.modules[f"{_OURS}.{name}"]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `cerebras.pytorch` and its submodules, and the package `cerebras` if there is none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "cerebras":
            others = [finder for finder in sys.meta_path if finder is not self]
            if any(finder.find_spec(fullname, path, target) for finder in others):
                return None
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        if fullname != _THEIRS and not fullname.startswith(_THEIRS + "."):
            return None
        try:
            module = importlib.import_module(_OURS + fullname.removeprefix(_THEIRS))
        except ModuleNotFoundError:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=hasattr(module, "__path__"))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = importlib.import_module(_OURS + spec.name.removeprefix(_THEIRS))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec  # which importing it under another name has replaced
