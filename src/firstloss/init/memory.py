"""Fresh memory that is quick to touch for the first time."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from ..capture.program import Value
from ..capture.replay import allocate

_HUGE = 2 << 20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate_huge(value: Value) -> torch.Tensor:
    """As `allocate`, asking the system for huge pages where it has them.

    The kernel clears memory page by page when it is first touched; with pages of 2 MiB instead of 4 KiB that takes
    512 times fewer faults (measured: 1.2 to 7.6 GB/s instead of 0.4 to 4).
    """
    tensor = allocate(value)
    if tensor.device.type == "cpu" and value.nbytes >= 2 * _HUGE:
        advise_huge(tensor.data_ptr(), value.nbytes)
    return tensor


def advise_huge(address: int, nbytes: int) -> None:
    """Ask for huge pages in the whole huge pages of a range; where the system has none, nothing happens."""
    if _madvise is None or _MADV_HUGEPAGE is None:
        return
    begin = -(-address // _HUGE) * _HUGE
    end = (address + nbytes) // _HUGE * _HUGE
    if end > begin:
        _madvise(begin, end - begin, _MADV_HUGEPAGE)  # advice: an error changes nothing
