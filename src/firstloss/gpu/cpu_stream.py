"""Fills with the CPU's bits, made on a GPU: builds the tables for `mt19937.h`.

The stream is split into chunks of equal length, and each chunk that is needed is drawn by a warp. The window of chunk k
is a jump of 2^j chunks away from that of chunk k - 2^j, where 2^j is the lowest set bit of k; so a rank that needs an
eighth of all weights computes about an eighth of the windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..rng import jump, words_drawn
from ..rng.mt19937 import N, Words, consistent, extend, parse_state
from ..rng.stream import Position, Stream
from .fill_slices import Slice
from .kernels import CHUNK, DTYPES, KINDS, SEGMENT, Launcher

_CHUNKS = 1 << 13  # as many as the largest GPU has warps
_MIN_BITS, _MAX_BITS = 14, 21  # log2 of a chunk's length
_GROUP = 16  # normals computed together


class CpuPiece(NamedTuple):
    """A part of one fill, and the address to write it to.

    Attributes:
        bits: the bits of a word that a uniform uses. PyTorch versions that use 24 bits for half precision compute in
            single precision and round.
    """

    stream: Stream
    begin: int
    name: str
    numel: int
    dtype: torch.dtype
    pair: tuple[float, float]
    wanted: Slice
    out: int
    bits: int = 24


def can_make(name: str, numel: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a fill; PyTorch computes few normals, and doubles, with a math library."""
    if name == "normal":
        return dtype in DTYPES and dtype != torch.float64 and numel >= words_drawn.MIN_PIECE
    return name == "uniform" and dtype in DTYPES


def fill(pieces: Iterable[CpuPiece], launcher: Launcher, bits: int | None = None) -> None:
    """Make all pieces.

    Args:
        bits: log2 of a chunk's length; by default what keeps a GPU busy.
    """
    table = LaunchTables(list(pieces), bits)
    table.run(launcher)


