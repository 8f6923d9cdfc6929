"""PyTorch's random streams, with random access: the generator state at any position, without drawing up to it.

A `Stream` starts from a generator's state: its origin. The state at any later `Position` is computed by jumping ahead,
so a single fill of a constructor can be run alone. `DeferredOffsetStream` begins where an operation ends that draws an
unknown number of words; `PhiloxStream` is CUDA's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from firstloss.compat.locks import fork_safe_lock
from firstloss.rng.jump import has_kernel, jump, native_generate
from firstloss.rng.mt19937 import N, Words, build_state, consistent, extend, parse_state, temper

if TYPE_CHECKING:
    from numpy.typing import NDArray

ORIGIN_SPARE = -1  # `Position.spare` of the cached normal that the origin's state came with
GENERATE_BELOW = 100_000  # words; generating fewer is cheaper than a jump
_CACHED_BLOCKS = 64  # of 2,496 bytes each


class Position(NamedTuple):
    """Where an operation begins to draw.

    words: 32-bit words drawn since the stream's origin.
    spare: the word position of the pair of normals whose second one is cached in the generator; None if none is
        cached; -1 for the one cached in the origin's state.
    """

    words: int
    spare: int | None = None


def advance(window: Words, n: int) -> Words:
    """The window `n` words later. `window` must be consistent: see `mt19937.consistent`."""
    if n >= GENERATE_BELOW:
        return jump(window, n)
    return native_generate(window, n) if has_kernel() else extend(window, n)[n:]


class Stream:
    """The words that a generator draws from a given state on, and its states along the way. Thread-safe."""

    def __init__(self, state: NDArray[np.uint8]) -> None:
        self._origin = parse_state(state)
        self.start: Position = Position(0, ORIGIN_SPARE if self._origin["has_normal"] else None)
        # PyTorch draws its words in blocks of 624. Block 0 is the origin's, with this many words not yet drawn.
        self._in_block_0 = int(self._origin["left"]) - 1
        block_0 = consistent(self._origin["words"].astype(np.uint32))
        self._lock = fork_safe_lock()
        self._blocks: OrderedDict[int, Words] = OrderedDict({0: block_0})  # LRU; 0 is never evicted

    @classmethod
    def from_state(cls, state: NDArray[np.uint8]) -> Stream:
        """The stream of a generator whose `get_state().numpy()` is `state`: uint8, shape (5056,)."""
        return cls(state)

    def absolute(self, position: Position) -> tuple[Stream, Position]:
        """The same position in the root stream, if this stream begins in the middle of another one."""
        return self, position

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """The generator's state at `position`: uint8, shape (5056,), byte for byte what drawing up to it leaves.

        `initial_seed()` is preserved. Takes 1 to 4 ms; less near a position requested before.
        """
        words, spare = position
        self._check(position)
        record = self._origin.copy()
        if words > 0:  # at 0 the origin's own bytes: it may be freshly seeded
            block, following = self._locate(words)
            record["next"] = following
            record["left"] = N + 1 - following
            if block > 0:
                record["words"] = self._block(block)
        if spare != ORIGIN_SPARE:
            record["has_normal"] = spare is not None
            record["normal"] = 0.0 if spare is None else self._second_normal(spare)
        return build_state(record)

    def words_at(self, begin: int, count: int) -> Words:
        """The `count` 32-bit words drawn from position `begin` on: uint32, shape (count,)."""
        self._check(Position(begin))
        block, following = self._locate(begin)
        return temper(extend(self._block(block), following + count - N if following + count > N else 0))[
            following : following + count
        ]

    def _check(self, position: Position) -> None:
        words, spare = position
        if words < 0:
            raise ValueError(f"{position} is before the stream's origin")
        if spare == ORIGIN_SPARE and self.start.spare is None:
            raise ValueError(f"{position} refers to the origin's cached normal, but the origin has none")
        if spare is not None and spare != ORIGIN_SPARE and not 0 <= spare <= words - 4:
            raise ValueError(
                f"{position}: a pair of normals takes 4 words, so `spare` must be at least 4 below `words`"
            )

    def _locate(self, words: int) -> tuple[int, int]:
        """The block that contains word position `words`, and the index of its next word: 624 if all are drawn."""
        past = words - self._in_block_0
        block = max(0, -(-past // N))
        return block, past - N * (block - 1)

    def origin_block(self) -> tuple[Words, int]:
        """The block of words that contains the origin, and how many of its words are not yet drawn."""
        return self._block(0), self._in_block_0

    def _block(self, block: int) -> Words:
        """The 624 words of a block."""
        with self._lock:
            if block in self._blocks:
                self._blocks.move_to_end(block)
                return self._blocks[block]
            cached = sorted(self._blocks)
            base = cached[bisect_right(cached, block) - 1]
            window = self._blocks[base]
        words = advance(window, N * (block - base))
        with self._lock:
            self._blocks[block] = words
            self._blocks.move_to_end(0)
            while len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return words

    def _second_normal(self, spare: int) -> float:
        """The second normal of the pair drawn at word position `spare`.

        Computed as by `normal_distribution<double>` in ATen/core/DistributionsHelper.h: Box-Muller on two 53-bit
        uniforms. Uses `math`, which calls the same C library as PyTorch; numpy's functions differ in the last bit.
        """
        a, b, c, d = (int(word) for word in self.words_at(spare, 4))
        u1 = ((a << 32 | b) & (1 << 53) - 1) * 2.0**-53
        u2 = ((c << 32 | d) & (1 << 53) - 1) * 2.0**-53
        radius = math.sqrt(-2.0 * math.log1p(-u2))
        return radius * math.sin(2.0 * math.pi * u1)


class DeferredOffsetStream(Stream):
    """The stream after an operation that draws an unknown number of words.

    `trunc_normal_` redraws until every value lies within its bounds. Capture does not run it, so the positions after it
    are relative to an origin that is resolved when a state is first needed: only then are its candidates drawn.
    """

    def __init__(self, before: Stream, position: Position, words: Callable[[], int]) -> None:
        """
        Args:
            before: the stream that the operation draws from, beginning at `position`.
            words: returns how many words it drew.
        """
        # Not Stream.__init__: the state is not known yet.
        self.start: Position = Position(0, None if position.spare is None else ORIGIN_SPARE)
        self.before = before
        self._position = position
        self._words = words
        self._origin_lock = fork_safe_lock()
        self._root: tuple[Stream, Position] | None = None

    def absolute(self, position: Position) -> tuple[Stream, Position]:
        """As `Stream.absolute`; resolves the origin."""
        root, origin = self._resolve()
        spare = position.spare
        if spare is not None:
            spare = origin.spare if spare == ORIGIN_SPARE else origin.words + spare
        return root, Position(origin.words + position.words, spare)

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """As `Stream.state_at`."""
        root, resolved = self.absolute(position)
        return root.state_at(resolved)

    def words_at(self, begin: int, count: int) -> Words:
        """As `Stream.words_at`."""
        root, resolved = self.absolute(Position(begin))
        return root.words_at(resolved.words, count)

    def _resolve(self) -> tuple[Stream, Position]:
        """The root stream, and the position in it at which this one begins."""
        chain: list[DeferredOffsetStream] = []
        stream: Stream = self
        while isinstance(stream, DeferredOffsetStream) and stream._root is None:
            chain.append(stream)
            stream = stream.before
        for deferred in reversed(chain):  # not recursive: a model may chain thousands
            with deferred._origin_lock:
                if deferred._root is None:
                    root, begin = deferred.before.absolute(deferred._position)
                    deferred._root = root, Position(begin.words + deferred._words(), begin.spare)
        assert self._root is not None
        return self._root


class PhiloxStream(Stream):
    """The stream of a CUDA generator with a given seed; its state is the seed and the offset, nothing else.

    Positions are offsets: words of each thread's Philox stream (see `cuda_layout`).
    """

    def __init__(self, seed: int) -> None:
        self.seed: int = seed % (1 << 64)
        self.start: Position = Position(0)

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """The generator's state at `position`: uint8, shape (16,), as `Generator.get_state` of a CUDA generator."""
        return np.array([self.seed, position.words], dtype="<u8").view(np.uint8)

    def words_at(self, begin: int, count: int) -> Words:
        """Not available: the words at an offset depend on the thread."""
        raise NotImplementedError("each thread of a CUDA kernel draws its own words: use firstloss.rng.cuda_layout")
