"""Memory of tensors on a backend that was exported: by `numpy()`, DLPack or as an address.

A real tensor in that memory is treated as another view of the storage.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import TraceError
from ..program.graph import Geometry, span
from ..program.source import here
from . import session

Storage = Any  # a DeferredStorage; `tensor.py` imports this module

# The sorted addresses of exported memory, and the storages.
begins: list[int] = []
_storages_at: dict[int, weakref.ref[Storage]] = {}


def record_exported_memory(storage: Storage) -> None:
    """Record that the memory of `storage` has been exported."""
    begin, _ = storage.resident.extent()
    storage_there = _storages_at.get(begin)
    if storage_there is not None and storage_there() is storage:
        return
    for old in [old for old, ref in _storages_at.items() if ref() is None or ref() is storage]:
        del _storages_at[old]
        begins.remove(old)
    if begin not in _storages_at:
        bisect.insort(begins, begin)
    _storages_at[begin] = weakref.ref(storage)


def _record_moves() -> None:
    """Update addresses, since a storage may have been resized through a real tensor that shares it."""
    for begin in list(begins):
        ref = _storages_at.get(begin)  # None if an earlier entry has moved there
        storage = None if ref is None else ref()
        if storage is not None and storage.resident is not None and storage.resident.is_exported:
            record_exported_memory(storage)


def storage_at(tensor: torch.Tensor) -> tuple[Storage, Geometry] | None:
    """The storage on a backend that the real `tensor` shares memory with, and the tensor's geometry in it.

    Raises:
        TraceError: in a step, if they share only a part of the tensor's memory.
    """
    for storage, offset in overlapping_storages(tensor):
        if offset is not None:
            if session.trace is not None:
                storage = session.trace.new_memory.current_storage(storage)
            return storage, (tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)
        if session.trace is not None:
            raise TraceError(
                f"{here()}: this tensor of shape {list(tensor.shape)} and a weight partly overlap in memory, which a "
                "step does not support. Use views of the weight in the step, or a clone of the tensor."
            )
    return None


def overlapping_storages(tensor: torch.Tensor) -> Iterator[tuple[Storage, int | None]]:
    """The storages on a backend that overlap the real `tensor` in memory.

    Yields:
        Each storage, with the offset of `tensor` in elements; None if it is not a view of the storage.
    """
    if not begins or tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return
    if session.trace is not None:
        _record_moves()
    address = tensor.data_ptr()
    behind = address + span(tensor.shape, tensor.stride()) * tensor.itemsize
    for index in range(bisect.bisect_right(begins, address) - 1, len(begins)):
        if index < 0 or (storage := _exported_at(begins[index])) is None:
            continue
        begin, end = storage.resident.extent()
        if begin >= behind:
            return
        if address < end:
            offset, rest = divmod(address - begin, tensor.itemsize)
            yield storage, offset if offset >= 0 and not rest and behind <= end else None


def is_exported(address: int) -> bool:
    """Whether exported memory begins at `address`."""
    return address in _storages_at and _exported_at(address) is not None


def _exported_at(begin: int) -> Storage | None:
    """The storage whose exported memory begins at `begin`, if it still does."""
    storage = _storages_at[begin]()
    if (
        storage is None
        or storage.resident is None
        or not storage.resident.is_exported
        or storage.resident.extent()[0] != begin
    ):
        return None
    return storage
