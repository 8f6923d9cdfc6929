"""Containers filled past what their own classes make of that."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from ...compat.python_names import is_python_class
from .object_kinds import ObjectKind, kind_of


def empty_like(container: Any) -> Callable[[], Any]:
    """Makes an empty container of the same class."""
    cls = type(container)
    base = _builtin(cls)
    if isinstance(container, collections.deque):
        length = container.maxlen
        return lambda: _initialized(base.__new__(cls), base, (), length)
    if isinstance(container, collections.defaultdict):
        factory = container.default_factory
        return lambda: _initialized(base.__new__(cls), base, factory)
    return lambda: base.__new__(cls)


def _initialized(new: Any, base: Any, *args: Any) -> Any:
    base.__init__(new, *args)
    return new


def _builtin(cls: type) -> Any:
    """The class of C that `cls` derives from."""
    return next(base for base in cls.__mro__ if not is_python_class(base))


def set_items(container: Any, items: list[Any]) -> None:
    """Make `items` all that is in a list, set or deque."""
    kind = kind_of(type(container))
    if kind is ObjectKind.LIST:
        list.__setitem__(container, slice(None), items)
        return
    base = _builtin(type(container))
    base.clear(container)
    (set.update if kind is ObjectKind.SET else base.extend)(container, items)


def set_table(table: dict, entries: dict) -> None:
    """Make `entries` all that is in a dict, in their order."""
    if type(table) is dict:
        table.clear()
        table.update(entries)
        return
    base = _builtin(type(table))
    base.clear(table)
    for key, value in entries.items():
        base.__setitem__(table, key, value)
