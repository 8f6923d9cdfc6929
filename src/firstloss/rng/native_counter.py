"""The fills of `counter` in C, where the package was built with a C compiler: about a hundred times as fast."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstloss import c_library

_WORD = (1 << 64) - 1


_COUNT, _DOUBLE = ctypes.c_int64, ctypes.c_double
_FILL = (None, (ctypes.c_void_p, *[ctypes.c_uint64] * 3, _COUNT, _DOUBLE, _DOUBLE))


@cache
def _library() -> Any:
    kernels = {"firstloss_counter_normal": _FILL, "firstloss_counter_uniform": _FILL}
    return c_library.load(__file__, "_counter", kernels)


def available() -> bool:
    """Whether there are kernels for this machine."""
    return _library() is not None


def normal(out: NDArray[np.float32], seed: int, draw: int, begin: int, mean: float, std: float) -> None:
    """As `counter.normal`, into `out`. Runs without the interpreter's lock."""
    _library().firstloss_counter_normal(out.ctypes.data, seed & _WORD, draw & _WORD, begin, len(out), mean, std)


def uniform(out: NDArray[np.float32], seed: int, draw: int, begin: int, low: float, end: float) -> None:
    """As `counter.uniform`, into `out`. Runs without the interpreter's lock."""
    _library().firstloss_counter_uniform(out.ctypes.data, seed & _WORD, draw & _WORD, begin, len(out), low, end)
