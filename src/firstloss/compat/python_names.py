"""Private names of Python's standard library that Firstloss uses, each with the reason.

What guards know about bytecode, the versions of dicts and the tables of sets is in `bytecode.py`, `_guards.c` and
`set_tables.py` in `runtime/guards/`.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

from .names import Name, resolve

# The versions of Python on which the tests have been run.
TESTED = ("3.11", "3.12", "3.13")

NAMES = {
    "getframe": Name("sys._getframe", "Finds the user's line that an operation comes from", "everything"),
    "frames_of_threads": Name(
        "sys._current_frames", "Finds out whether other threads wait", "the speed of steps that are not compiled"
    ),
    "lru_cache_wrapper": Name(
        "functools._lru_cache_wrapper", "Guards what a function under lru_cache reads", "tracing steps"
    ),
    "environment_of": Name(
        "_data", "Reads the environment without decoding it", "tracing steps", "os.environ", lambda: os.environ
    ),
    "get_handler": Name(
        "_signal.getsignal",
        "Asks for signals' handlers without making enumerations, in a thirtieth of the time: a step does",
        "nothing: the public function takes its place",
        otherwise=signal.getsignal,
    ),
    "set_handler": Name("_signal.signal", "As above", "nothing, likewise", otherwise=signal.signal),
    "is_initializing": Name(
        "_initializing",
        "Detects a module that another thread is still importing",
        "nothing but the order at exit while JAX is being imported",
        "importlib.machinery.ModuleSpec",
        lambda: argparse.__spec__,
        otherwise=lambda spec: False,
    ),
    "options_of": Name(
        "_actions",
        "Suggests the intended option",
        "the command line",
        "argparse.ArgumentParser",
        argparse.ArgumentParser,
    ),
}


get_handler: Callable[[int], Any]  # annotated: mypy does not find `__getattr__` below callable in `interpreter`
set_handler: Callable[[int, Any], Any]

# Type flags, as in CPython's object.h.
_ON_HEAP = 1 << 9
_IMMUTABLE = 1 << 8
_MANAGED_DICT = 1 << 4


def is_python_class(cls: type) -> bool:
    """Whether a class was made by a class statement. C classes may be heap types as well (since 3.12, deque)."""
    return bool(cls.__flags__ & _ON_HEAP) and not cls.__flags__ & _IMMUTABLE


def has_managed_dict(cls: type) -> bool:
    """Whether Python manages the `__dict__` of a class's instances, as it does for class statements."""
    return bool(cls.__flags__ & _MANAGED_DICT)


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve(row)
    return value
