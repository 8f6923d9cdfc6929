"""Tensors in memory-mapped files, as created by safetensors and `torch.load(..., mmap=True)`.

Such a tensor is not read until it is accessed. Capture neither copies nor accesses it: `/proc/self/maps` says which
range of which file it maps, and that range is read later, piece by piece, directly to the weight's memory. So loading a
checkpoint makes no copy of it, and a rank of a sharded model reads only its own rows.

A page of a private mapping that has been written to no longer has the file's content; `/proc/self/pagemap` says which.
If the kernel does not provide these files, the tensor is treated like any other.
"""

from __future__ import annotations

import bisect
import functools
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import torch

from ..compat.torch_names import DisableTorchDispatch
from ..errors import ConstantChangedError
from ..program.graph import FileValue, is_contiguous
from ..program.source import here
from . import session
from .tensor import DeferredStorage, DeferredTensor, Hooks

_MIN_BYTES = 1 << 16  # smaller tensors are copied, which is faster than looking up the mapping

# A page's 64 bits in /proc/self/pagemap: https://docs.kernel.org/admin-guide/mm/pagemap.html
_PRESENT, _SWAPPED, _FILE_OR_SHARED = (np.uint64(1 << bit) for bit in (63, 62, 61))


class _Mapping(NamedTuple):
    begin: int
    end: int
    offset: int  # in the file, of `begin`
    path: str
    inode: int


class _OpenFile:
    """A file, open as long as deferred tensors refer to it, so that it can be read after it was deleted or replaced."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self.descriptor)
        self.stamp = _stamp(os.fstat(self.descriptor))


class _FileRange(NamedTuple):
    """The location of a tensor's content in a file, and the file's stamp when the tensor was captured."""

    file: _OpenFile
    offset: int
    where: str  # the user's line


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a real tensor may map a file: it is large, and torch did not allocate its memory. A quick check."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.layout != torch.strided or tensor.numel() * tensor.itemsize < _MIN_BYTES or tensor.is_inference():
        return False
    return not tensor.untyped_storage().resizable()


def in_file(tensor: torch.Tensor) -> FileValue | None:
    """The content of a real tensor as a Value that is read from the file that it maps; None if it maps none."""
    if not is_mapped(tensor) or not is_contiguous(tensor.shape, tensor.stride()) or tensor.is_conj() or tensor.is_neg():
        return None
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    mapping = _mapping_of(address, nbytes)
    if mapping is None or not _is_unmodified(address, nbytes):
        return None
    file = _open_file(mapping)
    if file is None:
        return None
    location = _FileRange(file, address - mapping.begin + mapping.offset, str(here()))
    label = f"bytes from {location.offset:,} on in {mapping.path}"
    read = functools.partial(_read, location, tensor.dtype)
    value = FileValue.read_by_range(tuple(tensor.shape), tensor.stride(), tensor.dtype, read, label)
    value.origin = (mapping.path, *file.stamp[2:], location.offset)  # as other hosts see a shared file
    return value


_open_files: weakref.WeakValueDictionary[tuple[str, tuple[int, ...]], _OpenFile] = weakref.WeakValueDictionary()


def _open_file(mapping: _Mapping) -> _OpenFile | None:
    """The file of a mapping, opened; None if another file takes its location, or if it cannot be opened."""
    try:
        stat = os.stat(mapping.path)
        if stat.st_ino != mapping.inode:
            return None
        key = mapping.path, _stamp(stat)
        file = _open_files.get(key)
        if file is None:
            file = _open_files[key] = _OpenFile(mapping.path)
    except OSError:  # deleted, or too many files are open
        return None
    return file if file.stamp == key[1] else None


def deferred_file_tensor(tensor: torch.Tensor) -> DeferredTensor | None:
    """A deferred tensor for a parameter that is created from a tensor of a mapped file; None for other tensors.

    Parameters created from the same tensor share storage. If tensors overlap in another way, they stay real.
    """
    if not is_mapped(tensor):
        return None
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize
    for other, storage in session.deferred_file_tensors.values():
        first, last = other.data_ptr(), other.data_ptr() + other.numel() * other.itemsize
        if (first, last, other.dtype) == (begin, end, tensor.dtype):
            return DeferredTensor.wrap(storage, tuple(tensor.shape), tensor.stride(), 0, tensor.dtype)
        if first < end and begin < last:
            return None
    value = in_file(tensor)
    if value is None:
        return None
    value.follow(tensor)
    with torch.no_grad():
        in_file_tensor = DeferredTensor.wrap(DeferredStorage(value), value.shape, value.stride, 0, value.dtype)
        parameter: DeferredTensor = Hooks.dispatch(torch.ops.aten.clone.default, (in_file_tensor,), {})
    session.deferred_file_tensors[begin] = tensor, parameter._storage
    return parameter


_cached_mappings: list[_Mapping] = []


def _mapping_of(address: int, nbytes: int) -> _Mapping | None:
    """The private file mapping that contains a range of memory."""
    for reread in (False, True):
        if reread or not _cached_mappings:
            _cached_mappings[:] = _mappings()
        location = bisect.bisect_right([m.begin for m in _cached_mappings], address) - 1
        if (
            location >= 0
            and _cached_mappings[location].begin <= address
            and address + nbytes <= _cached_mappings[location].end
        ):
            if reread or _cached_mappings[location] in _mappings_at(_cached_mappings[location]):
                return _cached_mappings[location]
    return None


def _mappings_at(mapping: _Mapping) -> list[_Mapping]:
    """`mapping`, if it still exists; else all current mappings, since its addresses may have been reused."""
    name = f"/proc/self/map_files/{mapping.begin:x}-{mapping.end:x}"
    try:
        target = os.readlink(name)
    except OSError:  # no permission, or gone
        return _mappings()
    return [mapping] if target == mapping.path else []


def _mappings() -> list[_Mapping]:
    mappings = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                addresses, access, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
                if access.startswith("r") and access.endswith("p") and path and path[0].startswith("/"):
                    begin, end = (int(a, 16) for a in addresses.split("-"))
                    mappings.append(_Mapping(begin, end, int(offset, 16), path[0], int(inode)))
    except OSError:
        pass
    return sorted(mappings)


def _is_unmodified(address: int, nbytes: int) -> bool:
    """Whether these pages of a private mapping have not been written to."""
    page = mmap.PAGESIZE
    first, last = address // page, (address + nbytes - 1) // page
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pages = np.frombuffer(os.pread(pagemap.fileno(), 8 * (last - first + 1), 8 * first), np.uint64)
    except OSError:
        return False
    if len(pages) != last - first + 1:
        return False
    private = ((pages & _PRESENT) != 0) & ((pages & _FILE_OR_SHARED) == 0)
    return not bool((private | ((pages & _SWAPPED) != 0)).any())


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(location: _FileRange, dtype: torch.dtype, begin: int, out: torch.Tensor) -> None:
    """Read elements from index `begin` on into `out`, one-dimensional."""
    file = location.file
    with DisableTorchDispatch():
        if _stamp(os.fstat(file.descriptor)) != file.stamp:
            raise ConstantChangedError(
                f"{location.where}: {file.path} has been written to since a deferred model loaded it, so its content "
                "at that time is lost. Load it again, or call firstloss.materialize_module before it is written to."
            )
        view = memoryview(out.view(torch.uint8).numpy())
        offset = location.offset + begin * dtype.itemsize
        while view:
            count = os.preadv(file.descriptor, [view], offset)
            if not count:
                raise ConstantChangedError(f"{location.where}: {file.path} has been truncated since it was loaded.")
            view, offset = view[count:], offset + count
