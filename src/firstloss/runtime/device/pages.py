"""Memory in separate mappings, whose pages can be moved into an XLA array without a copy.

XLA can borrow memory, but accepts as a donation only what it has allocated itself, and copies the rest. So weights
drawn before JAX is imported cannot simply be handed over. But the pages of an array can be exchanged without changing
its address: Linux moves the pages of one mapping to another by editing the page table (`mremap`), 4 GB in a tenth of a
second.
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
# Arrays of at least this size get memory that the device owns from the start: only such memory can be donated, and a
# donated step updates it in place. For smaller ones allocating it takes longer than copying them.
OWNED_BYTES = 1 << 16
# The smallest size worth a separate mapping: the C library also maps arrays from this size on (`malloc_settings`).
LEAST_BYTES = 4 << 20
# The offset of an XLA array in malloc's mapping: behind the header, at the next multiple of 64 bytes. At any other
# offset pages cannot be moved, and the array is copied.
_OFFSET = 64
# Each move leaves three mappings, and Linux allows a process 65,530.
_MAX_MOVES = 8192


class Mapping(ctypes.Structure):
    """Like `struct mapping` in _pages.c."""

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


# Whether this system can move pages, and the C library is built.
ARE_AVAILABLE = sys.platform == "linux" and _library is not None


class Pages:
    """Zero-initialized huge pages, unmapped when the last tensor of them is gone.

    Attributes:
        tensor: the memory, row-major.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """
        Raises:
            MemoryError: if the mapping fails.
        """
        assert _library is not None
        size = math.prod(shape) * dtype.itemsize
        self._mapping = Mapping()
        if _library.firstloss_map(self._mapping, size + 2 * _HUGE):
            raise MemoryError(f"cannot allocate {size / 2**30:.1f} GiB of memory for a weight of shape {list(shape)}.")
        begin = -(-self._mapping.address // _HUGE) * _HUGE + _OFFSET
        length = -(-(size + _OFFSET) // _HUGE) * _HUGE
        advise_huge([(begin - _OFFSET, length)], piece=length)  # pages of two kinds could not be moved at once
        memory = (ctypes.c_char * size).from_address(begin)
        # After a move, the mapping is empty.
        weakref.finalize(memory, _library.firstloss_unmap, self._mapping).atexit = False
        storage = torch.frombuffer(memory, dtype=dtype).untyped_storage()
        # Not a view, which would hold another tensor: the owners of the memory are counted.
        self.tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, contiguous_stride(shape))

    @property
    def moved(self) -> bool:
        """Whether the pages have been moved away."""
        return not self._mapping.address

    def move(self, to: torch.Tensor) -> bool:
        """Move the pages beneath `to`, of the same size. Returns whether that was possible; if so, there is nothing at
        `tensor` any more, so that nobody may hold it.

        Raises:
            MemoryError: if the system has no memory for page tables, so that `to` is unmapped too.
        """
        global _moved
        if _moved >= _MAX_MOVES:
            return False
        assert _library is not None
        size = self.tensor.numel() * self.tensor.itemsize
        result = _library.firstloss_move(self._mapping, self.tensor.data_ptr(), to.data_ptr(), size)
        if result == 2:
            raise MemoryError("the system has no memory left for the page tables of a weight.")
        _moved += result == 0
        return result == 0
