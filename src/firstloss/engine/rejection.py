"""Truncated normals by rejection sampling: how many rounds they take, and which values later rounds replace.

PyTorch draws the whole tensor, and redraws it as long as a value is out of bounds, replacing only those values. The
stream position afterwards depends on the number of rounds, which is computed without the tensor: on all cores, piece by
piece in a core's cache, each piece for as many rounds as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..compat.locks import fork_safe_lock
from ..compat.torch_names import DisableTorchDispatch
from ..interpreter import cores
from ..program.graph import dtype_name
from ..rng import words_drawn
from ..rng.stream import Position, Stream
from ..workers import Workers
from .sampler import StreamSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE = 1 << 18
_JUMP_PIECES = 2  # to skip more pieces, jumping is cheaper than drawing them
# Corrections are cached up to this size, for all tensors together: they take a tenth of a tensor's bytes for bounds at
# two standard deviations, and computing them again takes four times as long as the first round.
_MAX_CACHED_BYTES = 1 << 30
_cached_bytes = 0
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corrections(NamedTuple):
    """The replacements by later rounds: ascending indices of elements, and their final values."""

    rounds: int
    indices: NDArray[np.int64]
    values: NDArray[Any]


class Rejection:
    """A tensor drawn by rejection: `numel` contiguous elements of `dtype`, from `position` of `stream` on."""

    def __init__(
        self,
        stream: Stream,
        position: Position,
        numel: int,
        dtype: torch.dtype,
        mean: float,
        std: float,
        low: float,
        high: float,
    ) -> None:
        self._start = (stream, position)
        self._numel = numel
        self._dtype = dtype
        self._mean, self._std = mean, std
        self.low, self.high = low, high
        self._rounds: int | None = None
        self._found: Corrections | None = None
        self._lock = fork_safe_lock()

    @property
    def words_a_round(self) -> int:
        """32-bit words drawn in one round."""
        return round_words(self._numel, self._dtype)

    def words(self) -> int:
        """32-bit words drawn in all rounds."""
        with self._lock:
            if self._rounds is None:
                self._find()
            assert self._rounds is not None
            return self._rounds * self.words_a_round

    def correct(self, first_round: torch.Tensor, begin: int = 0) -> None:
        """Replace the values of the first round, in elements from `begin` on, by the final ones.

        Args:
            first_round: a contiguous part of the elements, or all of them.
        """
        part = first_round.view(-1)
        end = begin + part.numel()
        corrections = self._found
        if corrections is None:
            corrections = self._search([piece for piece in _pieces(self._numel) if piece[0] < end and begin < piece[1]])
        low, high = np.searchsorted(corrections.indices, (begin, end))
        # With NumPy, as elsewhere here: PyTorch would start its own threads, which spin for some time.
        bits = _BITS[part.dtype.itemsize]
        values = torch.from_numpy(corrections.values[low:high]).to(part.dtype).view(bits).numpy()
        part.view(bits).numpy()[corrections.indices[low:high] - begin] = values

    def _find(self) -> Corrections:
        global _cached_bytes
        pieces = list(_pieces(self._numel))
        threads = min(cores(), len(pieces))
        share = math.ceil(len(pieces) / threads)
        parts = [pieces[i : i + share] for i in range(0, len(pieces), share)]
        if len(parts) == 1:
            results = [self._search(parts[0])]
        else:
            with Workers(threads, "firstloss-reject") as workers:
                results = workers.map(self._search, parts)
        indices, values = (np.concatenate([getattr(part, name) for part in results]) for name in ("indices", "values"))
        result = Corrections(max(part.rounds for part in results), indices, values)
        self._rounds = result.rounds
        size = result.indices.nbytes + result.values.nbytes
        if _cached_bytes + size <= _MAX_CACHED_BYTES:
            _cached_bytes += size
            self._found = result
        return result

    _found: Corrections | None = None  # also if the constructor was interrupted

    def __del__(self) -> None:
        global _cached_bytes
        if self._found is not None:
            _cached_bytes -= self._found.indices.nbytes + self._found.values.nbytes

    def _search(self, pieces: list[tuple[int, int]]) -> Corrections:
        """The corrections in some of the pieces."""
        with torch.no_grad(), DisableTorchDispatch():
            rounds: list[_Round] = [_Round(self, 0, pieces)]
            indices, values, most = [], [], 1
            for number, (begin, _) in enumerate(pieces):
                rejected = outside = rounds[0].outside(number)
                pending = np.arange(len(outside))  # indices in `rejected` of the elements that are still out of bounds
                final = np.empty(len(outside), rounds[0].precision)
                round_ = 1
                while len(outside):
                    if len(rounds) == round_:
                        rounds.append(_Round(self, round_, pieces))
                    candidates = final[pending] = rounds[round_].at(number, outside)
                    still = self._outside(candidates)
                    outside, pending = outside[still], pending[still]
                    round_ += 1
                most = max(most, round_)
                indices.append(rejected.astype(np.int64) + begin)
                values.append(final)
            return Corrections(most, np.concatenate(indices), np.concatenate(values))

    def _outside(self, values: np.ndarray) -> np.ndarray:
        return np.flatnonzero((values < self.low) | (values > self.high))


class _Round:
    """The candidates of one round, piece after piece; skips pieces by drawing them or by a jump.

    Attributes:
        precision: the dtype of the candidates.
    """

    def __init__(self, rejection: Rejection, round_: int, pieces: list[tuple[int, int]]) -> None:
        self._rejection = rejection
        self._before = round_ * rejection.words_a_round
        self._pieces = pieces
        self._next: int | None = None
        self._sampler = StreamSampler()
        half = rejection._dtype in (torch.float16, torch.bfloat16)  # NumPy has no bfloat16, and its float16 is slow
        self.precision = np.dtype(np.float64 if rejection._dtype == torch.float64 else np.float32)
        self._scratch: torch.Tensor | None = None
        self._half = half

    def outside(self, number: int) -> np.ndarray:
        """The indices within piece `number` of the candidates that are out of bounds."""
        rejection, count = self._rejection, self._go_to(number)
        if self._sampler.has_selection(count, rejection._dtype):
            return self._sampler.normals_outside(count, rejection._mean, rejection._std, rejection.low, rejection.high)
        return rejection._outside(self._drawn(count))

    def at(self, number: int, indices: np.ndarray) -> np.ndarray:
        """The candidates at `indices` within piece `number`."""
        rejection, count = self._rejection, self._go_to(number)
        if self._sampler.has_selection(count, rejection._dtype):
            return self._sampler.normals_at(count, rejection._mean, rejection._std, indices)
        return self._drawn(count)[indices]

    def _go_to(self, number: int) -> int:
        """Move the sampler to the beginning of piece `number`; returns the number of its elements."""
        rejection = self._rejection
        if self._next is None or number - self._next > _JUMP_PIECES:
            stream, position = rejection._start[0].absolute(rejection._start[1])
            before = words_drawn.words_before("normal", dtype_name(rejection._dtype), self._pieces[number][0])
            words = position.words + self._before + before
            self._sampler.seek(stream, Position(words, position.spare))
        else:
            for skipped in range(self._next, number):
                begin, end = self._pieces[skipped]
                if self._sampler.has_selection(end - begin, rejection._dtype):
                    self._sampler.normals_at(end - begin, rejection._mean, rejection._std, np.empty(0, np.int32))
                else:
                    self._draw(end - begin)
        self._next = number + 1
        begin, end = self._pieces[number]
        return end - begin

    def _draw(self, count: int) -> torch.Tensor:
        rejection = self._rejection
        if self._scratch is None or len(self._scratch) < count:
            self._scratch = torch.empty(count, dtype=rejection._dtype)
        out = self._scratch[:count]
        self._sampler.fill("normal", out, rejection._mean, rejection._std)
        return out

    def _drawn(self, count: int) -> np.ndarray:
        out = self._draw(count)
        return (out.float() if self._half else out).numpy()


def round_words(numel: int, dtype: torch.dtype) -> int:
    """The 32-bit words drawn for `numel` >= 16 contiguous normals."""
    drawn = words_drawn.draw("normal", dtype_name(dtype), numel)
    assert drawn is not None
    return drawn.words


def can_be_split(numel: int, dtype: torch.dtype) -> bool:
    """Whether normals of this number and dtype can be drawn in pieces."""
    return numel >= words_drawn.MIN_PIECE and words_drawn.granule("normal", dtype_name(dtype)) is not None


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    # The last piece must not be short, since the kernel computes the end of a tensor differently.
    cuts = [*range(0, max(numel - _PIECE, 0) + 1, _PIECE), numel]
    yield from zip(cuts, cuts[1:], strict=False)