class LaunchTables:
    """The tables for a list of pieces: windows to compute, chunks to draw, segments to write."""

    def __init__(self, pieces: Sequence[CpuPiece], bits: int | None = None) -> None:
        streams: dict[Stream, list[np.void]] = {}
        for piece in pieces:
            for segment in _segments(piece):
                streams.setdefault(piece.stream, []).append(segment)
        if bits is None:
            words = sum(int(segment["words"]) for segments in streams.values() for segment in segments)
            bits = min(max((words // _CHUNKS).bit_length(), _MIN_BITS), _MAX_BITS)
        self.bits = bits
        self.roots: list[Words] = []
        self._root_numbers: list[int] = []
        self.levels: dict[int, list[tuple[int, int]]] = {}  # (from, to) windows, by the exponent of the jump
        self.layers: list[tuple[NDArray[np.void], NDArray[np.void]]] = []  # chunks and segments of each launch
        self.windows: int = 0
        for stream, segments in streams.items():
            self._add(stream, np.array(segments, SEGMENT))

    def _add(self, stream: Stream, segments: NDArray[np.void]) -> None:
        segments = segments[np.argsort(segments["begin"], kind="stable")]
        base = int(segments["begin"][0])
        segments["begin"] -= base
        layers = _layers(segments)
        length = 1 << self.bits
        chunks_by_layer = [_chunks(layer, length) for layer in layers]
        wanted = {int(k) for chunks in chunks_by_layer for k in chunks["begin"] // length}
        needed = {0}
        for k in wanted:
            while k not in needed:
                needed.add(k)
                k &= k - 1
        number = {k: self.windows + i for i, k in enumerate(sorted(needed))}
        self.windows += len(number)
        self.roots.append(window_at(stream, base))
        self._root_numbers.append(number[0])
        for k in sorted(needed - {0}):
            exponent = self.bits + (k & -k).bit_length() - 1
            self.levels.setdefault(exponent, []).append((number[k & (k - 1)], number[k]))
        for layer, chunks in zip(layers, chunks_by_layer, strict=True):
            chunks["window"] = [number[int(k)] for k in chunks["begin"] // length]
            self.layers.append((chunks, layer))

    def run(self, launcher: Launcher) -> None:
        """Launch the kernels; the longest jumps first, since shorter ones start from their results."""
        if not self.windows:
            return
        windows = launcher.empty_windows(self.windows)
        roots = launcher.put(np.array(self.roots)).view(torch.int32).reshape(-1, N)
        for row, number in enumerate(self._root_numbers):
            windows[number].copy_(roots[row])
        exponents = sorted(self.levels, reverse=True)
        digits = launcher.put(np.array([power_of_two(e) for e in exponents])) if exponents else None
        all_pairs = [pair for e in exponents for pair in self.levels[e]]
        pairs = launcher.put(np.array(all_pairs, np.uint32)) if all_pairs else None
        done = 0
        for row, exponent in enumerate(exponents):
            assert digits is not None and pairs is not None
            count = len(self.levels[exponent])
            launcher.jump_windows(windows, pairs[8 * done :], count, digits[row * _DIGIT_BYTES :])
            done += count
        for chunks, segments in self.layers:
            launcher.fill(windows, launcher.put(chunks), len(chunks), launcher.put(segments))


_DIGIT = N - 1
_DIGITS = 33
_DIGIT_BYTES = 4 * 20 * _DIGITS


@lru_cache(maxsize=128)
def power_of_two(exponent: int) -> Words:
    """t^(2^exponent), as 33 digits of 623 bits, lowest first: uint32, shape (33, 20). See `rng/jump.py`."""
    residue = _residue(exponent)
    mask = (1 << _DIGIT) - 1
    packed = [(residue >> _DIGIT * k & mask).to_bytes(80, "little") for k in range(_DIGITS)]
    return np.frombuffer(b"".join(packed), "<u4").reshape(_DIGITS, 20)


@lru_cache(maxsize=128)
def _residue(exponent: int) -> int:
    if exponent <= _MIN_BITS:
        return jump.power(1 << exponent)
    return jump.squared(_residue(exponent - 1))


def window_at(stream: Stream, words: int) -> Words:
    """The 624 untempered words of the stream from position `words` on."""
    record = parse_state(stream.state_at(Position(words)))
    block = consistent(record["words"].astype(np.uint32))
    drawn = N + 1 - int(record["left"])
    return extend(block, drawn)[drawn:]


def _segments(piece: CpuPiece) -> list[np.void]:
    """The segments of the stream with the wanted numbers: one, or two if normals have a ragged end."""
    low, high, row, column, width = piece.wanted
    template = np.zeros((), SEGMENT)
    template["slice"]["out"] = piece.out
    template["slice"]["row"], template["slice"]["column"], template["slice"]["width"] = row, column, width
    template["kind"], template["dtype"], template["bits"] = KINDS[piece.name], DTYPES[piece.dtype], piece.bits
    halved = piece.dtype.itemsize == 2
    template["a"], template["b"], template["range"] = numbers_of(
        piece.name, torch.float32 if halved and piece.bits == 24 else piece.dtype, piece.pair
    )
    segments = []

    def add(begin: int, first: int, until: int, to: int) -> None:
        """Add groups from element `first` to `until`, drawn from `begin` on; only elements below `to` are written."""
        group = _GROUP if piece.name == "normal" else 1
        words_each = 2 if piece.dtype == torch.float64 else 1
        start = max((low - first) // group * group, 0)
        end = min(high, to, until)
        if end <= max(low, first + start):
            return
        segment = template.copy()
        segment["begin"], segment["first"] = begin + start * words_each, first + start
        segment["words"] = -(-(end - first - start) // group) * group * words_each
        segment["slice"]["low"], segment["slice"]["high"] = low, end
        segments.append(segment[()])

    n, ragged = piece.numel, piece.numel % _GROUP
    if piece.name != "normal" or not ragged:
        add(piece.begin, 0, n, n)
    else:
        # The last 16 are redrawn: in float32 from the words after the ragged end, in half precision from its beginning.
        add(piece.begin, 0, n - ragged, n - _GROUP)
        redrawn_from = piece.begin + n
        if piece.dtype != torch.float32:
            redrawn_from -= ragged
        add(redrawn_from, n - _GROUP, n, n)
    return segments


def numbers_of(name: str, dtype: torch.dtype, pair: tuple[float, float]) -> tuple[float, float, float]:
    """The two parameters as the kernel takes them, and for uniforms the range: all in the precision of `dtype`."""
    first, second = pair
    if name == "normal":
        return first, second, 0.0
    low, high = torch.tensor(first, dtype=dtype, device="cpu"), torch.tensor(second, dtype=dtype, device="cpu")
    return float(low), float(high), float(high - low)


def _layers(segments: NDArray[np.void]) -> list[NDArray[np.void]]:
    """Group sorted segments so that no two in a group overlap in the stream: a warp only moves forward."""
    layers: list[list[int]] = []
    ends: list[int] = []
    for i, (begin, words) in enumerate(zip(segments["begin"].tolist(), segments["words"].tolist(), strict=True)):
        for n, end in enumerate(ends):
            if end <= begin:
                layers[n].append(i)
                ends[n] = begin + words
                break
        else:
            layers.append([i])
            ends.append(begin + words)
    return [segments[layer] for layer in layers]


def _chunks(segments: NDArray[np.void], length: int) -> NDArray[np.void]:
    """The chunks that overlap these segments."""
    begins = segments["begin"].astype(np.int64)
    ends = begins + segments["words"].astype(np.int64)
    indices = np.unique(
        np.concatenate([np.arange(b // length, (e - 1) // length + 1) for b, e in zip(begins, ends, strict=True)])
    )
    chunks = np.zeros(len(indices), CHUNK)
    chunks["begin"] = indices * length
    chunks["end"] = (indices + 1) * length
    chunks["from"] = np.searchsorted(ends, indices * length, side="right")
    chunks["to"] = np.searchsorted(begins, (indices + 1) * length, side="left")
    return chunks
