"""The inner loops of `jump` in C, where the package was built with a C compiler: five times as fast."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstloss import c_library
from firstloss.rng.mt19937 import N, Words

_own = threading.local()


def _scratch(size: int) -> Words:
    """This thread's memory for a table: a fresh megabyte would cost more to touch than to fill."""
    if not hasattr(_own, "table") or len(_own.table) < size:
        _own.table = np.empty(size, np.uint32)
    return _own.table


_ADDRESS = ctypes.c_void_p
_TYPES = (None, (_ADDRESS, _ADDRESS, ctypes.c_int64, ctypes.c_int, _ADDRESS, _ADDRESS))


@cache
def _kernel() -> Any:
    library = c_library.load(__file__, "_jump", {"firstloss_jump": _TYPES})
    return None if library is None else library.firstloss_jump


def available() -> bool:
    """Whether there is a kernel for this machine."""
    return _kernel() is not None


def jump(window: Words, offsets: NDArray[np.intp], group: int, table_size: int) -> Words:
    """The window that the rows at `offsets` of the table of combinations of `window` sum to.

    Runs without the interpreter's lock. `group` is the number of powers of Y in a group, `table_size` the table's
    words: see `jump.py`.
    """
    window = np.ascontiguousarray(window, np.uint32)
    rows = np.ascontiguousarray(offsets, np.int64)
    table = _scratch(table_size)
    result = np.empty(N, np.uint32)
    _kernel()(window.ctypes.data, rows.ctypes.data, len(rows), group, table.ctypes.data, result.ctypes.data)
    return result
