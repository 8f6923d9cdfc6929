"""The bytes of `torch.Generator.get_state()` for a CPU generator.

PyTorch keeps 624 words and draws them in order: `next` is the index of the word to draw, and before a draw `left` is
counted down; when it reaches zero, all 624 words are replaced by the 624 that follow, and `next` by 0. So a freshly
seeded state (left 1, next 0) has its words still *before* the first draw. Two caches hold the second half of a pair of
normals: a double one, used by every CPU kernel, and a float one, which none uses but which is kept.
Source: `CPUGeneratorImplState` in ATen/CPUGeneratorImpl.cpp, `mt19937_engine` in ATen/core/MT19937RNGEngine.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firstloss.rng.mt19937 import N

LAYOUT = np.dtype(
    [
        ("seed", "<u8"),
        ("left", "<i4"),
        ("seeded", "<i4"),
        ("next", "<u8"),
        ("words", "<u8", N),  # 32 bits used of each
        ("normal_x", "<f8"),  # always 0
        ("normal", "<f8"),  # the cached normal
        ("normal_rho", "<f8"),  # always 0
        ("has_normal", "<i4"),
        ("padding", "V4"),
        ("float_normal", "<f4"),
        ("has_float_normal", "?"),
        ("float_padding", "V3"),
    ]
)
assert LAYOUT.itemsize == 5056


def parse(state: NDArray[np.uint8]) -> Any:
    """A copy of the state as a record of `LAYOUT`; an error says what is wrong with bytes that are no such state."""
    if state.dtype != np.uint8 or state.shape != (LAYOUT.itemsize,):
        raise ValueError(
            f"a CPU generator's state is {LAYOUT.itemsize} bytes (uint8), not an array of dtype {state.dtype} and "
            f"shape {state.shape}; pass torch.get_rng_state().numpy() or generator.get_state().numpy()"
        )
    record = np.frombuffer(state.tobytes(), LAYOUT).copy()[0]
    left, following = int(record["left"]), int(record["next"])
    # Seeding gives (1, 0); every draw keeps left + next at 625. Anything else would skip words or read past the end.
    if not record["seeded"] or not 1 <= left <= N or not (left + following == N + 1 or left == 1):
        raise ValueError(f"not a state that a torch CPU generator can be in: left={left}, next={following}")
    return record


def build(record: Any) -> NDArray[np.uint8]:
    """The record's bytes, to be given to `torch.Generator.set_state` through `torch.from_numpy`."""
    return np.frombuffer(record.tobytes(), np.uint8).copy()
