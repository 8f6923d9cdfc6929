"""PyTorch's CUDA random stream: a seed and an offset.

Its generator has no state to jump through: at each offset it is the seed and the offset, and nothing else. (What a
fill makes of them is said in `cuda_layout`.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from firstloss.rng.mt19937 import Words
from firstloss.rng.stream import Position, Stream


class PhiloxStream(Stream):
    """What the CUDA generators of one seed draw. Positions count offsets: words of each thread's Philox stream."""

    def __init__(self, seed: int) -> None:
        self.seed = seed % (1 << 64)
        self.start = Position(0)

    def state_at(self, position: Position) -> NDArray[np.uint8]:
        """The generator's state at `position`: uint8, shape (16,), as `Generator.get_state` of a CUDA generator."""
        return np.array([self.seed, position.words], dtype="<u8").view(np.uint8)

    def words_at(self, begin: int, count: int) -> Words:
        """Not available: which words an offset has depends on the thread."""
        raise NotImplementedError("a CUDA stream has words for each thread: see firstloss.rng.cuda_layout")
