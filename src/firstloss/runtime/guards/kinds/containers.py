"""Dicts, lists, sets, deques and tuples."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch

from ..access import builtin_base, empty_like, items_of, set_items, set_table, size, slots, table_of
from ..equality import same_items
from ..guards import ListGuard
from ..kind import of
from ..reconstruct import CallFrame, Make, Reconstructor, constant, is_constant
from ..set_tables import SetTable
from ..snapshot import LARGEST, Snapshot
from ..states import Content, Items, Sequence, SetItems
from ..value_guards import Values
from .contents import FIXED
from .instances import WithAttributes, guard_class

# Containers with more items than this are not compared in full at each call (65,536 items take a quarter of a
# millisecond), but by length and a sample of `_SAMPLED` items.
MAX_ITEMS = 1 << 16
_SAMPLED = 1 << 10


class Container(WithAttributes):
    """A container, which is walked and compared item by item unless it is too large."""

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        if size(obj) > LARGEST:
            snapshot.keep(Content(obj, self.reader(obj)))
        self.visit_items(obj, snapshot, stack)

    def visit_items(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        """As `visit`, for the items."""
        raise NotImplementedError

    def all_of(self, obj: Any) -> list[Any]:
        """All items; the keys and the values of a dict."""
        return items_of(obj)

    def sample(self, obj: Any, length: int) -> tuple[Any, ...]:
        """Some items of a container that is too large to be compared."""
        base = builtin_base(type(obj))
        ends = (base.__iter__(obj), base.__reversed__(obj))  # where dicts and deques grow
        return tuple([item for end in ends for item in itertools.islice(end, _SAMPLED // 2)])

    def reader(self, obj: Any) -> Callable[[], Any]:
        """Returns a function that reads up to `LARGEST` items as a tuple; for more items, it returns the same object as
        long as they are the same."""
        last: list[Any] = []

        def read() -> Any:
            nonlocal last
            length = size(obj)
            if length <= LARGEST:
                return tuple(self.all_of(obj))
            if length > MAX_ITEMS:
                return length, *self.sample(obj, length)
            items = self.all_of(obj)
            if not same_items(last, items):
                last = items
            return last

        return read

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        if size(obj) > LARGEST:
            values.note_size(self._too_large(obj), description, name)
        self.guard_items(obj, values, description, name)
        guard_class(obj, values)

    def guard_items(self, obj: Any, values: Values, description: str, name: str) -> None:
        """As `guard`, for the items."""
        raise NotImplementedError

    def _too_large(self, obj: Any) -> str | None:
        """A description of a large container, if something in it may change undetected."""
        changes = not isinstance(obj, (tuple, frozenset)) and size(obj) > MAX_ITEMS
        others = {kind.__name__ for kind in _mutable(self.all_of(obj))}
        description = f"a {type(obj).__name__} of {size(obj):,} items"
        return description + (f" ({', '.join(sorted(others))})" if others else "") if changes or others else None


def _mutable(items: Iterable[Any]) -> set[type]:
    """The mutable types among these items and the items of tuples in them."""
    kinds = set(map(type, items))
    if tuple in kinds:
        kinds = (kinds | {type(x) for item in items if type(item) is tuple for x in item}) - {tuple}
    return {kind for kind in kinds if kind not in FIXED and not issubclass(kind, (np.generic, torch.Tensor, Enum))}


# -- dicts --


@of(dict)
class DictKind(Container):
    """A dict, whose items are compared one by one and in order."""

    def visit_items(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        before = table_of(obj)
        snapshot.keep(Items(obj, before))
        snapshot.items([*before, *before.values()], stack)
        if isinstance(obj, collections.defaultdict):
            stack.append(obj.default_factory)

    def all_of(self, obj: Any) -> list[Any]:
        return [*dict.keys(obj), *dict.values(obj)]

    def sample(self, obj: Any, length: int) -> tuple[Any, ...]:
        keys = super().sample(obj, length)
        return *keys, *(dict.__getitem__(obj, key) for key in keys)

    def guard_items(self, obj: Any, values: Values, description: str, name: str) -> None:
        if isinstance(obj, collections.defaultdict):
            values.fields(obj, ("default_factory",), description, name)
        if values.content(obj, f"the content of {description}", name):
            return
        before = values.before(obj)
        guard = values.table(obj, lambda key: f"the content of {description}", name)
        guard.whole = True
        guard.expected = dict(before)
        for part in (*before, *before.values()):
            values.value(part, description, name)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        parts = [(reconstructor.make(key), reconstructor.make(part)) for key, part in table_of(obj).items()]
        attributes = reconstructor.attributes(obj)

        def fill(new: Any, env: CallFrame) -> None:
            set_table(new, {key(env): part(env) for key, part in parts})
            attributes(new, env)

        return reconstructor.once(obj, empty_like(obj), fill)


# -- sequences and sets --


class Collection(Container):
    """A container of items that can be added to."""

    collects = True
    state: type[Sequence] = Sequence

    def visit_items(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        items = items_of(obj)
        snapshot.keep(self.state(obj, items, self))
        snapshot.items(items, stack)

    def guard_items(self, obj: Any, values: Values, description: str, name: str) -> None:
        items = values.snapshot.items_before(obj)
        inside = f"the content of {description}"
        if not values.content(obj, inside, name):
            self.guard_each(obj, items, values, inside, name)
        for item in items if len(items) <= LARGEST else ():
            values.value(item, description, name)

    def guard_each(self, obj: Any, items: list[Any], values: Values, description: str, name: str) -> None:
        """Guard a container of few items, which were these before the step."""
        values.read(id(obj), self.reader(obj), tuple(items), description, name)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        parts = [reconstructor.make(part) for part in items_of(obj)]
        attributes = reconstructor.attributes(obj)

        def fill(new: Any, env: CallFrame) -> None:
            set_items(new, [part(env) for part in parts])
            attributes(new, env)

        return reconstructor.once(obj, empty_like(obj), fill)

    def added_to(self, obj: Any, before: list[Any], now: list[Any]) -> list[Any] | None:
        """The items that were appended; None if there are other changes."""
        return now[len(before) :] if len(now) >= len(before) and all(map(operator.is_, before, now)) else None

    def add(self, obj: Any, items: list[Any]) -> Callable[[], None]:
        """A binding that appends items."""
        return functools.partial(set_items, obj, [*obj, *items])


@of(list)
class ListKind(Collection):
    """A list."""

    def sample(self, obj: Any, length: int) -> tuple[Any, ...]:
        return tuple(list.__getitem__(obj, slice(None, None, length // _SAMPLED)))

    def guard_each(self, obj: Any, items: list[Any], values: Values, description: str, name: str) -> None:
        values.lists[id(obj)] = ListGuard(obj, items, description, name)

    def add(self, obj: Any, items: list[Any]) -> Callable[[], None]:
        return functools.partial(list.__setitem__, obj, slice(len(obj), None), items)


@of(set)
class SetKind(Collection):
    """A set."""

    state = SetItems

    def sample(self, obj: Any, length: int) -> tuple[Any, ...]:
        return ()

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        parts = [reconstructor.make(part) for part in items_of(obj)]
        if not all(map(is_constant, parts)):
            return super().make(obj, reconstructor)
        table, attributes = SetTable(obj), reconstructor.attributes(obj)

        def fill(new: Any, env: CallFrame) -> None:
            table.restore(new)
            attributes(new, env)

        return reconstructor.once(obj, empty_like(obj), fill)

    def added_to(self, obj: Any, before: list[Any], now: list[Any]) -> list[Any] | None:
        return [item for item in now if not any(item is old for old in before)] if len(now) >= len(before) else None

    def add(self, obj: Any, items: list[Any]) -> Callable[[], None]:
        return functools.partial(set.update, obj, items)


@of(collections.deque)
class DequeKind(Collection):
    """A deque."""

    def guard_each(self, obj: Any, items: list[Any], values: Values, description: str, name: str) -> None:
        values.deques[id(obj)] = ListGuard(obj, items, description, name)

    def added_to(self, obj: Any, before: list[Any], now: list[Any]) -> list[Any] | None:
        if obj.maxlen is None:
            return super().added_to(obj, before, now)
        for count in range(1, len(now) + 1):  # as many were appended at one end as were dropped at the other
            remaining = before[max(0, len(before) + count - obj.maxlen) :]
            if len(remaining) + count == len(now) and all(map(operator.is_, remaining, now)):
                return now[len(remaining) :]
        return None


@of(tuple, frozenset)
class TupleKind(Container):
    """A tuple or a frozenset: immutable itself, but not what it holds."""

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        items = items_of(obj)
        snapshot.items(items, stack)

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        if size(obj) > LARGEST:
            values.note_size(self._too_large(obj), description, name)
            return
        for item in items_of(obj):
            values.value(item, description, name)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        parts = [reconstructor.make(part) for part in items_of(obj)]
        if all(map(is_constant, parts)):
            return constant(obj)
        cls = type(obj)
        if cls in (tuple, frozenset):
            return lambda env: cls([part(env) for part in parts])
        if hasattr(cls, "n_sequence_fields"):  # a class of C, as those of torch.return_types
            return lambda env: cls([part(env) for part in parts])
        base, attributes = builtin_base(cls), reconstructor.attributes(obj)
        if base not in (tuple, frozenset) or slots(cls):
            return reconstructor.cannot(obj)

        def make(env: CallFrame) -> Any:
            new = base.__new__(cls, [part(env) for part in parts])
            attributes(new, env)
            return new

        return make
