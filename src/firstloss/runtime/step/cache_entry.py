"""`CacheEntry`: a compiled step, and the guards of its trace."""

from __future__ import annotations

import functools
import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch

from ..guards.guard_set import GuardSet
from ..guards.guards import Change
from .arguments import Arguments
from .traced_program import TracedProgram
from .tracing import TraceObserver

if TYPE_CHECKING:
    from ..backend import Models
    from .compiled_step import CompiledStep

# The fraction of time that is spent at most on checking for changes that cannot be seen.
_CHECKING = 0.01


class CacheEntry:
    """A compiled step, and the guards of its trace.

    Attributes:
        called: the number of the last call of it.
        models: the numbers of the models whose weights it reads.
        weights: the ids of these weights.
    """

    def __init__(self, step: CompiledStep, observer: TraceObserver, seconds: float, models: Models) -> None:
        """`models`: those of its backend."""
        assert observer.guards is not None
        self.step = step
        self.called = 0
        read = weights_read(step.traced, models)
        self.models: frozenset[int] = frozenset(read)
        self.weights: frozenset[int] = frozenset(id(weight) for weights in read.values() for weight in weights)
        self.guards: GuardSet = observer.guards
        self.optimizers = observer.snapshot.optimizers
        # Whether the executed code is known. If not, names that it computes may be read unnoticed: the next call traces
        # again, and records the code.
        self.records_code: bool = observer.records_code
        self.writes: bool = bool(observer.recording.writes.calls)  # known where it records the code
        self.moves_generators: bool = observer.moves_generators
        self.uses = 0
        self._unseen: str | None = None
        self.again = 0  # how often it was retraced for its own changes
        self.seconds = seconds  # duration of a trace
        if self.guards.weak:  # holding objects would keep alive what the step may find dead
            self.guards.release()
        self._checked = time.perf_counter()

    def changes(self, arguments: Arguments) -> list[Change]:
        """What it reads that has changed since it was traced."""
        return self._other_changes(arguments) + self.guards.changes_of_gradients()

    def fits(self, arguments: Arguments) -> bool:
        """Whether nothing has changed. In this order: gradients differ most often between entries, and guards let go of
        tensors that the last call has replaced, which may be views of weights."""
        has_changed = self.guards.changes_of_gradients() or self._other_changes(arguments) or self.step.outdated()
        return not has_changed

    def differs_in_new_numbers(self, arguments: Arguments, known: Container[Any]) -> bool:
        """Whether only numbers that may become inputs are others than when it was traced, and not all do already, which
        are in the places `known`."""
        changed = [change.place for change in ([] if self.step.outdated() else self.changes(arguments))]
        return None not in changed and any(place is not None and place.id not in known for place in changed)

    def differs_in_gradients(self, arguments: Arguments) -> bool:
        """Whether it would fit if other weights required gradients, or had some."""
        return bool(self.guards.changes_of_gradients()) and not self._other_changes(arguments)

    def _other_changes(self, arguments: Arguments) -> list[Change]:
        return self.guards.changes(self.step.traced.owners.move, arguments.leaves, arguments.known)

    @property
    def traced_each_time(self) -> str | None:
        """Why it must be traced at each call, if it must."""
        if self.step.traced.retrace_reason is not None:
            return str(self.step.traced.retrace_reason)
        for held, description in self.guards.unguardable.values():
            kind = type(held).__qualname__
            return f"it reads {description}, an object of type {kind}, whose changes cannot be detected"
        for call in self.guards.external_calls:
            return f"{call.line or 'it'} calls {call.function}(), which may return something else each time"
        return self._unseen or self._too_large

    def differs_unseen(self) -> None:
        """Note that it behaved differently at the next call, although nothing that is guarded had changed."""
        self._unseen = "its second call behaved differently from its first for an unknown reason"

    @functools.cached_property
    def _too_large(self) -> str | None:
        """What user code reads that is too large to be compared at each call."""
        lines = self.guards.lines
        for name, description in self.guards.too_large:
            line = lines.where_read(name, user_code=True)
            if line is not None or lines.where_read(name) is None:  # not found in the code: read by a computed name
                return f"{line or 'it'} reads {description}, which is too large to compare at each call"
        return None

    def changes_by_step(self, changes: list[Change]) -> list[Change]:
        """Those of `changes` that the step itself has made, except replaced tensors with which it can continue."""
        changed_by_step = [change for change in changes if change.container_id in self.step.traced.effects.changed_ids]
        return [c for c in changed_by_step if not (isinstance(c.old, torch.Tensor) and isinstance(c.new, torch.Tensor))]

    def shares_program(self, other: CacheEntry) -> bool:
        """Whether only its guards are others: it has the same executable, and the same outcomes of what is read."""
        return self.step.shares_executable(other.step) and self.step.traced.outcomes == other.step.traced.outcomes

    @property
    def made_for(self) -> tuple[frozenset[int], int]:
        """The models and weights that it is for: of those, a number, since there may be thousands."""
        return self.models, hash(self.weights)

    def check_is_due(self) -> bool:
        """Whether to trace again although no guard has failed."""
        if self.uses == 1:
            return True
        if not self.step.traced.trace.runs_eagerly:  # all processes must trace it at the same call
            return False
        return time.perf_counter() - self._checked > self.seconds / _CHECKING


def weights_read(traced: TracedProgram, models: Models) -> dict[int, list[torch.Tensor]]:
    """The weights that, or whose gradients, are inputs, by the number of their model."""
    read = {number: traced.owners.among(model.parameters()) for number, model in models.numbered().items()}
    return {number: weights for number, weights in read.items() if weights}
