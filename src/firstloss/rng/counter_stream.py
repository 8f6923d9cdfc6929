"""The stream of the counter policy: each draw has a range of its own, large enough for all the words it may take.

Draw k begins at word k 2^48, and its word w (see `counter`) is at k 2^48 + w. So a position says which draw and which
element, and a fill that is cut into pieces counts words as in any other stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from firstloss.rng import philox
from firstloss.rng.mt19937 import N, Words, build_state
from firstloss.rng.stream import Position, Stream

ROOM = 1 << 48  # words of a draw
_STATES = 1 << 63  # above all draws: the blocks of generator states


class CounterStream(Stream):
    """What a generator in some state draws under the counter policy. Thread-safe.

    Attributes:
        seed: 64 bits: the two words that the generator would have drawn next, the first of them lower.
    """

    def __init__(self, state: NDArray[np.uint8]) -> None:
        super().__init__(state)
        low, high = (int(word) for word in super().words_at(0, 2))
        self.seed = low | high << 32
        self.start = Position(0)

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """A generator of the draw's own, for operations that `counter` has no rule for: it depends on seed and draw.

        It is also what the generator is left with at the end, of the number of the draw that would come next.
        """
        draw, _ = number_and_word(position)
        record = self._origin.copy()
        blocks = philox.words(self.seed, np.arange(N // 4, dtype=np.uint64), _STATES | draw)
        record["words"] = blocks.reshape(-1)
        record["left"], record["next"] = 1, 0  # as after seeding: all its words are before the first draw
        record["has_normal"], record["normal"] = False, 0.0
        return build_state(record)

    def words_at(self, begin: int, count: int) -> Words:
        """The `count` words from position `begin` on: uint32, shape (count,)."""
        draw, word = number_and_word(Position(begin))
        first, skip = divmod(word, 4)
        blocks = np.arange(first, first - (-(skip + count) // 4), dtype=np.uint64)
        return philox.words(self.seed, blocks, draw).reshape(-1)[skip : skip + count]


def number_and_word(position: Position) -> tuple[int, int]:
    """The number of the draw that a position is in, and the word of it."""
    return divmod(position.words, ROOM)


def next_draw(position: Position) -> Position:
    """Where the draw after the one that begins at `position` begins."""
    return Position((position.words // ROOM + 1) * ROOM)
