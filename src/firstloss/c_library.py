"""Loading of the shared libraries compiled from C, each beside the module that uses it, with ctypes.

All of them are optional: `setup.py` builds them if there is a C compiler.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import MissingKernelsWarning

SUFFIX = ".so"  # on every system: these are no Python modules
GUARDS = "_guards"  # the one that is a Python module: see `runtime/guards/native.py`


def load(module: str, name: str, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL | None:
    """Load the library `name` beside the file `module`.

    Args:
        functions: {name: (result type, argument types)} of all functions that are called.

    Returns:
        The library; None, with a warning, if it was not built, or built for another machine, or from older source
        that lacks functions.
    """
    path = Path(module).with_name(name + SUFFIX)
    if not path.exists():
        warn_missing(name, "it was not built")
        return None
    try:
        library = ctypes.CDLL(str(path))
        for function, (result, arguments) in functions.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, tuple(arguments)
    except (OSError, AttributeError) as error:
        warn_missing(name, str(error))
        return None
    return library


_has_warned = False


def warn_missing(name: str, reason: str) -> None:
    """Say, once in a process, that compiled parts are missing, and what that costs."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    if name == GUARDS:  # a wheel may have all others, and this one for other versions of Python
        cost = "one of its parts in C", "a compiled step takes up to twice as long"
    else:
        cost = "its parts in C", "weights are initialized up to 6 times as slowly, and a step takes up to twice as long"
    warnings.warn(
        f"Firstloss runs without {cost[0]} ({name}: {reason}): {cost[1]}. pip builds them if there is a C compiler: "
        "install one, such as gcc, and Firstloss again "
        "(pip install --force-reinstall --no-deps --no-cache-dir --no-binary firstloss firstloss).",
        MissingKernelsWarning,
        stacklevel=3,
    )
