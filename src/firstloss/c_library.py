"""Load the shared libraries that are compiled from C, each beside the module that uses it, through ctypes.

All are optional: `setup.py` builds them where there is a C compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any


def load(module: str, name: str, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL | None:
    """The library `name` beside the file `module`.

    Args:
        functions: {name: (type of the result, types of the arguments)} of all that is called.

    Returns:
        None where it was not built, was built for another machine, or from older source, without all of `functions`.
    """
    found = (path for suffix in EXTENSION_SUFFIXES if (path := Path(module).with_name(name + suffix)).exists())
    try:
        library = ctypes.CDLL(str(next(found)))
        for function, (result, arguments) in functions.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, tuple(arguments)
    except (StopIteration, OSError, AttributeError):
        return None
    return library
