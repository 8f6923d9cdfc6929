"""The tensors in a checkpoint's files, read lazily."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ...capture.tensor import file_tensor
from ...errors import CheckpointError
from ...program.graph import FileValue, contiguous_stride
from .file import TensorFile

# Smaller tensors are read at once: waiting would gain nothing, and code that bypasses PyTorch's dispatcher, such as
# `torch.set_rng_state`, finds real memory.
SMALL_BYTES = 1 << 16


class _StoredBox(NamedTuple):
    """A part of a tensor in a file, beginning at `begin`."""

    file: TensorFile
    key: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]


class _StoredTensor(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[_StoredBox]


class Tensors:
    """Tensors by name; `get` returns the same object each time."""

    def __init__(self, files: list[TensorFile]) -> None:
        self._saved: dict[str, _StoredTensor] = {}
        self._made: dict[str, torch.Tensor] = {}
        for file in files:
            for key, entry in file.entries.items():
                about = file.parts.get(key)
                name, shape, begin = about or (key, entry.shape, (0,) * len(entry.shape))
                saved = self._saved.setdefault(name, _StoredTensor(name, entry.dtype, shape, []))
                if (entry.dtype, shape) != (saved.dtype, saved.shape):
                    raise CheckpointError(f"{file.path}: {key} is not a part of {name} in {saved.boxes[0].file.path}")
                saved.boxes.append(_StoredBox(file, key, begin, entry.shape))

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._saved)

    def get(self, name: str) -> torch.Tensor:
        """The tensor with this name; small ones are read now.

        Raises:
            CheckpointError: if the files have no such tensor, or only parts of it.
        """
        tensor = self._made.get(name)
        if tensor is None:
            tensor = self._made[name] = self._make(name)
        return tensor

    def _make(self, name: str) -> torch.Tensor:
        saved = self._saved.get(name)
        if saved is None:
            raise CheckpointError(f"the tensor {name} is not in the checkpoint's files")
        if sum(math.prod(box.shape) for box in saved.boxes) != math.prod(saved.shape):
            raise CheckpointError(f"the files of the checkpoint have only parts of the tensor {name}")
        if _overlap(saved.boxes):
            raise CheckpointError(f"parts of the tensor {name} overlap in the files of the checkpoint")
        if math.prod(saved.shape) * saved.dtype.itemsize <= SMALL_BYTES:
            return _read(saved)
        read = functools.partial(_read, saved)
        label = f"{name} in {saved.boxes[0].file.path}"
        read_box = functools.partial(_read_box, saved)
        return file_tensor(FileValue(saved.shape, contiguous_stride(saved.shape), saved.dtype, read, label, read_box))


def _overlap(boxes: list[_StoredBox]) -> bool:
    """Whether two boxes overlap. It sweeps along the dimension with most cuts, to be fast for thousands of shards."""
    if len(boxes) == 1:
        return False
    along = max(range(len(boxes[0].shape)), key=lambda d: len({box.begin[d] for box in boxes}))
    reached: list[_StoredBox] = []  # the boxes that reach the current one
    for box in sorted(boxes, key=lambda box: box.begin[along]):
        reached = [other for other in reached if other.begin[along] + other.shape[along] > box.begin[along]]
        for other in reached:
            sides = zip(box.begin, box.shape, other.begin, other.shape, strict=True)
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides):
                return True
        reached.append(box)
    return False


def _read(saved: _StoredTensor) -> torch.Tensor:
    if len(saved.boxes) == 1:
        return saved.boxes[0].file.read(saved.boxes[0].key)
    return _read_box(saved, (0,) * len(saved.shape), saved.shape)


def _read_box(saved: _StoredTensor, begin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Read the part of a tensor that begins at `begin`: only the rows that it needs."""
    out = torch.empty(shape, dtype=saved.dtype)
    for box in saved.boxes:
        low = [max(a, b) for a, b in zip(begin, box.begin, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(begin, shape, box.begin, box.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        if not shape:
            return box.file.read(box.key)
        rows = box.file.rows(box.key, low[0] - box.begin[0], high[0] - box.begin[0])
        inside = [slice(a - b, c - b) for a, b, c in zip(low[1:], box.begin[1:], high[1:], strict=True)]
        target = [slice(a - b, c - b) for a, b, c in zip(low, begin, high, strict=True)]
        out[tuple(target)] = rows[(slice(None), *inside)]
    return out
