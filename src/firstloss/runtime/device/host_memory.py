"""Memory of a tensor of the backend that code past PyTorch's dispatcher has taken hold of."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import jax
import torch

from ...compat.torch_names import DisableTorchDispatch, storage_use_count
from ...program.graph import Value
from ..jaxlib import to_host
from .lazy import LazyArray, ready

# The references to a storage that are ours: a tensor, and the handle through which we count.
_OWN_HOLDERS = 2


class HostMemory:
    """Memory of the host in which a weight's content lives from step to step.

    It is PyTorch's own, and never XLA's: a step reads it, or a copy, and what it makes of it is written back. So
    whatever a step does to its own memory, whoever holds this looks at memory that is there.

    Attributes:
        lasting: somebody knows it by its address, and cannot be asked whether he still does.
        arriving: what the last step has made of the content, and is not written here yet.
    """

    __slots__ = ("_tensor", "lasting", "arriving", "_direct", "_last")

    def __init__(self, tensor: torch.Tensor, lasting: bool, direct: bool = False) -> None:
        """`direct`: the device's arrays of it are memory that the device owns, row-major."""
        self._tensor = tensor
        self.lasting = lasting
        self.arriving: jax.Array | LazyArray | None = None
        self._direct = direct
        self._last: jax.Array | None = None  # what the last step has made of it

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._tensor.data_ptr()

    def content(self) -> torch.Tensor:
        """The memory; waits for a step under way."""
        if self.arriving is not None:
            array: Any = ready(self.arriving)
            array.block_until_ready()
            if self._direct:
                self._move(self._tensor.data_ptr(), array.unsafe_buffer_pointer())
            else:
                with DisableTorchDispatch(), torch.no_grad():
                    self._tensor.copy_(to_host(array))
            self._last = array if self._direct else None
            self.arriving = None
        return self._tensor

    def on_device(self) -> jax.Array | None:
        """The content in the memory that the last step has left it in, if nobody else has that: asking the system for
        other memory at each step takes longer than all the rest."""
        array, self._last = self._last, None
        if array is None or sys.getrefcount(array) > 2 or array.is_deleted():  # `array`, and the count's own
            return None
        self._move(array.unsafe_buffer_pointer(), self._tensor.data_ptr())
        return array

    def _move(self, to: int, source: int) -> None:
        """All of it, by one thread: PyTorch's copy asks all cores, and waits for them where they have other work (20
        times as long, measured on a busy machine)."""
        ctypes.memmove(to, source, self._tensor.numel() * self._tensor.itemsize)

    def held(self) -> bool:
        """Whether anybody else holds it."""
        return self.lasting or is_held(self._tensor)


def is_held(tensor: torch.Tensor) -> bool:
    """Whether anything but `tensor` holds its memory: another tensor, an array of numpy's, a storage."""
    storage = tensor.untyped_storage()
    return storage_use_count(storage) > _OWN_HOLDERS or sys.getrefcount(storage) > _own_handles()


@functools.cache
def _own_handles() -> int:
    """What Python counts for the handle of a storage that nobody else holds: PyTorch may hold it too."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


class MappedWeights:
    """The files of weights that this process has mapped, looked up once, when first asked for."""

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
    except OSError:  # this system has no such file
        return


def is_countable(tensor: torch.Tensor, mapped: MappedWeights | None = None) -> bool:
    """Whether all who hold the memory of `tensor` hold its storage, so that they can be counted: PyTorch's allocator
    made it, or a checkpoint's file is mapped there. Memory that PyTorch was lent, as numpy's, may have other holders.
    """
    storage = tensor.untyped_storage()
    return storage.resizable() or bool(storage.filename) or storage.data_ptr() in (mapped or MappedWeights())


class ReadOnlyCopy:
    """A copy of a weight whose memory is on another device, or in parts on a mesh; writing to it ends the process, as
    for a file that was mapped to be read: an edit that no step would see is not lost without a word."""

    def __init__(self, value: Value) -> None:
        self._map = mmap.mmap(-1, max(value.nbytes, 1))
        count = value.nbytes // value.dtype.itemsize
        dtype = value.dtype
        flat = torch.frombuffer(self._map, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        self._tensor = flat.as_strided(value.shape, value.stride)

    def showing(self, content: torch.Tensor) -> torch.Tensor:
        """The copy, brought up to date with `content`."""
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
