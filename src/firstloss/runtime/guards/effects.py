"""Side effects of a step on Python objects: found by comparing with the snapshot, and replayed at each call.

After a call every name holds what eager PyTorch would have bound: new tensors where the step creates them, the same
objects where it only moves them, new containers where it creates those. After the trace the effects are undone, so that
the traced call ends as every later one does.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

from ...capture.input_numbers import is_input_number
from . import mutable_state
from .equality import same, same_items
from .external_state import set_state, state_of
from .guards import with_article
from .object_kinds import (
    MISSING,
    ObjectKind,
    define,
    definition,
    items_of,
    kind_of,
    set_items,
    set_table,
    slot_value,
    table_of,
)
from .reconstruct import CallFrame, Make, Reconstructor
from .snapshot import Snapshot
from .sources import GuardSources

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


def removing_from(container_of: Make, name: str) -> Callable[[CallFrame], Bind]:
    """Removes an item from a dict."""
    return lambda env: functools.partial(container_of(env).pop, name, None)


def delete_name(table: dict, name: Any, delete: Callable[[Any], None]) -> None:
    """Delete a name unless it is gone already."""
    if name in table:
        delete(name)


def adding(container: Any, items: list) -> Bind:
    """Appends items to a collection."""
    kind = kind_of(type(container))
    if kind is ObjectKind.SET:
        return functools.partial(set.update, container, items)
    if kind is ObjectKind.LIST:
        return functools.partial(list.__setitem__, container, slice(len(container), None), items)
    return functools.partial(set_items, container, [*container, *items])


def added_to(container: Any, before: list, now: list) -> list | None:
    """The items that were appended; None if there are other changes."""
    if kind_of(type(container)) is ObjectKind.SET:
        return [item for item in now if not any(item is old for old in before)] if len(now) >= len(before) else None
    if getattr(container, "maxlen", None) is not None:
        for count in range(1, len(now) + 1):  # as many were appended at one end as were dropped at the other
            remaining = before[max(0, len(before) + count - container.maxlen) :]
            if len(remaining) + count == len(now) and all(map(operator.is_, remaining, now)):
                return now[len(remaining) :]
        return None
    return now[len(before) :] if len(now) >= len(before) and all(map(operator.is_, before, now)) else None


def repeated(counted: tuple, now: Any) -> Callable[[Any], Any] | None:
    """The binding that repeats `n += 1` at each call; None if the number has changed otherwise."""
    before, updates, once = counted
    if type(before) is int and type(now) is int and all(type(u.constant) is int for u in updates):
        difference = now - before
        return lambda number: number + difference
    if once and same(updates[0].combine(before, updates[0].constant), now):
        combine, constant = updates[0]
        return lambda number: combine(number, constant)
    return None


class Effects:
    """The changes that a traced step has made to Python objects.

    Attributes:
        changed_ids: the ids of the dicts, lists, cells and objects that have changed.
        retrace_reason: a change that cannot be replayed, so that the step has to be traced at each call; None if there
            is no such change.
        takes_from_sets: sets have changed other than by additions: their order may not be restored.
        bindings: replay the changes: given a call's frame, each creates a binding of that call. All of them are created
            before the first is executed.
    """

    def __init__(self, snapshot: Snapshot, reads: GuardSources | None, reconstructor: Reconstructor) -> None:
        """
        Args:
            reads: what the step has read; None if the effects are only to be undone.
        """
        self.changed_ids: set[int] = set()
        self.retrace_reason: str | None = None
        self.takes_from_sets = False
        self._undo: list[Bind] = []
        self.bindings: list[Callable[[CallFrame], Bind]] = []
        self._reconstructor = reconstructor
        for table in snapshot.tables.values():
            if not (table.before or table.table):
                continue
            if table.kind == "items":
                self._items(table.table, table.before, reads)
            else:
                self._names(table.table, table.before, table.owner, reads)
        for container, before in snapshot.sequences.values():
            self._sequence(container, before, reads)
        for cell, content in snapshot.cells.values():
            self._cell(cell, content, reads)
        for slotted in snapshot.slotted.values():
            for name, before in zip(slotted.names, slotted.before, strict=True):
                self._slot(slotted.owner, name, before, reads)
        for obj, cls in snapshot.types:
            if type(obj) is not cls:
                self.changed_ids.add(id(obj))
                self._undo.append(functools.partial(object.__setattr__, obj, "__class__", cls))
                new = type(obj)
                self.bindings.append(always(functools.partial(object.__setattr__, obj, "__class__", new)))
        for module, name, old in snapshot.module_names.values():
            if (now := vars(module).get(name, MISSING)) is not old:
                self._module_name(vars(module), name, old, now)
        for function, made_of in snapshot.definitions.values():
            if not same(made_of, now := definition(function)):
                self._replay(function, functools.partial(define, function), made_of, now)
        environment = mutable_state.environment()
        changed = mutable_state.environment_changes(snapshot.environment, environment)
        if changed:
            old_values = mutable_state.environment_changes(environment, snapshot.environment)
            self._replay(os.environ, mutable_state.set_environment, old_values, changed)
        if reads is not None and reads.sets_filters and snapshot.filters != (now := mutable_state.filters()):
            self._replay(warnings, mutable_state.set_filters, snapshot.filters, now)
        for generator, state in reads.generators if reads is not None else ():
            if not same(state, now := state_of(generator)):
                self._replay(generator, functools.partial(set_state, generator), state, now)
        for content, read, before in snapshot.opaque.values():
            if id(content) in snapshot.sequences or id(content) in snapshot.tables:
                continue
            if isinstance(content, contextvars.ContextVar):
                self._context(content, before, reads)
            elif reads is not None and (_has_run(content, reads) or not same(before, read())):
                self._content(content, before, read(), reads)

    def _replay(self, obj: Any, set_value: Callable[[Any], Any], before: Any, after: Any) -> None:
        """A change that is replayed by setting the value after the step, and undone by setting the value before it."""
        self.changed_ids.add(id(obj))
        self._undo.append(functools.partial(set_value, before))
        self.bindings.append(always(functools.partial(set_value, after)))

    def _content(self, content: Any, before: Any, after: Any, reads: GuardSources) -> None:
        """The contents of an array, a buffer or a generator have changed."""
        reads.guard_content(content)
        if mutable_state.restore_contents(content, after):
            self._replay(content, functools.partial(mutable_state.restore_contents, content), before, after)
        else:
            self.changed_ids.add(id(content))
            self.retrace_reason = f"it consumes or changes {with_article(type(content).__qualname__)}"

    def _module_name(self, table: dict, name: str, old: Any, now: Any) -> None:
        self.changed_ids.add(id(table))
        set_name: Callable[[Any], None] = functools.partial(table.__setitem__, name)
        delete = functools.partial(delete_name, table, name, table.__delitem__)
        self._undo.append(functools.partial(set_name, old) if old is not MISSING else delete)
        self.bindings.append(setting(set_name, self._reconstructor.make(now)) if now is not MISSING else always(delete))

    def add(self, undo: Bind, apply: Callable[[CallFrame], Bind]) -> None:
        """Register a change that another part of the step has found."""
        self._undo.append(undo)
        self.bindings.append(apply)

    def undo(self) -> None:
        """Undo all changes."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()  # releases the former values

    # -- comparing with the snapshot --

    def _names(self, table: dict, before: dict, owner: Any, reads: GuardSources | None) -> None:
        if _unchanged(table, before):
            return
        self.changed_ids.add(id(table))
        set_name: Callable[[Any, Any], None] = table.__setitem__
        delete: Callable[[Any], None] = table.__delitem__
        if isinstance(owner, type):  # assignments to a class must go through `setattr`
            set_name, delete = functools.partial(type.__setattr__, owner), functools.partial(type.__delattr__, owner)
        holds_arguments = self._reconstructor.holds_arguments(table)
        container_of = self._reconstructor.container(table)
        for name, now in list(table.items()):
            old = before.get(name, MISSING)
            if now is old:
                continue
            if isinstance(name, str) and name.startswith("_firstloss"):  # ours
                continue
            self._undo.append(
                functools.partial(delete, name) if old is MISSING else functools.partial(set_name, name, old)
            )
            if holds_arguments:
                self.bindings.append(setting_in(container_of, name, self._reconstructor.make(now)))
                continue
            self._bind((id(table), name), old, now, functools.partial(set_name, name), lambda n=name: table[n], reads)
        for name in before.keys() - table.keys():
            self._undo.append(functools.partial(set_name, name, before[name]))
            if holds_arguments:
                self.bindings.append(removing_from(container_of, name))
                continue
            self.bindings.append(always(functools.partial(delete_name, table, name, delete)))

    def _bind(self, key: tuple, old: Any, now: Any, set_value: Any, get_value: Any, reads: GuardSources | None) -> None:
        counted = None if reads is None or is_input_number(now) else reads.updates.numbers.get(key)
        if counted is not None and reads is not None:
            update = repeated(counted, now)
            if update is not None:
                self.bindings.append(lambda env: functools.partial(set_value, update(get_value())))
                return
            reads.guard_number(key)
        make = self._reconstructor.make(now)
        self.bindings.append(setting(set_value, make))

    def _cell(self, cell: types.CellType, old: Any, reads: GuardSources | None) -> None:
        try:
            now = cell.cell_contents
        except ValueError:
            now = MISSING
        if now is old:
            return
        self.changed_ids.add(id(cell))

        def put(value: Any) -> None:
            if value is MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = value

        self._undo.append(functools.partial(put, old))
        if now is MISSING:
            self.bindings.append(always(functools.partial(put, MISSING)))
        else:
            self._bind((id(cell), None), old, now, put, lambda: cell.cell_contents, reads)

    def _slot(self, owner: Any, name: str, old: Any, reads: GuardSources | None) -> None:
        now = slot_value(owner, name)
        if now is old:
            return
        self.changed_ids.add(id(owner))

        def put(value: Any) -> None:
            if value is MISSING:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, value)

        self._undo.append(functools.partial(put, old))
        if now is MISSING:
            self.bindings.append(always(functools.partial(put, MISSING)))
        else:
            self._bind((id(owner), name), old, now, put, lambda: slot_value(owner, name), reads)

    def _context(self, variable: contextvars.ContextVar, old: Any, reads: GuardSources | None) -> None:
        now = mutable_state.value_in(variable)
        if now is old:
            return
        self.changed_ids.add(id(variable))

        def put(value: Any) -> None:
            variable.set(value)

        self._undo.append(functools.partial(put, old))
        if reads is not None:
            reads.guard_content(variable)
        self.bindings.append(setting(put, self._reconstructor.make(now)))

    def _items(self, table: dict, before: dict, reads: GuardSources | None) -> None:
        now = table_of(table)
        if _unchanged(now, before):
            return
        self._undo.append(lambda: set_table(table, before))
        if self._counted(table, before, now, reads):
            return
        self.changed_ids.add(id(table))
        if reads is not None and not self._reconstructor.holds_arguments(table):
            reads.guard_content(table)
        container_of = self._reconstructor.container(table)
        if same_items(list(now), list(before)):  # rebound in place
            for key, value in now.items():
                if value is not before[key]:
                    self.bindings.append(setting_in(container_of, key, self._reconstructor.make(value)))
            return
        parts = [(self._reconstructor.make(key), self._reconstructor.make(value)) for key, value in now.items()]
        self.bindings.append(
            lambda env: functools.partial(set_table, container_of(env), {key(env): make(env) for key, make in parts})
        )

    def _counted(self, container: Any, before: Any, now: Any, reads: GuardSources | None) -> bool:
        """Whether the step only updates numbers in a dict or a list; each call then repeats the updates."""
        item_updates = None if reads is None else reads.updates.item_updates(container, before, now)
        if item_updates is None:
            return False
        updates = [(key, repeated(counted, now[key])) for key, counted in item_updates]
        if any(update is None for _, update in updates):
            return False

        def counting(key: Any, update: Any) -> Callable[[CallFrame], Bind]:
            return lambda env: functools.partial(operator.setitem, container, key, update(container[key]))

        self.bindings += [counting(key, update) for key, update in updates]
        return True

    def _sequence(self, container: Any, before: list, reads: GuardSources | None) -> None:
        now = items_of(container)
        if reads is not None and reads.updates.only_collected(container):
            reads.guard_collection(container, before)
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return
        self._undo.append(lambda: set_items(container, before))
        if reads is None or self._counted(container, before, now, reads):
            return
        self.changed_ids.add(id(container))
        added = added_to(container, before, now) if reads.updates.only_collected(container) else None
        if added is not None:
            makes = [self._reconstructor.make(item) for item in added]
            self.bindings.append(lambda env: adding(container, [make(env) for make in makes]))
            return
        self.takes_from_sets = self.takes_from_sets or isinstance(container, set)
        container_of = self._reconstructor.container(container)
        if not self._reconstructor.holds_arguments(container):
            reads.guard_content(container)
        makes = [self._reconstructor.make(item) for item in now]
        if kind_of(type(container)) is ObjectKind.LIST and len(now) == len(before):
            changed = [(i, makes[i]) for i in range(len(now)) if now[i] is not before[i]]

            for i, make in changed:
                self.bindings.append(setting_in(container_of, i, make))
            return
        self.bindings.append(lambda env: functools.partial(set_items, container_of(env), [make(env) for make in makes]))


def _has_run(content: Any, reads: GuardSources) -> bool:
    """Whether it is a generator that may have run, even if its position is the same."""
    return isinstance(content, types.GeneratorType) and content.gi_code in reads.ran


def restore_contents(snapshot: Snapshot) -> bool:
    """Restore arrays, buffers and the like. Returns whether nothing else has changed that cannot be restored, such as
    the position of an iterator."""
    restored = True
    for content, read, before in snapshot.opaque.values():
        bound = id(content) in snapshot.sequences or id(content) in snapshot.tables  # undone with the other effects
        if not bound and not isinstance(content, contextvars.ContextVar) and not same(before, read()):
            restored = mutable_state.restore_contents(content, before) and restored
    return restored


def _unchanged(table: dict, before: dict) -> bool:
    if len(table) != len(before) or not all(map(operator.is_, table.values(), before.values())):
        return False
    return same_items(list(table), list(before))
