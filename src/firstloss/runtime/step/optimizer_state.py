"""The state of the optimizers that step in a trace: that of a first step is there before it.

Its dicts are like others: what they held when the step began is guarded, and each call sets what the step has set in
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...capture.input_numbers import plain
from ...capture.new_optimizer_state import find_new_state
from ..guards.snapshot import Snapshot


def entries_of(state: dict[Any, Any]) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """The entries of an optimizer's state, each with its table and key: in a weight's dict, or in the state itself."""
    for key, held in state.items():
        if isinstance(held, dict):
            for name, value in held.items():
                yield held, name, value
        else:
            yield state, key, held


# By weight, its entries, and what is in them.
StateCopy = dict[Any, tuple[Any, dict[Any, Any] | None]]


def copy_of_state(optimizer: torch.optim.Optimizer) -> StateCopy:
    """What is in an optimizer's state."""
    return {p: (held, dict(held) if isinstance(held, dict) else None) for p, held in optimizer.state.items()}


def restore_state(optimizer: torch.optim.Optimizer, before: StateCopy) -> None:
    """Restore what was in an optimizer's state."""
    optimizer.state.clear()
    for p, (held, content) in before.items():
        if content is not None:
            held.clear()
            held.update(content)
        optimizer.state[p] = held


class OptimizerStates:
    """The state of the optimizers that step in a trace.

    Attributes:
        new: state that their first steps would create, created before them.
        retrace_reason: why the step must be traced at each call, if it must.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """`snapshot` was taken before the trace."""
        self._snapshot: Snapshot | None = snapshot
        self.new: list[torch.Tensor] = []
        self.retrace_reason: str | None = None
        self._before = [(optimizer, copy_of_state(optimizer)) for optimizer in snapshot.optimizers]

    def create(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], may_differ: bool) -> None:
        """Create the state that an optimizer's first `step` would create.

        Raises:
            FirstStepDiffers: see `find_new_state`.
        """
        self.new.extend(find_new_state(optimizer, step, may_differ).values())

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what is in an optimizer's state before its first step in the trace."""
        assert self._snapshot is not None
        before: StateCopy = next((before for other, before in self._before if other is optimizer), {})
        now = optimizer.state
        if any(p not in now or content is not None and (now[p] is not e or content and not e)
               for p, (e, content) in before.items()):  # fmt: skip
            self.retrace_reason = self.retrace_reason or "it drops the state of its optimizer"
        self._snapshot.keep_state(optimizer, plain)

    def end_trace(self) -> None:
        """Release what existed before the trace."""
        self._snapshot = None

    def undo(self) -> None:
        """Restore the state after a trace that is not used."""
        for optimizer, before in self._before:
            restore_state(optimizer, before)
