"""Bindings: how a call updates one name, item or collection that the step has changed, once the step has run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from .equality import same
from .introspection import set_items
from .object_kinds import ObjectKind, kind_of
from .reconstruct import CallFrame, Make

# Executes a binding. Idempotent.
Bind = Callable[[], None]


def always(bind: Bind) -> Callable[[CallFrame], Bind]:
    """The same binding at each call."""
    return lambda env: bind


def setting(put: Callable[[Any], None], make: Make) -> Callable[[CallFrame], Bind]:
    """Sets the value that `make` returns."""
    return lambda env: functools.partial(put, make(env))


def setting_in(place: Make, key: Any, make: Make) -> Callable[[CallFrame], Bind]:
    """Sets an item of a dict or a list directly, without calling overridden methods."""

    def apply(env: CallFrame) -> Bind:
        container = place(env)
        put = dict.__setitem__ if isinstance(container, dict) else list.__setitem__
        return functools.partial(put, container, key, make(env))

    return apply


def removing_from(place: Make, name: str) -> Callable[[CallFrame], Bind]:
    """Removes an item from a dict."""
    return lambda env: functools.partial(place(env).pop, name, None)


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
            kept = before[max(0, len(before) + count - container.maxlen) :]
            if len(kept) + count == len(now) and all(map(operator.is_, kept, now)):
                return now[len(kept) :]
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
