"""The private names of Python's own library that Firstloss uses, each with the reason.

What the guards know of bytecode and of dicts' versions is in `runtime/guards/bytecode.py` and `_guards.c`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from .names import Name, resolve

# The versions of Python that the suite has been run on.
TESTED = ("3.11", "3.12", "3.13")

NAMES = {
    "getframe": Name("sys._getframe", "Finds the user's line that an operation comes from", "everything"),
    "lru_cache_wrapper": Name(
        "functools._lru_cache_wrapper", "Guards what a function under lru_cache reads", "tracing steps"
    ),
    "environment_of": Name(
        "_data", "Reads the environment without decoding it", "tracing steps", "os.environ", lambda: os.environ
    ),
    "is_initializing": Name(
        "_initializing",
        "Tells a module that another thread is importing from one that has been imported",
        "nothing but the order at exit, where JAX is being imported while the first loss is computed",
        "importlib.machinery.ModuleSpec",
        lambda: argparse.__spec__,
        otherwise=lambda spec: False,
    ),
    "options_of": Name(
        "_actions",
        "Suggests the option that was meant",
        "the command line",
        "argparse.ArgumentParser",
        argparse.ArgumentParser,
    ),
}


# Flags of a class, as in CPython's object.h.
_ON_HEAP = 1 << 9
_IMMUTABLE = 1 << 8
_MANAGED_DICT = 1 << 4


def is_python_class(cls: type) -> bool:
    """Whether a class statement has made it. Of C's, some are on the heap as well (deque, from Python 3.12 on)."""
    return bool(cls.__flags__ & _ON_HEAP) and not cls.__flags__ & _IMMUTABLE


def has_managed_dict(cls: type) -> bool:
    """Whether Python keeps the `__dict__` of its objects: of those that a class statement has made."""
    return bool(cls.__flags__ & _MANAGED_DICT)


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve(row)
    return found
