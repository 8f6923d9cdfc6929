"""Deferred-offset streams: they begin where an earlier operation ends, and how much that draws is not known yet.

`trunc_normal_` draws until every value lies inside its bounds. Rather than drawing while we capture, what comes after
it counts its positions from an origin that is looked up when a state is needed: then the candidates are drawn,
the number of rounds is found, and remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..rng.mt19937 import Words
from ..rng.stream import ORIGIN_SPARE, Position, Stream


class DeferredOffsetStream(Stream):
    """What `before` draws from where an operation that began at `position` leaves it; `words` says how many it drew."""

    def __init__(self, before: Stream, position: Position, words: Callable[[], int]) -> None:
        # Not Stream.__init__: there is no state yet.
        self.start = Position(0, None if position.spare is None else ORIGIN_SPARE)
        self.before = before
        self._position = position
        self._words = words
        self._origin_lock = threading.Lock()
        self._root: tuple[Stream, Position] | None = None

    def absolute(self, position: Position) -> tuple[Stream, Position]:
        """As `Stream.absolute`: a position in the stream that all of these go back to."""
        root, origin = self._resolve()
        spare = position.spare
        if spare is not None:
            spare = origin.spare if spare == ORIGIN_SPARE else origin.words + spare
        return root, Position(origin.words + position.words, spare)

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """As `Stream.state_at`."""
        root, there = self.absolute(position)
        return root.state_at(there)

    def words_at(self, begin: int, count: int) -> Words:
        """As `Stream.words_at`."""
        root, there = self.absolute(Position(begin))
        return root.words_at(there.words, count)

    def _resolve(self) -> tuple[Stream, Position]:
        """The root stream, and where in it this one begins."""
        chain: list[DeferredOffsetStream] = []
        stream: Stream = self
        while isinstance(stream, DeferredOffsetStream) and stream._root is None:
            chain.append(stream)
            stream = stream.before
        for late in reversed(chain):  # a loop: a model may have thousands, one behind the other
            with late._origin_lock:
                if late._root is None:
                    root, begin = late.before.absolute(late._position)
                    late._root = root, Position(begin.words + late._words(), begin.spare)
        assert self._root is not None
        return self._root
