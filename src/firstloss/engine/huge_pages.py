"""Allocate memory on huge pages, which take fewer page faults."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

from ..program.graph import Value

_HUGE = 2 << 20
_MAX_GAP = 1 << 16  # that the C library leaves between consecutive allocations
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate_huge(value: Value) -> torch.Tensor:
    """Like `Value.empty`, on huge pages if the system has them.

    The kernel clears pages when they are first touched; pages of 2 MiB instead of 4 KiB take 512 times fewer faults
    (measured: 1.2 to 7.6 GB/s instead of 0.4 to 4).
    """
    tensor = value.empty()
    if tensor.device.type == "cpu" and value.nbytes >= 2 * _HUGE:
        advise_huge([(tensor.data_ptr(), value.nbytes)])
    return tensor


def advise_huge(ranges: Iterable[tuple[int, int]]) -> None:
    """Request huge pages for untouched memory, given as (address, bytes).

    Adjacent ranges are merged, since each may be smaller than a page.
    """
    begin = end = 0
    for address, size in sorted(ranges):
        if not end <= address <= end + _MAX_GAP:
            _advise(begin, end)
            begin = address
        end = address + size
    _advise(begin, end)


def _advise(begin: int, end: int) -> None:
    """Request huge pages within a range; does nothing on systems without them."""
    if _madvise is None or _MADV_HUGEPAGE is None:
        return
    begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
    if end > begin:
        _madvise(begin, end - begin, _MADV_HUGEPAGE)  # only advice, so errors are ignored
