"""The CPU random stream, with random access.

A `Stream` is what a generator would draw from where it stood when the stream was made: its origin. The generator state
at any later `Position` follows without drawing what lies between, so that one fill of a constructor can be run alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firstloss.rng.jump import advance
from firstloss.rng.mt19937 import N, Words, build_state, consistent, extend, parse_state, temper

ORIGIN_SPARE = -1  # `Position.spare` of the cached normal that the origin's state came with
_REMEMBERED = 64  # blocks of 2,496 bytes


class Position(NamedTuple):
    """Where an operation begins to draw.

    words: 32-bit words drawn since the stream's origin.
    spare: kernels that make normals in pairs leave the second one cached in the generator. The word position at which
        that pair was drawn; None when nothing is cached; -1 for the normal that the origin's state came with.
    """

    words: int
    spare: int | None = None


class Stream:
    """The words a generator would draw from its state on, and its states along the way. Thread-safe."""

    def __init__(self, state: NDArray[np.uint8]) -> None:
        self._origin = parse_state(state)
        self.start = Position(0, ORIGIN_SPARE if self._origin["has_normal"] else None)
        # PyTorch draws its words in blocks of 624. Block 0 is the origin's; so many of its words are still to be drawn:
        self._in_block_0 = int(self._origin["left"]) - 1
        block_0 = consistent(self._origin["words"].astype(np.uint32))
        self._lock = Lock()
        self._blocks: OrderedDict[int, Words] = OrderedDict({0: block_0})  # the oldest use first; 0 is never dropped

    @classmethod
    def from_state(cls, state: NDArray[np.uint8]) -> Stream:
        """The stream of a generator whose `get_state().numpy()` is `state`: uint8, shape (5056,)."""
        return cls(state)

    def absolute(self, position: Position) -> tuple[Stream, Position]:
        """A position in the stream that this one is a part of, where it begins in the middle of another."""
        return self, position

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """The generator's state at `position`: uint8, shape (5056,), byte for byte what drawing up to there leaves.

        After `generator.set_state(torch.from_numpy(state))` everything drawn is what the stream's generator would have
        drawn, and `initial_seed()` still answers. Costs 1 to 4 ms, less near a position asked for before.
        """
        words, spare = position
        self._check(position)
        record = self._origin.copy()
        if words > 0:  # else the origin's own bytes, which may be a seeded state that was never drawn from
            block, following = self._locate(words)
            record["next"] = following
            record["left"] = N + 1 - following
            if block > 0:
                record["words"] = self._block(block)
        if spare != ORIGIN_SPARE:
            record["has_normal"] = spare is not None
            record["normal"] = 0.0 if spare is None else self._second_normal(spare)
        return build_state(record)

    def states_at(self, positions: Iterable[Position]) -> list[NDArray[np.uint8]]:
        """`state_at` of each, in the order given, computed from the earliest to the latest so that jumps are shared."""
        wanted = list(positions)
        states = {position: self.state_at(position) for position in sorted(set(wanted), key=lambda p: p.words)}
        return [states[position] for position in wanted]

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
            raise ValueError(f"{position} keeps the origin's cached normal, but the origin has none")
        if spare is not None and spare != ORIGIN_SPARE and not 0 <= spare <= words - 4:
            raise ValueError(f"{position}: a pair of normals takes 4 words, so its spare lies at least 4 words before")

    def _locate(self, words: int) -> tuple[int, int]:
        """The block that word position `words` is in, and the index of its next word: 624 when all are drawn."""
        beyond = words - self._in_block_0
        block = max(0, -(-beyond // N))
        return block, beyond - N * (block - 1)

    def origin_block(self) -> tuple[Words, int]:
        """The block of words that the origin lies in, and how many of them are still to be drawn there."""
        return self._block(0), self._in_block_0

    def _block(self, block: int) -> Words:
        """The 624 words of a block."""
        with self._lock:
            if block in self._blocks:
                self._blocks.move_to_end(block)
                return self._blocks[block]
            known = sorted(self._blocks)
            base = known[bisect_right(known, block) - 1]
            window = self._blocks[base]
        words = advance(window, N * (block - base))
        with self._lock:
            self._blocks[block] = words
            self._blocks.move_to_end(0)
            while len(self._blocks) > _REMEMBERED:
                self._blocks.popitem(last=False)
        return words

    def _second_normal(self, spare: int) -> float:
        """The second normal of the pair drawn at word position `spare`.

        As `normal_distribution<double>` in ATen/core/DistributionsHelper.h computes it: Box-Muller on two 53-bit
        uniforms. Python's `math` calls the C library that PyTorch calls; numpy's own sine and logarithm differ in the
        last bit.
        """
        a, b, c, d = (int(word) for word in self.words_at(spare, 4))
        u1 = ((a << 32 | b) & (1 << 53) - 1) * 2.0**-53
        u2 = ((c << 32 | d) & (1 << 53) - 1) * 2.0**-53
        radius = math.sqrt(-2.0 * math.log1p(-u2))
        return radius * math.sin(2.0 * math.pi * u1)
