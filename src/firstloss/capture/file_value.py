"""Values that lie in a file, and are read when somebody needs them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ..program.graph import Value
from .tensor import DeferredStorage, DeferredTensor

# What has been read is kept while somebody holds it; the last ones longer: engines ask more than once.
ReadBox = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
_recent: deque[torch.Tensor] = deque(maxlen=2)


class FileValue(Value):
    """A constant whose content is in a file: `read` brings it to memory, laid out as the Value is."""

    __slots__ = ("_read", "_read_box", "_weak", "_lock")

    def __init__(
        self, shape, stride, dtype, read: Callable[[], torch.Tensor], label: str, read_box: ReadBox | None = None
    ) -> None:
        self._read = read
        self._read_box = read_box
        self._weak: Callable[[], torch.Tensor | None] = lambda: None
        self._lock = threading.Lock()
        super().__init__(tuple(shape), tuple(stride), dtype, torch.device("cpu"), label=label)

    @property
    def known(self) -> bool:
        """Whether the content is known without running operations: it is."""
        return True

    @property
    def real(self) -> torch.Tensor:
        """The content. Not to be written."""
        with self._lock:
            tensor = self._weak()
            if tensor is None:
                tensor = self._read()
                self._weak = weakref.ref(tensor)
                _recent.append(tensor)
            return tensor

    @real.setter
    def real(self, tensor: torch.Tensor | None) -> None:
        assert tensor is None  # the file says what it is

    def box(self, begin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A part of the content, which begins at `begin`; the rest is not read, where the file allows it."""
        if self._read_box is not None and self._weak() is None:
            return self._read_box(begin, shape)
        return self.real[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]


def is_in_file(tensor: DeferredTensor) -> bool:
    """Whether the content of `tensor` still lies in a file, as it was loaded."""
    return type(tensor._store.value) is FileValue and tensor._store.resident is None


def file_tensor(value: FileValue) -> DeferredTensor:
    """A tensor whose content is `value`: read when somebody uses it."""
    return DeferredTensor.wrap(DeferredStorage(value), value.shape, value.stride, 0, value.dtype)
