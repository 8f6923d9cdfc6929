"""Random streams during capture: which generator each operation draws from, and where.

While a constructor is captured nothing is drawn, yet every random operation has to know its position in the stream
of its generator, and user code may reseed, save and restore generators at will (`torch.manual_seed`, `fork_rng`,
`get_rng_state`). All of these go through the generator's state, so that is where the position is kept: after each
recorded draw the generator is given a *ticket*, a valid state whose words name (stream, position). Whoever saves
and restores a ticket restores the position; a state that is no ticket starts a new stream. When capture ends, each
generator that holds a ticket gets the state that eager PyTorch would have left it in. (Under the counter policy there
is no such state: it gets one that depends on the seed and on how many draws there were.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CaptureError
from ..program.source import here
from ..rng.counter_stream import CounterStream
from ..rng.stream import Position, Stream

# What a generator's state is the beginning of, under each policy.
POLICIES: dict[str, Callable[[NDArray[np.uint8]], Stream]] = {"eager": Stream.from_state, "counter": CounterStream}

# A ticket's first two state words; those of a real state are these with probability 2**-64. The third is its number.
_MAGIC = (0x46697273, 0x744C6F73)
_STATE_BYTES = 5056
# A state is an array of 64-bit words: seed, left and seeded, next, then 624 state words of 32 bits each.
_FIRST, _SECOND, _NUMBER = 3, 4, 5


class Generators:
    """The generators that the capture under way has drawn from."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # of who looks where a generator stands, and moves it on
        self._own = threading.local()
        self._captures = 0  # how many are under way, each in a thread of its own
        self._tickets: list[tuple[Stream, Position]] = []
        self._touched: dict[int, torch.Generator] = {}
        self._began: dict[int, tuple[Stream, torch.Tensor]] = {}  # of a stream, the state that somebody set
        self._drawn_from: dict[int, torch.Tensor] = {}  # likewise, of a generator that operations drew from for real

    @property
    def preserve(self) -> bool:
        """Whether this thread's capture leaves generators where they would be if it had drawn nothing."""
        return getattr(self._own, "preserve", False)

    @preserve.setter
    def preserve(self, preserve: bool) -> None:
        self._own.preserve = preserve

    @property
    def policy(self) -> str:
        """That of this thread's capture."""
        return getattr(self._own, "policy", "eager")

    @policy.setter
    def policy(self, policy: str) -> None:
        self._own.policy = policy

    def opened(self) -> None:
        """A thread begins to capture."""
        with self.lock:
            self._captures += 1

    def closed(self) -> None:
        """A thread's capture has ended."""
        with self.lock:
            self._captures -= 1
            self.settle()

    def where(self, generator: torch.Generator) -> tuple[Stream, Position]:
        """Where `generator` stands."""
        state = generator.get_state()
        number = _ticket(state)
        if number is not None:
            return self._tickets[number]
        try:
            stream = POLICIES[self.policy](state.numpy())
        except ValueError as error:
            raise CaptureError(f"{here()}: {error}. Give it one that a generator has said, by get_state().") from None
        self._began[id(stream)] = stream, self._set_state(generator, state)
        return stream, stream.start

    def _set_state(self, generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
        """The state that somebody has set and that real draws, if any, have moved to `state`."""
        before = self._drawn_from.get(id(generator))
        return state if before is None or not _same_seed(before, state) else before

    def will_draw(self, generator: torch.Generator) -> None:
        """An operation is going to move `generator` by itself."""
        state = generator.get_state()
        number = _ticket(state)
        began = None if number is None else self._began.get(id(self._tickets[number][0]))
        self._drawn_from[id(generator)] = self._set_state(generator, state) if began is None else began[1]
        self._touched[id(generator)] = generator

    def move(self, generator: torch.Generator, stream: Stream, position: Position) -> None:
        """Leave `generator` at `position` of `stream`, by a ticket."""
        with self.lock:
            before, _ = self.where(generator)
            if (
                before is not stream and id(before) in self._began
            ):  # it goes on in one that begins where this has come to
                self._began[id(stream)] = stream, self._began[id(before)][1]
            generator.set_state(self.ticket(generator, stream, position))
            self._touched[id(generator)] = generator

    def ticket(self, generator: torch.Generator, stream: Stream, position: Position) -> torch.Tensor:
        """A state of `generator` that names `position` of `stream`."""
        state = generator.get_state()
        words = state.numpy().view(np.int64)
        words[_FIRST], words[_SECOND] = _MAGIC
        with self.lock:
            words[_NUMBER] = len(self._tickets)
            self._tickets.append((stream, position))
        return state

    def named(self, state: torch.Tensor) -> tuple[Stream, Position] | None:
        """What a ticket names; None of a state that is none."""
        number = _ticket(state)
        return None if number is None else self._tickets[number]

    def load(self, generator: torch.Generator) -> None:
        """Turn a ticket into the real state, for an operation that runs for real."""
        with self.lock:
            if self.preserve:
                self.will_draw(generator)
            if _ticket(generator.get_state()) is not None:
                stream, position = self.where(generator)
                generator.set_state(torch.from_numpy(stream.state_at(position)))

    def redeem(self, state: torch.Tensor) -> None:
        """Where somebody kept a ticket in `state`, any tensor: write the real state there."""
        if is_ticket(state):
            stream, position = self._tickets[_ticket(state)]  # type: ignore[index]
            state.numpy()[:] = stream.state_at(position)

    def settle(self) -> None:
        """Leave every generator where its stream has come to."""
        with self.lock:
            for generator in self._touched.values():
                if self.preserve:
                    self._undo(generator)
                else:
                    self.load(generator)
            self._touched.clear()
            if not self._captures:  # else another thread may have kept a state that names one
                self._tickets.clear()
                self._began.clear()
                self._drawn_from.clear()

    def _undo(self, generator: torch.Generator) -> None:
        """Give `generator` the state that somebody set last."""
        state = generator.get_state()
        number = _ticket(state)
        began = None if number is None else self._began.get(id(self._tickets[number][0]))
        generator.set_state(self._set_state(generator, state) if began is None else began[1])


def _same_seed(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states of one generator may differ by draws alone: the seed stands first on a CPU and on a GPU."""
    return len(state) == len(other) and torch.equal(state[:8], other[:8])


def is_ticket(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a state that `Generator.get_state` gave out during capture."""
    plain = type(tensor) is torch.Tensor and tensor.dtype == torch.uint8 and tensor.shape == (_STATE_BYTES,)
    return plain and _ticket(tensor) is not None


def _ticket(state: torch.Tensor) -> int | None:
    """The number of the ticket that `state` is, or None."""
    if len(state) != _STATE_BYTES:  # of a generator on another device, which needs none
        return None
    words = state.numpy().view(np.int64)
    return int(words[_NUMBER]) if (words[_FIRST], words[_SECOND]) == _MAGIC else None
