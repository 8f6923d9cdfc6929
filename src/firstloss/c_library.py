"""Loading of the shared libraries compiled from C, each beside the module that uses it, with ctypes.

All of them are optional: `setup.py` builds them if there is a C compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any


def load(module: str, name: str, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL | None:
    """Load the library `name` beside the file `module`.

    Args:
        functions: {name: (result type, argument types)} of all functions that are called.

    Returns:
        The library; None if it was not built, or built for another machine, or from older source that lacks functions.
    """
    paths = (path for suffix in EXTENSION_SUFFIXES if (path := Path(module).with_name(name + suffix)).exists())
    try:
        library = ctypes.CDLL(str(next(paths)))
        for function, (result, arguments) in functions.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, tuple(arguments)
    except (StopIteration, OSError, AttributeError):
        return None
    return library
