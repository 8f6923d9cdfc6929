"""Side effects of a step on Python objects: found by comparing with the snapshot, and replayed at each call.

After a call every name holds what eager PyTorch would have bound: new tensors where the step creates them, the same
objects where it only moves them, new containers where it creates those. After the trace the effects are undone, so that
the traced call ends as every later one does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .access import MISSING
from .reconstruct import CallFrame, Make, Reconstructor

# Executes a binding: the update of one name, item or collection that the step has changed, once the step has run.
# Idempotent.
Bind = Callable[[], None]


def always(bind: Bind) -> Callable[[CallFrame], Bind]:
    """The same binding at each call."""
    return lambda env: bind


def setting(set_value: Callable[[Any], None], make: Make) -> Callable[[CallFrame], Bind]:
    """Sets the value that `make` returns."""
    return lambda env: functools.partial(set_value, make(env))


def setting_in(container_of: Make, key: Any, make: Make) -> Callable[[CallFrame], Bind]:
    """Sets an item of a dict or a list directly, without calling overridden methods."""

    def apply(env: CallFrame) -> Bind:
        container = container_of(env)
        set_item = dict.__setitem__ if isinstance(container, dict) else list.__setitem__
        return functools.partial(set_item, container, key, make(env))

    return apply


def delete_name(table: dict[Any, Any], name: Any, delete: Callable[[Any], None]) -> None:
    """Delete a name unless it is gone already."""
    if name in table:
        delete(name)


class Effects:
    """The changes that a traced step has made to Python objects; see `Snapshot.compare`.

    Attributes:
        reads: what the step has read, a `GuardSources`; None if the effects are only to be undone.
        reconstructor: recreates new objects.
        changed_ids: the ids of the dicts, lists, cells and objects that have changed.
        retrace_reason: a change that cannot be replayed, so that the step has to be traced at each call; None if there
            is no such change.
        bindings: replay the changes: given a call's frame, each creates a binding of that call. All of them are created
            before the first is executed.
    """

    def __init__(self, reads: Any, reconstructor: Reconstructor) -> None:
        self.reads = reads
        self.reconstructor = reconstructor
        self.changed_ids: set[int] = set()
        self.retrace_reason: str | None = None
        self.bindings: list[Callable[[CallFrame], Bind]] = []
        self._undo: list[Bind] = []

    def undo(self) -> None:
        """Undo all changes."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()  # releases the former values

    def add(self, undo: Bind, apply: Callable[[CallFrame], Bind]) -> None:
        """Register a change: how it is undone, and how each call repeats it."""
        self._undo.append(undo)
        self.bindings.append(apply)

    # -- for states --

    def undoes(self, undo: Bind) -> None:
        """Register how a change is undone."""
        self._undo.append(undo)

    def replaced(self, held: Any, put: Callable[[Any], Any], before: Any, after: Any) -> None:
        """A change that is repeated by putting the same value after each step, and undone by putting the value before
        it."""
        self.changed_ids.add(id(held))
        self.add(functools.partial(put, before), always(functools.partial(put, after)))

    def rebound(self, held: Any, old: Any, now: Any, put: Callable[[Any], Any]) -> None:
        """A place of `held`, which has another value `now`, or MISSING."""
        self.changed_ids.add(id(held))
        make = always(functools.partial(put, MISSING)) if now is MISSING else self.putting(put, now, old)
        self.add(functools.partial(put, old), make)

    def putting(self, put: Callable[[Any], Any], now: Any, before: Any = MISSING) -> Callable[[CallFrame], Bind]:
        """Puts the value that the step has left in place of `before`: a new one at each call, if the step has made
        it."""
        return setting(put, self.reconstructor.make(now, before))

    def changed_container(self, container: Any) -> Make:
        """Note that the items of a container have changed; returns a function that finds it at each call."""
        self.changed_ids.add(id(container))
        if self.reads is not None and not self.reconstructor.holds_arguments(container):
            self.reads.guard_content(container)
        return self.reconstructor.container(container)
