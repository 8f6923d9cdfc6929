"""The fills of `counter` in C, where a C compiler was when the package was built: some hundred times as fast."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1


@cache
def _library() -> Any:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_counter{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # built for another machine
                return None
            word = ctypes.c_uint64
            for kernel in (library.firstloss_counter_normal, library.firstloss_counter_uniform):
                kernel.argtypes = (
                    ctypes.c_void_p,
                    word,
                    word,
                    word,
                    ctypes.c_int64,
                    ctypes.c_double,
                    ctypes.c_double,
                )
                kernel.restype = None
            return library
    return None


def available() -> bool:
    """Whether there are kernels for this machine."""
    return _library() is not None


def normal(out: NDArray[np.float32], seed: int, draw: int, begin: int, mean: float, std: float) -> None:
    """As `counter.normal`, into `out`. Runs without the interpreter's lock."""
    _library().firstloss_counter_normal(out.ctypes.data, seed & _WORD, draw & _WORD, begin, len(out), mean, std)


def uniform(out: NDArray[np.float32], seed: int, draw: int, begin: int, low: float, end: float) -> None:
    """As `counter.uniform`, into `out`. Runs without the interpreter's lock."""
    _library().firstloss_counter_uniform(out.ctypes.data, seed & _WORD, draw & _WORD, begin, len(out), low, end)
