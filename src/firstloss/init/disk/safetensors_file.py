"""Lay out and write safetensors files.

Format: https://github.com/huggingface/safetensors#format. The header is its length (8 bytes, little-endian) and JSON,
padded with spaces so that the data begin at a block boundary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch

from .direct_file import BLOCK, DirectFile, aligned
from .layout import Extent, layout

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorMeta(NamedTuple):
    """The name, dtype, shape and size of a tensor."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    nbytes: int


class FileLayout:
    """The offsets of the tensors in one file.

    Attributes:
        extents: of the tensors in the data, which follow the header; `which` is the index in `tensors`.
        size: of the data in bytes.
    """

    def __init__(self, tensors: Sequence[TensorMeta], block: int = 1) -> None:
        """
        Args:
            block: as in `layout.layout`.
        """
        self._tensors = tensors
        self.extents: list[Extent] = layout([t.nbytes for t in tensors], [t.dtype.itemsize for t in tensors], block)
        self.size: int = self.extents[-1].end if self.extents else 0

    def head(self, metadata: Mapping[str, str]) -> bytes:
        """The header, whose length is a multiple of BLOCK."""
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        for which, begin, end in self.extents:
            name, dtype, shape, _ = self._tensors[which]
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % BLOCK)
        return len(text).to_bytes(8, "little") + text

    @contextmanager
    def written(self, path: str, head: Callable[[], bytes]) -> Iterator[DirectFile]:
        """Open the file at `path` for the block to write the data; then write `head()` and sync the file to disk.

        An existing file is not truncated first: data that the block does not write remain.
        """
        with closing(DirectFile(path)) as out:
            yield out
            text = head()
            memory = aligned(len(text))
            memory.numpy()[:] = memoryview(text)
            out.write(memory, 0)
            out.end_at(len(text) + self.size)
