"""Memory of tensors on a backend that was exported: by `numpy()`, DLPack or as an address.

A real tensor on it is one more view of the storage whose content is there.
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

Storage = Any  # a DeferredStorage: `tensor.py` knows this file

# The addresses where it begins, in order, and the storage whose content is there.
_begins: list[int] = []
_storages_at: dict[int, weakref.ref[Storage]] = {}


def record_exported_memory(storage: Storage) -> None:
    """The content of `storage` lives in memory that was handed out."""
    begin, _ = storage.resident.extent()
    known = _storages_at.get(begin)
    if known is not None and known() is storage:
        return
    for old in [old for old, ref in _storages_at.items() if ref() is None or ref() is storage]:
        del _storages_at[old]
        _begins.remove(old)
    if begin not in _storages_at:
        bisect.insort(_begins, begin)
    _storages_at[begin] = weakref.ref(storage)


def _record_moves() -> None:
    """Somebody may have had a storage grow, through a real tensor that has it, too: it lies elsewhere then."""
    for begin in list(_begins):
        ref = _storages_at.get(begin)  # none, where an entry before this one has moved there
        storage = None if ref is None else ref()
        if storage is not None and storage.resident is not None and storage.resident.is_exported:
            record_exported_memory(storage)


def storage_at(tensor: torch.Tensor) -> tuple[Storage, Geometry] | None:
    """The storage on a backend whose content lives in the memory of the real `tensor`, and the tensor's geometry in it.

    Raises:
        TraceError: in a step, if that is a part of the tensor's memory only.
    """
    for storage, offset in storages_met_by(tensor):
        if offset is not None:
            if session.trace is not None:
                storage = session.trace.new_memory.now_of(storage)
            return storage, (tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)
        if session.trace is not None:
            raise TraceError(
                f"{here()}: this tensor of shape {list(tensor.shape)} and a weight share a part of their memory, which "
                "a step cannot follow. Use views of the weight in the step, or a clone of the tensor."
            )
    return None


def storages_met_by(tensor: torch.Tensor) -> Iterator[tuple[Storage, int | None]]:
    """The storages on a backend into whose memory the real `tensor` reaches, and its offset, in elements, in each; None
    where it does not lie in that memory as a view of it would."""
    if not _begins or tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return
    if session.trace is not None:
        _record_moves()
    address = tensor.data_ptr()
    behind = address + span(tensor.shape, tensor.stride()) * tensor.itemsize
    for place in range(bisect.bisect_right(_begins, address) - 1, len(_begins)):
        if place < 0 or (storage := _exported_at(_begins[place])) is None:
            continue
        begin, end = storage.resident.extent()
        if begin >= behind:
            return
        if address < end:
            offset, rest = divmod(address - begin, tensor.itemsize)
            yield storage, offset if offset >= 0 and not rest and behind <= end else None


def is_exported(address: int) -> bool:
    """Whether memory of a tensor on the backend that was handed out begins there."""
    return address in _storages_at and _exported_at(address) is not None


def _exported_at(begin: int) -> Storage | None:
    """The storage whose content lives in memory that begins there."""
    storage = _storages_at[begin]()
    if (
        storage is None
        or storage.resident is None
        or not storage.resident.is_exported
        or storage.resident.extent()[0] != begin
    ):
        return None
    return storage
