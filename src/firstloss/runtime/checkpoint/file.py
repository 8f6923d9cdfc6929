"""Files of a checkpoint: safetensors with checksums.

They are ordinary safetensors files (https://github.com/huggingface/safetensors#format) that other libraries can read.
The metadata has, under `firstloss.crc32`, the CRC-32 of every `PIECE` bytes of each tensor; under `firstloss.head`,
that of the header (computed with zeros in its place); and under `firstloss.parts`, for entries that are shards of a
tensor, the tensor's name and the shard's offsets.

Files are not read through `safetensors.safe_open` or `torch.load(mmap=True)`, which map them. Loading 256 MiB into
fresh memory takes all three the same time; into existing memory, the maps take twice as long (measured on 2 cores). If
a mapped file is truncated or its disk fails, the process dies of SIGBUS, whereas this reader raises an error that names
the tensor. And neither of them verifies checksums.
"""

from __future__ import annotations

import json
import math
import os
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...init.disk.direct_file import BLOCK, DirectFile, aligned
from ...init.disk.safetensors_file import DTYPES, FileLayout, TensorMeta
from ...workers import Task, Workers
from .untrusted import damage_as_errors, of_type, parse, product, sizes

PIECE = 16 << 20  # bytes under one checksum; a multiple of BLOCK
_BUFFER = 8 << 20  # bytes written at a time; a multiple of BLOCK
_CRC, _PARTS, _HEAD = "firstloss.crc32", "firstloss.parts", "firstloss.head"
_NO_SUM = "0" * 8  # placeholder for the header's checksum while it is computed
RESERVED = ("__metadata__", "format", _CRC, _PARTS, _HEAD)  # metadata keys with a special meaning
_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_MAX_HEADER = 1 << 30


