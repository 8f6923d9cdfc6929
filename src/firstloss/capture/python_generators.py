"""The states of the global random generators of Python and NumPy, and what a traced step draws from them.

PyTorch's generators are part of the Program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# The classes of the generators.
GENERATORS = (random.Random, np.random.RandomState)


def _numpy_state() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return name, words.tobytes(), *rest


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, words, *rest = state
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))


# How to read and set the state of each generator.
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "random": (random.getstate, random.setstate),
    "numpy": (_numpy_state, _set_numpy_state),
}


def states() -> list[Any]:
    """The states of the generators."""
    return [read() for read, _ in STATES.values()]


def restore(before: Sequence[Any]) -> None:
    """Restore what `states` returned."""
    for (read, write), state in zip(STATES.values(), before, strict=True):
        if read() != state:
            write(state)


class Draws:
    """The draws of one trace.

    Attributes:
        complete: whether nothing else has moved the generators, so that each call repeats the draws.
        count: the number of draws.
    """

    def __init__(self) -> None:
        self._states = states()
        self.complete: bool = True
        self.count: int = 0

    def draw(self, function: Callable[[], Any]) -> Any:
        """What a function of a generator draws."""
        self.check()
        value = function()
        self._states = states()
        self.count += 1
        return value

    def check(self) -> None:
        """Note whether something else has moved the generators."""
        self.complete = self.complete and states() == self._states

    def read(self, sources: Iterable[Any], arguments: Sequence[Any], known: dict[Any, Any]) -> None:
        """Draw as the trace did, and restore the generators: the call may be traced again. See `Expression.value`."""
        if self in known:
            return
        before = states()
        try:
            for source in sources:
                source.value(arguments, known)
            known[self] = states()
        finally:
            restore(before)

    def commit(self, known: dict[Any, Any]) -> None:
        """Leave the generators as the draws that were read for a call leave them."""
        if self in known:
            restore(known[self])
