"""Values in files, which are read lazily."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ..compat.torch_names import version_of
from ..errors import ConstantChangedError
from ..program.graph import Value
from .tensor import DeferredStorage, DeferredTensor, is_pending

ReadBox = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
ReadRange = Callable[[int, torch.Tensor], None]
_recent: deque[torch.Tensor] = deque(maxlen=2)  # keeps the last contents alive, since engines read them repeatedly


class FileValue(Value):
    """A constant in a file: `read` returns its content, with the Value's layout."""

    __slots__ = ("_read", "_read_box", "_read_range", "_follows", "_weak", "_lock")

    def __init__(
        self, shape, stride, dtype, read: Callable[[], torch.Tensor], label: str, read_box: ReadBox | None = None
    ) -> None:
        self._read = read
        self._read_box = read_box
        self._read_range: ReadRange | None = None
        self._follows: tuple[torch.Tensor, int] | None = None
        self._weak: Callable[[], torch.Tensor | None] = lambda: None
        self._lock = threading.Lock()
        super().__init__(tuple(shape), tuple(stride), dtype, torch.device("cpu"), label=label)

    @classmethod
    def read_by_range(cls, shape, stride, dtype, read_range: ReadRange, label: str) -> FileValue:
        """A contiguous FileValue of which `read_range(begin, out)` reads any range into existing memory."""

        def read() -> torch.Tensor:
            self._check()
            out = torch.empty(shape, dtype=dtype)
            read_range(0, out.view(-1))
            return out

        self = cls(shape, stride, dtype, read, label)
        self._read_range = read_range
        return self

    @property
    def known(self) -> bool:
        """Always True."""
        return True

    @property
    def real(self) -> torch.Tensor:
        """The content; must not be modified."""
        with self._lock:
            tensor = self._weak()
            if tensor is None:
                tensor = self._read()
                self._weak = weakref.ref(tensor)
                _recent.append(tensor)
            return tensor

    @real.setter
    def real(self, tensor: torch.Tensor | None) -> None:
        assert tensor is None  # the base class initializes it

    def box(self, begin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A part of the content; the rest is not read if possible."""
        if self._read_box is not None and self._weak() is None:
            return self._read_box(begin, shape)
        if self._read_range is not None and self._weak() is None and shape:
            rows = torch.empty((shape[0], *self.shape[1:]), dtype=self.dtype)
            self._read_range(begin[0] * math.prod(self.shape[1:]), rows.view(-1))
            return rows[(slice(None), *(slice(b, b + n) for b, n in zip(begin[1:], shape[1:], strict=True)))]
        return self.real[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]

    def follow(self, tensor: torch.Tensor) -> None:
        """Raise an error on reads after `tensor`, whose memory eager PyTorch would share, has been edited."""
        self._follows = tensor, version_of(tensor)

    def _check(self) -> None:
        if self._follows is not None and version_of(self._follows[0]) != self._follows[1]:
            raise ConstantChangedError(
                f"a checkpoint's tensor of shape {list(self.shape)} ({self.label}) was edited after a parameter had "
                "been created from it in a deferred block. Edit it before, or edit the parameter."
            )

    def read_into(self, begin: int, out: torch.Tensor) -> None:
        """As `Value.read_into`, directly from the file."""
        self._check()
        if self._read_range is None or self._weak() is not None:
            super().read_into(begin, out)
        else:
            self._read_range(begin, out)


def is_in_file(tensor: DeferredTensor) -> bool:
    """Whether the content of `tensor` is in a file, unmodified."""
    return is_pending(tensor) and type(tensor._storage.value) is FileValue


def file_tensor(value: FileValue) -> DeferredTensor:
    """A deferred tensor with the content `value`."""
    return DeferredTensor.wrap(DeferredStorage(value), value.shape, value.stride, 0, value.dtype)
