"""Host memory of tensors on the backend, exported to code that bypasses PyTorch's dispatcher."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...compat.torch_names import DisableTorchDispatch, storage_use_count
from ...program.graph import Value
from .lazy_array import LazyArray, ready

if TYPE_CHECKING:
    import jax

# Our own references to a storage: a tensor, and the handle with which we count.
_OWN_HOLDERS = 2


class HostMemory:
    """Host memory in which a weight's content lives from step to step.

    It is allocated by PyTorch, never by XLA: a step reads it or a copy of it, and its result is written back. So it
    stays valid for all holders, whatever a step does with its own buffers.

    Attributes:
        lasting: whether its address has been given away, so that its users cannot be counted.
        arriving: the last step's result, if it has not been written back yet.
    """

    __slots__ = ("_tensor", "lasting", "arriving", "_direct", "_last")

    def __init__(self, tensor: torch.Tensor, lasting: bool, direct: bool = False) -> None:
        """`direct`: whether the device's arrays are row-major memory on this host."""
        self._tensor = tensor
        self.lasting: bool = lasting
        self.arriving: jax.Array | LazyArray | None = None
        self._direct = direct
        self._last: jax.Array | None = None  # the last step's result

    @property
    def address(self) -> int:
        """The memory's address."""
        return self._tensor.data_ptr()

    def content(self) -> torch.Tensor:
        """The memory, after waiting for and writing back the last step's result."""
        if self.arriving is not None:
            array: Any = ready(self.arriving)
            array.block_until_ready()
            if self._direct:
                self._move(self._tensor.data_ptr(), array.unsafe_buffer_pointer())
            else:
                from ..jax_support import to_host

                with DisableTorchDispatch(), torch.no_grad():
                    self._tensor.copy_(to_host(array))
            self._last = array if self._direct else None
            self.arriving = None
        return self._tensor

    def on_device(self) -> jax.Array | None:
        """The content in the array of the last step's result, if nothing else uses it: allocating new memory at each
        step would take longer than everything else."""
        array, self._last = self._last, None
        if array is None or sys.getrefcount(array) > 2 or array.is_deleted():  # `array`, and getrefcount's argument
            return None
        self._move(array.unsafe_buffer_pointer(), self._tensor.data_ptr())
        return array

    def _move(self, to: int, source: int) -> None:
        """Copy in this thread: PyTorch's copy waits for all cores, which takes 20 times as long on a busy machine."""
        ctypes.memmove(to, source, self._tensor.numel() * self._tensor.itemsize)

    def held(self) -> bool:
        """Whether anything else holds the memory."""
        return self.lasting or has_other_owners(self._tensor)


def has_other_owners(tensor: torch.Tensor) -> bool:
    """Whether anything but `tensor` holds its memory: another tensor, a NumPy array, a storage."""
    storage = tensor.untyped_storage()
    return storage_use_count(storage) > _OWN_HOLDERS or sys.getrefcount(storage) > _own_handles()


@functools.cache
def _own_handles() -> int:
    """The Python reference count of a storage handle that nothing else references; PyTorch may hold one itself."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


class MappedWeights:
    """The address ranges at which this process has mapped weight files; read when first needed."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] | None = None

    def __contains__(self, address: int) -> bool:
        if self._ranges is None:
            self._ranges = list(_mapped_weights())
        return any(begin <= address < end for begin, end in self._ranges)


def _mapped_weights() -> Iterator[tuple[int, int]]:
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                if line.rstrip().endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt")):
                    begin, end = line.split(" ", 1)[0].split("-")
                    yield int(begin, 16), int(end, 16)
    except OSError:  # not on this system
        return


def is_countable(tensor: torch.Tensor, mapped: MappedWeights | None = None) -> bool:
    """Whether all holders of the memory of `tensor` hold its storage, so that they can be counted: PyTorch has
    allocated it, or a checkpoint file is mapped there. Memory that PyTorch borrows, for example from NumPy, may have
    others.
    """
    storage = tensor.untyped_storage()
    return storage.resizable() or bool(storage.filename) or storage.data_ptr() in (mapped or MappedWeights())


class ReadOnlyCopy:
    """A copy of a weight that is on another device or sharded over a mesh. Writing to it ends the process, like writing
    to a file mapped read-only: an edit that no step would see must not be lost silently."""

    def __init__(self, value: Value) -> None:
        self._map = mmap.mmap(-1, max(value.nbytes, 1))
        count = value.nbytes // value.dtype.itemsize
        dtype = value.dtype
        flat = torch.frombuffer(self._map, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        self._tensor = flat.as_strided(value.shape, value.stride)

    def updated(self, content: torch.Tensor) -> torch.Tensor:
        """The copy, after updating it to `content`."""
        with DisableTorchDispatch(), torch.no_grad():
            if not self._tensor.numel():
                return self._tensor
            self._protect(False)
            self._tensor.copy_(content)
            self._protect(True)
        return self._tensor

    def _protect(self, read_only: bool) -> None:
        if sys.platform not in ("linux", "darwin"):
            return
        protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        address = self._tensor.untyped_storage().data_ptr()
        if _libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(self._map)), protection):
            raise OSError(ctypes.get_errno(), "the copy of a weight could not be made read-only")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
