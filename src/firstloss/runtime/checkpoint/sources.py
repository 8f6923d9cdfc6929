"""The distinct tensors of an object to be saved, and how to read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...capture.evaluation import content
from ...capture.tensor import DeferredTensor, on_backend
from ...errors import UnsavableError
from ...init.disk.savable import check_savable, memory_key
from .file import TensorPart
from .map import map_tensors


class _Owned(NamedTuple):
    owner: int  # index of the process that writes it
    part: TensorPart


class Sources:
    """The tensors to be saved, by name."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}  # by memory and geometry

    def store(self, tensor: torch.Tensor, where: str) -> str:
        """Add a tensor with the path `where`; returns the name under which it is stored.

        Raises:
            UnsavableError: if a safetensors file cannot hold it.
        """
        instead = "Use torch.distributed.checkpoint, or save its full_tensor()."
        check_savable(tensor, where, UnsavableError, instead)
        memory = memory_key(tensor)
        if memory is not None and memory in self._names:
            return self._names[memory]
        name, count = where or "tensor", 1
        # A key "a.b" gives the same name as "b" within "a".
        while name in self._tensors or name == "__metadata__":
            count += 1
            name = f"{where} ({count})"
        self._tensors[name] = tensor
        if memory is not None:
            self._names[memory] = name
        return name

    def whole(self) -> list[TensorPart]:
        """All tensors, unsharded."""
        return [_whole_part(name, tensor) for name, tensor in self._tensors.items()]

    def owned_by(self, index: int) -> list[TensorPart]:
        """The parts that process `index` writes."""
        return [
            part for name, tensor in self._tensors.items() for owner, part in _parts(name, tensor) if owner == index
        ]


def on_host(obj: Any) -> Any:
    """`obj` with ordinary tensors instead of deferred ones; they share the device's memory if possible."""
    return map_tensors(obj, lambda tensor, _: content(tensor) if type(tensor) is DeferredTensor else tensor)


def _whole_part(name: str, tensor: torch.Tensor) -> TensorPart:
    shape = tuple(tensor.shape)
    return TensorPart(name, tensor.dtype, shape, (0,) * len(shape), shape, lambda: _read(tensor))


def _parts(name: str, tensor: torch.Tensor) -> list[_Owned]:
    if on_backend(tensor) and tensor._ref().whole:
        shape = tuple(tensor.shape)
        return [
            _Owned(owned.owner, TensorPart(name, tensor.dtype, shape, owned.begin, owned.shape, owned.read))
            for owned in tensor._storage.resident.owned_parts()
        ]
    return [_Owned(0, _whole_part(name, tensor))]


def _read(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if type(tensor) is not DeferredTensor:
            return tensor.detach().cpu()
        buffer = tensor._storage.resident
        return tensor._ref().view(buffer.read()) if buffer is not None else content(tensor)
