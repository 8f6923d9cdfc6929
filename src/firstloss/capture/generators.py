"""Track the stream positions of generators during capture.

While a constructor is captured nothing is drawn, but every random operation needs its position in the stream of its
generator, and user code may seed, save and restore generators (`torch.manual_seed`, `fork_rng`, `get_rng_state`). All
of these use the generator's state, so the position is stored there: after each recorded draw the generator gets a
*ticket*, a valid state whose words encode (stream, position). Saving and restoring a ticket restores the position; a
state that is not a ticket starts a new stream. When capture ends, each generator that has a ticket gets the state that
eager PyTorch would have left. (Under the counter policy, a state that depends on the seed and the number of draws.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compat.locks import fork_safe_lock
from ..errors import CaptureError
from ..program.source import here
from ..rng.counter_stream import CounterStream
from ..rng.stream import Position, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The stream that begins at a generator's state, by policy.
POLICIES: dict[str, Callable[[NDArray[np.uint8]], Stream]] = {"eager": Stream.from_state, "counter": CounterStream}

# The first two state words of a ticket, which a real state has with probability 2**-64. The third is its number.
_MAGIC = (0x46697273, 0x744C6F73)
_STATE_BYTES = 5056
# A state is an array of 64-bit words: seed, left and seeded, next, then 624 words of 32 bits each.
_FIRST, _SECOND, _NUMBER = 3, 4, 5


class Generators:
    """The generators that active captures have drawn from."""

    def __init__(self) -> None:
        self.lock: Any = fork_safe_lock(delays_forks=True)  # held while a position is read and advanced
        self._this_thread = threading.local()
        self._captures = 0  # the number of active ones, each in its own thread
        self._traces: set[Any] = set()  # the active ones
        self._tickets: list[tuple[Stream, Position]] = []
        self._touched: dict[int, torch.Generator] = {}
        self._origin_states: dict[int, tuple[Stream, torch.Tensor]] = {}  # by stream, the state that the user set
        self._states_before_draws: dict[int, torch.Tensor] = {}  # likewise by generator, after real draws

    @property
    def preserve(self) -> bool:
        """Whether this thread's capture restores generators as if nothing had been drawn."""
        return getattr(self._this_thread, "preserve", False)

    @preserve.setter
    def preserve(self, preserve: bool) -> None:
        self._this_thread.preserve = preserve

    @property
    def policy(self) -> str:
        """The policy of this thread's capture."""
        return getattr(self._this_thread, "policy", "eager")

    @policy.setter
    def policy(self, policy: str) -> None:
        self._this_thread.policy = policy

    def begin_capture(self) -> None:
        """Note that a thread begins to capture."""
        with self.lock:
            self._captures += 1

    def end_capture(self) -> None:
        """Note that a thread's capture has ended, and give the generators their real states."""
        with self.lock:
            self._captures -= 1
            self.restore_states()

    def begin_trace(self, trace: Any) -> None:
        """Keep tickets until `end_trace`: the step may have read one, and set it again after a capture of its own."""
        with self.lock:
            self._traces.add(trace)

    def end_trace(self, trace: Any) -> None:
        """Note that a step's trace has ended. Idempotent."""
        with self.lock:
            self._traces.discard(trace)
            self._forget()

    def locate(self, generator: torch.Generator) -> tuple[Stream, Position]:
        """The stream of `generator`, and its position in it."""
        state = generator.get_state()
        number = _ticket(state)
        if number is not None:
            return self._tickets[number]
        try:
            stream = POLICIES[self.policy](state.numpy())
        except ValueError as error:
            raise CaptureError(f"{here()}: {error}. Use a state that Generator.get_state() has returned.") from None
        self._origin_states[id(stream)] = stream, self._last_set_state(generator, state)
        return stream, stream.start

    def _last_set_state(self, generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
        """The state that the user last set, which draws have since advanced to `state`."""
        before = self._states_before_draws.get(id(generator))
        return state if before is None or not _same_seed(before, state) else before

    def will_draw(self, generator: torch.Generator) -> None:
        """Note that an operation is about to draw from `generator`."""
        self._states_before_draws[id(generator)] = self._user_state(generator)
        self._touched[id(generator)] = generator

    def _user_state(self, generator: torch.Generator) -> torch.Tensor:
        """The state of `generator` that the user set last."""
        state = generator.get_state()
        number = _ticket(state)
        origin = None if number is None else self._origin_states.get(id(self._tickets[number][0]))
        return self._last_set_state(generator, state) if origin is None else origin[1]

    def move(self, generator: torch.Generator, stream: Stream, position: Position) -> None:
        """Move `generator` to `position` of `stream`, by a ticket."""
        with self.lock:
            state = generator.get_state()
            if id(stream) not in self._origin_states:  # a DeferredOffsetStream, which follows another stream
                before = self.locate(generator)[0]
                if id(before) in self._origin_states:
                    self._origin_states[id(stream)] = stream, self._origin_states[id(before)][1]
            self._touched[id(generator)] = generator  # first: if this is interrupted, `restore_states` finds the ticket
            generator.set_state(self._to_ticket(state, stream, position))

    def ticket(self, generator: torch.Generator, stream: Stream, position: Position) -> torch.Tensor:
        """A state of `generator` that encodes `position` of `stream`."""
        return self._to_ticket(generator.get_state(), stream, position)

    def _to_ticket(self, state: torch.Tensor, stream: Stream, position: Position) -> torch.Tensor:
        """`state`, overwritten by a ticket that encodes `position` of `stream`."""
        words = state.numpy().view(np.int64)
        words[_FIRST], words[_SECOND] = _MAGIC
        with self.lock:
            words[_NUMBER] = len(self._tickets)
            self._tickets.append((stream, position))
        return state

    def named(self, state: torch.Tensor) -> tuple[Stream, Position] | None:
        """The stream and position that a ticket encodes; None for any other state."""
        number = _ticket(state)
        return None if number is None else self._tickets[number]

    def load(self, generator: torch.Generator) -> None:
        """Replace a ticket by the real state, for an operation that really draws."""
        with self.lock:
            if self.preserve:
                self.will_draw(generator)
            if _ticket(generator.get_state()) is not None:
                stream, position = self.locate(generator)
                generator.set_state(torch.from_numpy(stream.state_at(position)))

    def redeem(self, state: torch.Tensor) -> None:
        """If the tensor `state` is a ticket, overwrite it with the real state."""
        if is_ticket(state):
            stream, position = self._tickets[_ticket(state)]  # type: ignore[index]
            state.numpy()[:] = stream.state_at(position)

    def restore_states(self) -> None:
        """Replace all tickets in generators by real states."""
        with self.lock:
            for generator in self._touched.values():
                if self.preserve:
                    generator.set_state(self._user_state(generator))
                else:
                    self.load(generator)
            self._touched.clear()
            self._forget()

    def _forget(self) -> None:
        """Drop tickets, unless a capture or a trace may hold one."""
        if not self._captures and not self._traces:
            self._tickets.clear()
            self._origin_states.clear()
            self._states_before_draws.clear()


def _same_seed(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states of a generator have the same seed, which comes first on a CPU and on a GPU."""
    return len(state) == len(other) and torch.equal(state[:8], other[:8])


def is_ticket(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ticket."""
    plain = type(tensor) is torch.Tensor and tensor.dtype == torch.uint8 and tensor.shape == (_STATE_BYTES,)
    return plain and _ticket(tensor) is not None


def _ticket(state: torch.Tensor) -> int | None:
    """The number of a ticket; None for any other state."""
    if state.numel() != _STATE_BYTES:  # of a generator on another device
        return None
    first, second, number = state.numpy().view(np.int64)[_FIRST : _NUMBER + 1].tolist()
    return number if (first, second) == _MAGIC else None
