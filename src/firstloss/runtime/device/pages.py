"""Memory in mappings of its own, whose pages can be moved into an XLA array without a copy.

XLA can be lent memory, but it takes only what it has allocated itself as a donation, and copies the rest. So weights
that are drawn before JAX has been imported cannot simply be handed over. But what an array is made of can be exchanged
beneath its address: Linux moves the pages of one mapping to another by entries in the page table (`mremap`), 4 GB in a
tenth of a second.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref

import torch

from ... import c_library
from ...engine.huge_pages import advise_huge
from ...program.graph import contiguous_stride

_HUGE = 2 << 20
# The least that is worth a mapping of its own: larger arrays the C library maps by themselves (`heap.map_arrays`).
LEAST_BYTES = 4 << 20
# Where malloc puts an array of XLA's in a mapping of its own: behind its header, at the next multiple of 64 bytes.
# Elsewhere pages cannot be moved, and the array is copied.
_OFFSET = 64
# Each move leaves three mappings, and Linux allows a process 65,530.
_MOST = 8192


class Mapping(ctypes.Structure):
    """As in _pages.c."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_POINTER = ctypes.POINTER(Mapping)
_library = c_library.load(
    __file__,
    "_pages",
    {
        "firstloss_map": (ctypes.c_int, (_POINTER, ctypes.c_size_t)),
        "firstloss_unmap": (None, (_POINTER,)),
        "firstloss_move": (ctypes.c_int, (_POINTER, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
    },
)
_moved = 0


def are_available() -> bool:
    """Whether this system can move pages, and the library that does was built."""
    return sys.platform == "linux" and _library is not None


class Pages:
    """Zeros in huge pages, unmapped when the last tensor of them is gone.

    Attributes:
        tensor: the memory, row-major.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """
        Raises:
            MemoryError: if there is none.
        """
        assert _library is not None
        size = math.prod(shape) * dtype.itemsize
        self._mapping = Mapping()
        if _library.firstloss_map(self._mapping, size + 2 * _HUGE):
            raise MemoryError(f"there are no {size / 2**30:.1f} GiB of memory for a weight of shape {list(shape)}.")
        begin = -(-self._mapping.address // _HUGE) * _HUGE + _OFFSET
        advise_huge([(begin - _OFFSET, -(-(size + _OFFSET) // _HUGE) * _HUGE)])
        memory = (ctypes.c_char * size).from_address(begin)
        # It unmaps what is there by then: after a move, nothing.
        weakref.finalize(memory, _library.firstloss_unmap, self._mapping).atexit = False
        storage = torch.frombuffer(memory, dtype=dtype).untyped_storage()
        # And no view, which would hold another tensor: who holds the memory is counted.
        self.tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, contiguous_stride(shape))

    @property
    def moved(self) -> bool:
        """Whether its pages are elsewhere."""
        return not self._mapping.address

    def move(self, to: torch.Tensor) -> bool:
        """Put the pages in place of those of `to`, of the same size. Returns whether that was possible; if so,
        there is nothing at `tensor` any more, so that nobody may hold it.

        Raises:
            MemoryError: if the system has no memory for its page tables, so that there is nothing at `to` either.
        """
        global _moved
        if _moved >= _MOST:
            return False
        assert _library is not None
        size = self.tensor.numel() * self.tensor.itemsize
        result = _library.firstloss_move(self._mapping, self.tensor.data_ptr(), to.data_ptr(), size)
        if result == 2:
            raise MemoryError("the system has no memory left for the mappings of a weight.")
        _moved += result == 0
        return result == 0
