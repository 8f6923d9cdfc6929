"""Observation of the Python side of a trace: the state before it, what the step reads, and its side effects."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from ..guards.bindings import always
from ..guards.effects import Effects, restore_contents
from ..guards.guard_set import GuardSet
from ..guards.mutable_state import restore_environment
from ..guards.reconstruct import Reconstructor
from ..guards.recording import Recording
from ..guards.snapshot import Snapshot
from ..guards.sources import GuardSources, generators, restore_generators


class TraceObserver:
    """Created before a trace, and queried after it.

    Attributes:
        noted: whether the executed code was recorded.
    """

    def __init__(self, roots: Iterable[Any], functions: Iterable[types.FunctionType], profile: bool) -> None:
        """
        Args:
            roots: where to start the search for what the step's Python code can reach.
            functions: functions that an earlier trace has called.
            profile: whether to record the executed code.
        """
        self._generators = generators()
        self.snapshot = Snapshot(roots, functions)
        self.recording = Recording(self.snapshot.classes, profile)
        self.guards: GuardSet | None = None
        self.noted = profile

    def effects(self, left: Reconstructor, weights: set[int]) -> Effects:
        """The step's side effects in Python. Guards are created as well.

        Args:
            weights: the ids of the backend's weights.
        """
        reads = GuardSources(self.snapshot, self.recording)
        effects = Effects(self.snapshot, reads, left)
        if generators() != self._generators:
            before, after = self._generators, generators()
            effects.add(lambda: restore_generators(before), always(lambda: restore_generators(after)))
        self.guards = reads.guards(self._generators, weights)
        self.recording.forget()
        return effects

    def restore(self, left: Reconstructor) -> None:
        """Undo all changes of a step that could not be traced."""
        Effects(self.snapshot, None, left).undo()

    def restore_contents(self) -> bool:
        """Undo changes of arrays, buffers, the environment and generators; returns whether nothing else has changed."""
        restore_environment(self.snapshot.environment)
        restore_generators(self._generators)
        return restore_contents(self.snapshot)