class TensorPart(NamedTuple):
    """An entry to be written: a whole tensor, or its shard that begins at `begin`."""

    tensor: str
    dtype: torch.dtype
    whole: tuple[int, ...]  # shape of the tensor
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]  # the content, on the host

    @property
    def key(self) -> str:
        """The entry's name in the file."""
        if self.shape == self.whole:
            return self.tensor
        return self.tensor + str([f"{b}:{b + n}" for b, n in zip(self.begin, self.shape, strict=True)]).replace("'", "")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: str, parts: list[TensorPart], metadata: dict[str, str] | None = None) -> None:
    """Write `parts` to `path`, reading them one after another; synced to disk on return."""
    layout = FileLayout([TensorMeta(part.key, part.dtype, part.shape, part.nbytes) for part in parts])
    sums = {p.key: "0" * 8 * -(-p.nbytes // PIECE) for p in parts}  # of the final length
    about = {p.key: {"of": p.tensor, "shape": p.whole, "begin": p.begin} for p in parts if p.shape != p.whole}

    def head() -> bytes:
        header = {_HEAD: _NO_SUM, "format": "pt", **(metadata or {}), _CRC: json.dumps(sums), _PARTS: json.dumps(about)}
        text = layout.head(header)
        return text.replace(_head_mark(_NO_SUM), _head_mark(f"{zlib.crc32(text):08x}"), 1)

    begin = len(head())
    with layout.written(path, head) as out, Workers(1, "firstloss-checkpoint") as workers:
        stream = _BufferedWriter(out, begin, workers)
        for which, _, _ in layout.extents:
            sums[parts[which].key] = _write_part(parts[which], stream)
        stream.close()


def _head_mark(value: str) -> bytes:
    return f'"{_HEAD}":"{value}"'.encode()


def _write_part(part: TensorPart, stream: _BufferedWriter) -> str:
    """Write a part and return its checksums."""
    if not part.nbytes:
        return ""
    data = raw_bytes(part.read())
    sums = []
    for begin in range(0, part.nbytes, PIECE):
        piece = data[begin : begin + PIECE]
        sums.append(f"{zlib.crc32(memoryview(piece.numpy())):08x}")
        stream.put(piece)
    return "".join(sums)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a host tensor in row-major order, as a flat uint8 tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


class _BufferedWriter:
    """Writes to a file with double buffering: one buffer is filled while the other is written."""

    def __init__(self, out: DirectFile, offset: int, workers: Workers) -> None:
        self._out, self._offset, self._workers = out, offset, workers
        self._buffers = [aligned(_BUFFER), aligned(_BUFFER)]
        self._filled = 0
        self._writing: Task[None] | None = None

    def put(self, data: torch.Tensor) -> None:
        while data.numel():
            count = min(_BUFFER - self._filled, data.numel())
            self._buffers[0][self._filled : self._filled + count].copy_(data[:count])
            self._filled, data = self._filled + count, data[count:]
            if self._filled == _BUFFER:
                self._flush()

    def _flush(self) -> None:
        if self._writing is not None:
            self._writing.result()
        blocks = -(-self._filled // BLOCK) * BLOCK
        self._writing = self._workers.submit(self._out.write, self._buffers[0][:blocks], self._offset)
        self._offset, self._filled = self._offset + self._filled, 0
        self._buffers.reverse()

    def close(self) -> None:
        """Write what is left, and wait for it."""
        self._flush()
        if self._writing is not None:
            self._writing.result()


# -- reading -----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor as described in the file's header; `sums` are the checksums of its pieces, empty if there are none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # offset in the file, in bytes
    end: int
    sums: str


class PartOf(NamedTuple):
    """Which part of a tensor an entry is: of which, its shape, and where the part begins."""

    of: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]


class TensorFile:
    """A safetensors file, open for reading; it stays readable if it is replaced or removed.

    Raises:
        CheckpointError: if it is not a safetensors file or is damaged; names the file and the tensor.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        self.size: int = os.fstat(self._descriptor).st_size
        self.head: bytes = self._read_head()
        with damage_as_errors(path):
            header = of_type(dict, parse(self.head[8:]))
            metadata = header.pop("__metadata__", None) or {}
            self.metadata: dict[str, str] = {k: of_type(str, v) for k, v in of_type(dict, metadata).items()}
            self._check_head(self.metadata.pop(_HEAD, None))
            sums = of_type(dict, parse(self.metadata.pop(_CRC, "{}")))
            parts = of_type(dict, parse(self.metadata.pop(_PARTS, "{}")))
            self.entries = {key: self._entry(key, about, sums.get(key, "")) for key, about in header.items()}
            self.parts = {key: self._part(key, about) for key, about in parts.items()}
            self._check_extents()

    def _read_head(self) -> bytes:
        start = os.pread(self._descriptor, 8, 0)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= _MAX_HEADER:
            raise CheckpointError(f"{self.path} is not a safetensors file: it begins with {start!r}")
        if 8 + length > self.size:
            raise CheckpointError(
                f"{self.path} is truncated or not a safetensors file: its header takes {8 + length:,} bytes, but the "
                f"file has {self.size:,}"
            )
        return os.pread(self._descriptor, 8 + length, 0)

    def _check_head(self, stored: str | None) -> None:
        """Verify the header's checksum; files of other libraries have none."""
        if stored is None and _CRC not in self.metadata:
            return
        if stored is None or zlib.crc32(self.head.replace(_head_mark(stored), _head_mark(_NO_SUM), 1)) != int(
            stored, 16
        ):
            raise CheckpointError(f"{self.path} is damaged: the checksum of its header does not match")

    def _entry(self, key: str, about: dict[str, Any], sums: str) -> Entry:
        if about["dtype"] not in _NAMES:
            raise CheckpointError(f"{self.path}: {key} is of dtype {about['dtype']}, which Firstloss cannot read")
        dtype, shape = _NAMES[about["dtype"]], sizes(about["shape"])
        begin, end = (len(self.head) + offset for offset in sizes(about["data_offsets"]))
        count = product((*shape, dtype.itemsize))
        if begin < len(self.head) or end - begin != count:
            raise CheckpointError(
                f"{self.path}: {key} of shape {list(shape)} takes {count:,} bytes, not {end - begin:,}"
            )
        if end > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: {key} ends at byte {end:,}, but the file has {self.size:,} bytes"
            )
        if of_type(str, sums) and len(sums) != 8 * -(-count // PIECE):
            raise CheckpointError(f"{self.path}: {key} has the wrong number of checksums")
        return Entry(dtype, shape, begin, end, sums)

    def _part(self, key: str, about: dict[str, Any]) -> PartOf:
        entry, part = (
            self.entries[key],
            PartOf(of_type(str, about["of"]), sizes(about["shape"]), sizes(about["begin"])),
        )
        product((*part.shape, entry.dtype.itemsize))
        ends = [first + count for first, count in zip(part.begin, entry.shape, strict=True)]
        if any(end > whole for end, whole in zip(ends, part.shape, strict=True)):
            raise CheckpointError(f"{self.path}: {key} ends at {ends}, beyond {part.of} of shape {list(part.shape)}")
        return part

    def _check_extents(self) -> None:
        """Check that the entries fill the file, without gaps and overlaps."""
        end = len(self.head)
        for key, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                what = "overlaps the one before it" if entry.begin < end else "leaves a gap before it"
                raise CheckpointError(f"{self.path} is damaged: {key}, which begins at byte {entry.begin:,}, {what}")
            end = entry.end
        if end != self.size:
            raise CheckpointError(
                f"{self.path} is damaged: its tensors end at byte {end:,}, but the file has {self.size:,} bytes"
            )

    def read(self, key: str) -> torch.Tensor:
        """Read the tensor `key` into fresh memory, and verify its checksums."""
        entry = self.entries[key]
        data = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        self._fill(key, entry, data, 0)
        return data.view(entry.dtype).reshape(entry.shape)

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Read rows [first, last) of the tensor `key`: only the pieces that contain them."""
        entry = self.entries[key]
        row = (entry.end - entry.begin) // max(entry.shape[0], 1)
        low = first * row // PIECE * PIECE
        high = min(-(-last * row // PIECE) * PIECE, entry.end - entry.begin)
        data = torch.empty(max(high - low, 0), dtype=torch.uint8)
        self._fill(key, entry, data, low)
        # Clone, because the rows may not be aligned for the dtype.
        inside = data[first * row - low : last * row - low].clone() if last > first else data[:0]
        return inside.view(entry.dtype).reshape(last - first, *entry.shape[1:])

    def _fill(self, key: str, entry: Entry, data: torch.Tensor, low: int) -> None:
        view = memoryview(data.numpy())
        for at in range(0, len(view), PIECE):
            piece = view[at : at + PIECE]
            self._read_into(key, piece, entry.begin + low + at)
            number = (low + at) // PIECE
            if entry.sums and f"{zlib.crc32(piece):08x}" != entry.sums[8 * number : 8 * number + 8]:
                raise CheckpointError(
                    f"{self.path}: {key} is damaged: the checksum of bytes {entry.begin + low + at:,} to "
                    f"{entry.begin + low + at + len(piece):,} of the file does not match"
                )

    def _read_into(self, key: str, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if count == 0:
                raise CheckpointError(f"{self.path} was truncated while it was open: {key} lies beyond its end")
            view, offset = view[count:], offset + count
