"""The states that kinds keep in a snapshot: what a step can change in an object, how that is undone, and repeated."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

from .access import MISSING, cell_content, define, definition, items_of, set_items, set_table, slot_value, table_of
from .effects import Bind, Effects, always, delete_name, setting, setting_in
from .equality import same, same_items
from .kind import State
from .reconstruct import CallFrame, Make, is_constant
from .set_tables import SetTable, can_read_tables


class Table(State):
    """A dict of attributes, globals or items.

    Attributes:
        owner: the object with these attributes; the module's name for globals; None for a dict's own items.
        kind: "attributes", "globals" or "items".
    """

    __slots__ = ("owner", "kind")
    order = 0

    def __init__(self, held: dict[Any, Any], before: dict[Any, Any], owner: Any, kind: str) -> None:
        super().__init__(held, before)
        self.owner: Any = owner
        self.kind: str = kind

    @property
    def group(self) -> type[State]:
        return Table

    def is_unchanged(self, now: dict[Any, Any]) -> bool:
        """Whether the dict holds the same objects in the same order, if it holds these now."""
        if len(now) != len(self.before) or not all(map(operator.is_, now.values(), self.before.values())):
            return False
        return same_items(list(now), list(self.before))

    def compare(self, effects: Effects) -> None:
        table, before = self.held, self.before
        if self.is_unchanged(table):
            return
        effects.changed_ids.add(id(table))
        make = effects.reconstructor.make
        put, delete = table.__setitem__, table.__delitem__
        if isinstance(self.owner, type):  # assignments to a class must go through `setattr`
            put = functools.partial(type.__setattr__, self.owner)
            delete = functools.partial(type.__delattr__, self.owner)
        holds_arguments = effects.reconstructor.holds_arguments(table)
        container_of = effects.reconstructor.container(table)
        for name, now in list(table.items()):
            old = before.get(name, MISSING)
            if now is old or isinstance(name, str) and name.startswith("_firstloss"):
                continue
            effects.undoes(functools.partial(delete, name) if old is MISSING else functools.partial(put, name, old))
            if holds_arguments:
                effects.bindings.append(setting_in(container_of, name, make(now, old)))
            else:
                effects.bindings.append(effects.putting(functools.partial(put, name), now, old))
        moved = list(table) != [*(n for n in before if n in table), *(n for n in table if n not in before)]
        removed = before.keys() - table.keys()
        if (moved or removed) and not isinstance(self.owner, type):
            effects.undoes(functools.partial(_put_in_order, table, list(before)))
        for name in removed:
            effects.undoes(functools.partial(put, name, before[name]))
            if holds_arguments:
                effects.bindings.append(_removing_from(container_of, name))
            else:
                effects.bindings.append(always(functools.partial(delete_name, table, name, delete)))
        if moved and not isinstance(self.owner, type):
            left = list(table)
            effects.bindings.append(lambda env: functools.partial(_put_in_order, container_of(env), left))


def _put_in_order(table: dict[Any, Any], names: list[Any]) -> None:
    """Move the names of a dict to its end, in the order of `names`."""
    for name in names:
        if name in table:
            table[name] = table.pop(name)


def _removing_from(container_of: Make, name: Any) -> Callable[[CallFrame], Bind]:
    return lambda env: functools.partial(container_of(env).pop, name, None)


class Items(Table):
    """The items of a dict."""

    __slots__ = ()

    def __init__(self, held: dict[Any, Any], before: dict[Any, Any]) -> None:
        super().__init__(held, before, None, "items")

    def compare(self, effects: Effects) -> None:
        table, before = self.held, self.before
        now = table_of(table)
        if self.is_unchanged(now):
            return
        effects.undoes(functools.partial(set_table, table, before))
        container_of = effects.changed_container(table)
        make = effects.reconstructor.make
        if same_items(list(now), list(before)):  # rebound in place
            for key, value in now.items():
                if value is not before[key]:
                    effects.bindings.append(setting_in(container_of, key, make(value, before[key])))
            return
        parts = [(make(key), make(value)) for key, value in now.items()]
        effects.bindings.append(
            lambda env: functools.partial(set_table, container_of(env), {key(env): make(env) for key, make in parts})
        )


class Sequence(State):
    """The items of a list, a set or a deque."""

    __slots__ = ("kind",)

    def __init__(self, held: Any, before: list[Any], kind: Any) -> None:
        """`kind`: of the container, a `Collection`."""
        super().__init__(held, before)
        self.kind: Any = kind

    def compare(self, effects: Effects) -> None:
        container, before, reads = self.held, self.before, effects.reads
        now = items_of(container)
        only_added_to = reads is not None and reads.additions.includes(container)
        if reads is not None and only_added_to:
            reads.guard_collection(container, before)
        if self.is_unchanged(now):
            return
        effects.undoes(self.restoring())
        if reads is None:
            return
        make = effects.reconstructor.make
        added = self.kind.added_to(container, before, now) if only_added_to else None
        if added is not None:
            effects.changed_ids.add(id(container))
            parts = [make(item) for item in added]
            add = self.kind.add
            effects.bindings.append(lambda env: add(container, [part(env) for part in parts]))
            return
        container_of = effects.changed_container(container)
        if isinstance(container, list) and len(now) == len(before):
            for i, (item, old) in enumerate(zip(now, before, strict=True)):
                if item is not old:
                    effects.bindings.append(setting_in(container_of, i, make(item, old)))
            return
        effects.bindings.append(self.repeating(effects, container_of, [make(item) for item in now]))

    def is_unchanged(self, now: list[Any]) -> bool:
        """Whether the container is the same as before, if these are its items now."""
        return len(now) == len(self.before) and all(map(operator.is_, now, self.before))

    def restoring(self) -> Bind:
        """A binding that restores the container."""
        return functools.partial(set_items, self.held, self.before)

    def repeating(self, effects: Effects, container_of: Make, makes: list[Make]) -> Callable[[CallFrame], Bind]:
        """A function that returns bindings of what the step has left in the container: items that `makes` return."""
        return lambda env: functools.partial(set_items, container_of(env), [part(env) for part in makes])


class SetItems(Sequence):
    """The items of a set, and their order."""

    __slots__ = ("table",)

    def __init__(self, held: set[Any], before: list[Any], kind: Any) -> None:
        super().__init__(held, before, kind)
        self.table = SetTable(held)

    @property
    def group(self) -> type[State]:
        return Sequence

    def is_unchanged(self, now: list[Any]) -> bool:
        return super().is_unchanged(now) and SetTable(self.held).order() == self.table.order()

    def restoring(self) -> Bind:
        return functools.partial(self.table.restore, self.held)

    def repeating(self, effects: Effects, container_of: Make, makes: list[Make]) -> Callable[[CallFrame], Bind]:
        if not can_read_tables():
            effects.retrace_reason = effects.retrace_reason or "it takes items out of a set, whose order is unknown"
        elif effects.reads is not None:
            effects.reads.guard_order(self.held, self.table)
        if not all(map(is_constant, makes)):  # new objects, whose hashes differ at each call
            return super().repeating(effects, container_of, makes)
        left = SetTable(self.held)
        return lambda env: functools.partial(left.restore, container_of(env))


# -- attributes, functions and their variables --


class Slots(State):
    """The attributes of an object that are in `__slots__`."""

    __slots__ = ()

    def compare(self, effects: Effects) -> None:
        for name, old in self.before.items():
            now = slot_value(self.held, name)
            if now is not old:
                effects.rebound(self.held, old, now, functools.partial(_set_slot, self.held, name))


def _set_slot(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


class ClassOf(State):
    """The class of an object, which the step may replace."""

    __slots__ = ()
    order = 2  # slots are set on objects of their own class

    def compare(self, effects: Effects) -> None:
        if type(self.held) is not self.before:
            put = functools.partial(object.__setattr__, self.held, "__class__")
            effects.replaced(self.held, put, self.before, type(self.held))


class CellContent(State):
    """The content of a cell."""

    __slots__ = ()

    def compare(self, effects: Effects) -> None:
        now = cell_content(self.held)
        if now is not self.before:
            effects.rebound(self.held, self.before, now, functools.partial(_set_cell, self.held))


def _set_cell(cell: types.CellType, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


class Definition(State):
    """The code of a function, and its default arguments."""

    __slots__ = ()

    def compare(self, effects: Effects) -> None:
        if not same(self.before, now := definition(self.held)):
            effects.replaced(self.held, functools.partial(define, self.held), self.before, now)


class NameInModule(State):
    """A name in a module that is not entered, which the step may set."""

    __slots__ = ("name",)

    def __init__(self, module: types.ModuleType, name: str) -> None:
        super().__init__(module, vars(module).get(name, MISSING))
        self.name: str = name

    def compare(self, effects: Effects) -> None:
        table = vars(self.held)
        now = table.get(self.name, MISSING)
        if now is self.before:
            return
        effects.changed_ids.add(id(table))
        put = functools.partial(table.__setitem__, self.name)
        delete = functools.partial(delete_name, table, self.name, table.__delitem__)
        effects.undoes(functools.partial(put, self.before) if self.before is not MISSING else delete)
        make = effects.reconstructor.make
        effects.bindings.append(setting(put, make(now, self.before)) if now is not MISSING else always(delete))


class Content(State):
    """The content of an object, as `read` returns it."""

    __slots__ = ("read",)
    order = 3

    def __init__(self, held: Any, read: Callable[[], Any]) -> None:
        super().__init__(held, read())
        self.read: Callable[[], Any] = read

    @property
    def group(self) -> type[State]:
        return Content

    def is_unchanged(self) -> bool:
        """Whether the content is what it was."""
        return same(self.before, self.read())

    def restore(self) -> bool:
        """Restore the content if it has changed; returns False where that is impossible."""
        return True  # what is compared in parts, is undone with the other effects

    def can_be_restored(self) -> bool:
        """Whether `restore` can undo what has changed: tried, and set again."""
        return True
