"""Values that are in a file and are read when they are first needed."""

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

# What has been read is kept while somebody holds it; the last ones longer: engines ask more than once.
ReadBox = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
ReadRange = Callable[[int, torch.Tensor], None]
_recent: deque[torch.Tensor] = deque(maxlen=2)


class FileValue(Value):
    """A constant whose content is in a file: `read` brings it to memory, laid out as the Value is."""

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
        """A row-major one, of which any range is read into memory that is there, by `read_range(begin, out)`."""

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
        if self._read_range is not None and self._weak() is None and shape:
            rows = torch.empty((shape[0], *self.shape[1:]), dtype=self.dtype)
            self._read_range(begin[0] * math.prod(self.shape[1:]), rows.view(-1))
            return rows[(slice(None), *(slice(b, b + n) for b, n in zip(begin[1:], shape[1:], strict=True)))]
        return self.real[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]

    def follow(self, tensor: torch.Tensor) -> None:
        """Be an error from the first edit of `tensor` on, whose memory eager PyTorch would have shared."""
        self._follows = tensor, version_of(tensor)

    def _check(self) -> None:
        if self._follows is not None and version_of(self._follows[0]) != self._follows[1]:
            raise ConstantChangedError(
                f"a checkpoint's tensor of shape {list(self.shape)} ({self.label}) was edited after a parameter had "
                "been made of it in a deferred block. Edit it before, or edit the parameter."
            )

    def read_into(self, begin: int, out: torch.Tensor) -> None:
        """Write elements from number `begin` on, as they lie in memory, into `out`: straight from the file."""
        self._check()
        if self._read_range is None or self._weak() is not None:
            super().read_into(begin, out)
        else:
            self._read_range(begin, out)


def is_in_file(tensor: DeferredTensor) -> bool:
    """Whether the content of `tensor` is still in a file, as it was loaded."""
    return is_pending(tensor) and type(tensor._storage.value) is FileValue


def file_tensor(value: FileValue) -> DeferredTensor:
    """A tensor whose content is `value`: read when somebody uses it."""
    return DeferredTensor.wrap(DeferredStorage(value), value.shape, value.stride, 0, value.dtype)
