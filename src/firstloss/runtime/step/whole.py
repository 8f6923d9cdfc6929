"""A step in one piece whose first results come before it is compiled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import timeline
from ...program.graph import Value
from ..device import dispatch
from ..device.lazy import LazyArray, ready
from ..device.placement import begin_behind
from ..jaxlib import x64
from .first_loss import FirstLoss
from .segmented import Later


class WholeStep:
    """Called as its executable is, which is compiled behind the first results."""

    def __init__(
        self, compile: Callable[[], Any], inputs: Sequence[Value], counts: Sequence[int], first_loss: FirstLoss
    ) -> None:
        """
        Args:
            compile: gives the executable.
            inputs: the Values of the state and of the rest, in the order in which they will be given.
            counts: how many arrays are in each group of outputs but the last, which `first_loss` computes.
        """
        self.counts = counts
        self._compile = compile
        self.places = {value: i for i, value in enumerate(inputs)}
        self.first_loss: FirstLoss | None = first_loss
        self.ran = False

    @functools.cached_property
    def compiled(self) -> Any:
        """The executable; compiles it."""
        begin_behind()
        return self._compile()

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> Any:
        """An execution, as `SegmentedStep.begin`."""
        if self.ran:
            return dispatch.WholeRun(self.compiled, state, rest, seed)
        return _FirstRun(self, [*state, *rest], len(state), seed)


class _FirstRun:
    """A `Run`, as `dispatch.py` has it: its results are there first."""

    def __init__(self, step: WholeStep, given: list[Any], state: int, seed: Any) -> None:
        self._step = step
        self._given = given
        self._state = state
        self._seed = seed
        self._results: list[Any] | None = None
        self._whole: dispatch.WholeRun | None = None
        self.later: Later | None = None

    def advance(self) -> None:
        """Compute the results, and begin with the rest."""
        if self.later is not None:
            return
        step = self._step
        results = (
            self._whole is None and step.first_loss is not None and step.first_loss.attempt(self._given, step.places)
        )
        if not results:
            self._finish()
            return
        later = Later()

        def finish() -> None:
            if not later.set_running_or_notify_cancel():  # interrupted, before it began
                return
            try:
                with timeline.span("rest of the step"), x64():
                    self._finish()
                    assert self._whole is not None
                    groups = jax.block_until_ready(self._whole.outputs())
                later.set_result({(g, i): array for g, group in enumerate(groups) for i, array in enumerate(group)})
            except BaseException as error:  # raised where the state is needed
                step.first_loss = None
                later.set_exception(error)

        self._results, self.later = results, later
        threading.Thread(target=finish, name="firstloss-first-step").start()

    def _finish(self) -> None:
        if self._whole is None:
            compiled = self._step.compiled
            given = tuple(map(ready, self._given))
            self._whole = dispatch.WholeRun(compiled, given[: self._state], given[self._state :], self._seed)
        self._whole.advance()
        self._step.ran = True

    def begun(self) -> bool:
        """After an interrupt: whether state has been handed over; else it will not be."""
        if self.later is not None:
            if not self.later.cancel():
                return True
            self.later = None
            return False
        return self._whole is not None and self._whole.begun()

    def outputs(self) -> Sequence[Sequence[Any]]:
        """What the step returns, in groups; lazy where it is still to come."""
        if self.later is None:
            assert self._whole is not None
            return self._whole.outputs()
        groups = [
            tuple(LazyArray(functools.partial(self.later.of, (group, i))) for i in range(count))
            for group, count in enumerate(self._step.counts)
        ]
        return *groups, tuple(self._results or ())
