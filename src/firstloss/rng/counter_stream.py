"""The stream of the counter policy: each draw has its own range of 2^48 words, more than any operation draws.

Word w of draw k (see `counter`) is at position k 2^48 + w. So a position encodes the draw and the element, and a fill
that is split into pieces counts words as in any other stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from firstloss.rng import philox
from firstloss.rng.mt19937 import N, Words, build_state
from firstloss.rng.stream import Position, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORDS_PER_DRAW = 1 << 48
_STATES = 1 << 63  # added to the draw's number for the blocks of generator states; above all draws


class CounterStream(Stream):
    """The numbers drawn under the counter policy, given the generator's state at its beginning. Thread-safe.

    Attributes:
        seed: 64 bits: the next two words of the generator, the first one being the lower.
    """

    def __init__(self, state: NDArray[np.uint8]) -> None:
        super().__init__(state)
        low, high = (int(word) for word in super().words_at(0, 2))
        self.seed: int = low | high << 32
        self.start = Position(0)

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """A generator state that depends on the seed and the draw, for operations that `counter` has no rule for.

        After the capture the generator is left in the state of the next draw.
        """
        draw, _ = number_and_word(position)
        record = self._origin.copy()
        blocks = philox.words(self.seed, np.arange(N // 4, dtype=np.uint64), _STATES | draw)
        record["words"] = blocks.reshape(-1)
        record["left"], record["next"] = 1, 0  # as after seeding
        record["has_normal"], record["normal"] = False, 0.0
        return build_state(record)

    def words_at(self, begin: int, count: int) -> Words:
        """The `count` words from position `begin` on: uint32, shape (count,)."""
        draw, word = number_and_word(Position(begin))
        first, skip = divmod(word, 4)
        blocks = np.arange(first, first - (-(skip + count) // 4), dtype=np.uint64)
        return philox.words(self.seed, blocks, draw).reshape(-1)[skip : skip + count]


def number_and_word(position: Position) -> tuple[int, int]:
    """The number of the draw at a position, and the word within it."""
    return divmod(position.words, WORDS_PER_DRAW)


def next_draw(position: Position) -> Position:
    """The beginning of the draw after the one at `position`."""
    return Position((position.words // WORDS_PER_DRAW + 1) * WORDS_PER_DRAW)
