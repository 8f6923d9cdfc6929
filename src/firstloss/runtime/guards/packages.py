"""Whose code a class, a function or a module is: the user's, an installed package's, or that of a library whose code
reads no state of the user's."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

from ...compat.installed import is_installed_file
from ...compat.python_names import is_python_class

# The code of these packages reads no state of the user's.
_LIBRARIES = {"torch", "torchgen", "numpy", "jax", "jaxlib", "firstloss", "safetensors", "sympy", "mpmath",
              "typing_extensions", "opt_einsum", "ml_dtypes", "triton", "packaging", "_pytest", "pytest"}  # fmt: skip
_CLOSED = {*_LIBRARIES, *sys.stdlib_module_names}
# Objects of these packages are not walked: they are the runtime itself.
_RUNTIME = ("firstloss.", "jax.", "jaxlib.")
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # our own code
# Modules of packages whose C classes have no mutable state that matters.
_HARMLESS = {"typing", "torch", "pybind11_builtins", "_abc", "_collections"}


def is_harmless_module(module: str) -> bool:
    """Whether no mutable state of the objects of a module's C classes affects a computation."""
    return module in _HARMLESS or module.partition(".")[0] in _HARMLESS


def is_runtime(module: str | None) -> bool:
    """Whether a module is part of the runtime."""
    return module is not None and f"{module}.".startswith(_RUNTIME)


def is_closed(module: Any) -> bool:
    """Whether the code of a module reads no state of the user's."""
    # In a C class `__module__` may be a descriptor.
    return not isinstance(module, str) or module.partition(".")[0] in _CLOSED and module != "__main__"


def module_of_class(cls: type) -> str:
    """The `__module__` of a class. Some classes of ctypes have none; in a C class it may be a descriptor."""
    module = getattr(cls, "__module__", None)
    return module if isinstance(module, str) else "builtins"


def is_closed_class(cls: type) -> bool:
    """`is_closed` for the module that defines a class: a class that was created outside of a module has `builtins` as
    its module, one of `dataclasses.make_dataclass` has `types`, and an abstract one `abc`."""
    module = module_of_class(cls)
    if module in ("builtins", "types", "abc") and is_python_class(cls):
        return vars(sys.modules[module]).get(cls.__qualname__) is cls
    return is_closed(module)


def own_module(function: types.FunctionType) -> str | None:
    """The module that defines a function, or its `__module__`, which `functools.wraps` sets: the user's, if one of them
    is. None if the function was created outside of a module."""
    names = [None if n == "builtins" else n for n in (function.__globals__.get("__name__"), function.__module__)]
    return next((n for n in names if n is None or not is_closed(n) and not is_installed(n)), names[1])


def is_closed_function(function: types.FunctionType) -> bool:
    """`is_closed` for the module of a function."""
    module = own_module(function)
    return module is not None and is_closed(module)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module belongs to an installed package rather than to the user."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and is_installed_file(file)
