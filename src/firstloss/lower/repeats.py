"""Detection of repetition in a sequence: runs in which a stretch of keys repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_CANDIDATES = 12


class Repeats(NamedTuple):
    """`keys[i] == keys[i + period]` for all i from `start` up to `stop - period`: at least two equal stretches."""

    start: int
    stop: int
    period: int


def find_runs(keys: Sequence[int], least: int) -> list[Repeats]:
    """Non-overlapping runs, in order: the one that saves most is chosen first, then those to its left and right.

    Args:
        keys: numbers that are equal for equal elements.
        least: the minimal number of elements that a run saves, which are those after its first stretch.
    """
    return _within(np.asarray(keys), 0, least)


def _within(keys: np.ndarray, offset: int, least: int) -> list[Repeats]:
    best = _best(keys)
    if best is None or best.stop - best.start - best.period < least:
        return []
    before = _within(keys[: best.start], offset, least)
    right = _within(keys[best.stop :], offset + best.stop, least)
    return [*before, Repeats(best.start + offset, best.stop + offset, best.period), *right]


def _best(keys: np.ndarray) -> Repeats | None:
    """The run that saves the most elements; among equals, the one with the shortest period."""
    best: Repeats | None = None
    for period in _periods(keys):
        same = np.concatenate(([False], keys[period:] == keys[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            saved = end - begin
            if saved < period:
                continue
            best_saved = -1 if best is None else best.stop - best.start - best.period
            if saved > best_saved or (saved == best_saved and best is not None and period < best.period):
                best = Repeats(begin, end + period, period)
    return best


def _periods(keys: np.ndarray) -> list[int]:
    """The most common distances from a key to its next occurrence, weighted: those are the likely periods."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for i, key in enumerate(keys.tolist()):
        if key in last:
            gaps[i - last[key]] += i - last[key]  # long distances weigh more: short ones occur within a stretch
        last[key] = i
    return [gap for gap, _ in gaps.most_common(_CANDIDATES)]
