"""`Memories`: what is known of memory, found by any tensor in it."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from ..compat.torch_names import StorageWeakRef, storage_address


class Known(Protocol):
    """What is known of a storage.

    Attributes:
        storage: refers to the storage, which also keeps its address from being used again.
    """

    @property
    def storage(self) -> StorageWeakRef: ...


K = TypeVar("K", bound=Known)

_FEW = 1000  # until there are more, what is gone is kept


class Memories(dict[int, K]):
    """What is known of memory, by the addresses of storages; of memory that is gone it is forgotten now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._most = _FEW

    def of(self, tensor: torch.Tensor) -> K | None:
        """What is known of a tensor's memory."""
        return self.get(address(tensor)) if self and has_memory(tensor) else None

    def put(self, tensor: torch.Tensor, known: K) -> None:
        """Note what is known of a tensor's memory."""
        self[address(tensor)] = known
        if len(self) > self._most:
            self.forget()
            self._most = max(_FEW, 2 * len(self))

    def forget(self) -> None:
        """Forget memory that is gone."""
        for key in [key for key, known in self.items() if known.storage.expired()]:
            del self[key]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an array in memory."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def address(tensor: torch.Tensor) -> int:
    """The address by which a tensor's storage is known."""
    return storage_address(tensor.untyped_storage())
