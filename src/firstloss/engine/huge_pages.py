"""Allocate memory on huge pages where they are faster.

The kernel clears pages when they are first touched; pages of 2 MiB instead of 4 KiB take 512 times fewer faults
(measured: 1.2 to 7.6 GB/s instead of 0.4 to 4). But a virtual machine whose unused memory is returned to its host, in
such blocks, gets it back at its next use, and then huge pages are the slower ones (measured on one machine: 6.4 GB/s
where the host has not taken the memory back, 0.4 where it has, and 2.1 with 4 KiB). Nothing in the system says which
memory is which, so the first page of each range is requested at once, and timed (`_is_fast`).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterable

import torch

from ..program.graph import Value

_HUGE = 2 << 20
_MAX_GAP = 1 << 16  # that the C library leaves between consecutive allocations
_PIECE = 64 << 20  # of a range, whose first page stands for the others
_SLOW_SECONDS = 2e-3  # to clear a huge page: from there on, small ones are as fast at least
_SKIPPED = 256 << 20  # of memory that gets small pages after a slow huge one, before the next is tried
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_MADV_NOHUGEPAGE = getattr(mmap, "MADV_NOHUGEPAGE", None)
_MADV_POPULATE_WRITE = 23  # since Linux 5.14: hands out memory as a write would, and writes nothing
_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate_huge(value: Value) -> torch.Tensor:
    """Like `Value.empty`, on huge pages if the system has them and they are fast."""
    tensor = value.empty()
    if tensor.device.type == "cpu" and value.nbytes >= 2 * _HUGE:
        advise_huge([(tensor.data_ptr(), value.nbytes)])
    return tensor


def advise_huge(ranges: Iterable[tuple[int, int]], piece: int = _PIECE) -> None:
    """Request huge pages for untouched memory, given as (address, bytes), where they are fast.

    Adjacent ranges are merged, since each may be smaller than a page.

    Args:
        piece: how much memory gets pages of one kind.
    """
    begin = end = 0
    for address, size in sorted(ranges):
        if not end <= address <= end + _MAX_GAP:
            _advise(begin, end, piece)
            begin = address
        end = address + size
    _advise(begin, end, piece)


_to_skip = 0  # bytes


def _advise(begin: int, end: int, piece: int) -> None:
    """Request huge pages within a range; does nothing on systems without them."""
    global _to_skip
    if _madvise is None or _MADV_HUGEPAGE is None or _MADV_NOHUGEPAGE is None:
        return
    begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
    for at in range(begin, end, piece):
        size = min(piece, end - at)
        if _to_skip > 0:
            _to_skip -= size
        elif _madvise(at, size, _MADV_HUGEPAGE) != 0 or _is_fast(at):
            continue
        else:
            _to_skip = _SKIPPED
        _madvise(at, size, _MADV_NOHUGEPAGE)  # where the system gives huge pages unasked, too


def _is_fast(address: int) -> bool:
    """Whether the system hands out the huge page at `address` fast. Nothing is written: between two ranges that were
    merged there may be memory of others.

    The thread's processor time is measured, which includes the time that the host of a virtual machine takes, but not
    that of other threads. True where the system cannot hand it out in advance.
    """
    assert _madvise is not None
    began = time.thread_time()
    _madvise(address, _HUGE, _MADV_POPULATE_WRITE)
    return time.thread_time() - began < _SLOW_SECONDS


def first_touch_speeds() -> tuple[float, float]:
    """How fast the system hands out memory in small pages and in huge ones, in bytes per second."""
    return _first_touch(huge=False), _first_touch(huge=True)


def _first_touch(huge: bool) -> float:
    with mmap.mmap(-1, _PIECE + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        begin = -(-ctypes.addressof(view) // _HUGE) * _HUGE
        if huge and _madvise is not None and _MADV_HUGEPAGE is not None:
            _madvise(begin, _PIECE, _MADV_HUGEPAGE)
        began = time.perf_counter()
        ctypes.memset(begin, 0, _PIECE)
        seconds = time.perf_counter() - began
        del view
    return _PIECE / seconds
