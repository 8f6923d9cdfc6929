"""Direct access to what is in an object, without calling methods that its class overrides."""

from __future__ import annotations

import collections
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...compat.python_names import is_python_class

MISSING: Any = object()


def slots(cls: type) -> tuple[str, ...]:
    """The names in the `__slots__` of a Python class."""
    names = _slots.get(cls)
    if names is None:
        bases = [base for base in cls.__mro__ if is_python_class(base) and "__slots__" in vars(base)]
        members = [(name, member) for base in bases for name, member in vars(base).items()]
        names = _slots[cls] = tuple(n for n, member in members if isinstance(member, types.MemberDescriptorType))
    return names


_slots: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def own_attributes(obj: Any) -> dict[Any, Any] | None:
    """The `__dict__` of an object itself, if it has one."""
    if not type(obj).__dictoffset__ and not isinstance(obj, threading.local):
        return None
    table = obj.__dict__ if isinstance(obj, threading.local) else object.__getattribute__(obj, "__dict__")
    return table if isinstance(table, dict) else None


def slot_value(obj: Any, name: str) -> Any:
    """The value of a slot, MISSING if it is empty."""
    for base in type(obj).__mro__:
        member = base.__dict__.get(name)
        if isinstance(member, types.MemberDescriptorType):
            try:
                return member.__get__(obj)
            except AttributeError:
                return MISSING
    return MISSING


def cell_content(cell: types.CellType) -> Any:
    """The value of a cell, MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def class_table(cls: type) -> dict[Any, Any]:
    """The dict behind a class's `__dict__`, which is a read-only view of it."""
    return gc.get_referents(cls.__dict__)[0]


def definition(function: types.FunctionType) -> tuple[Any, ...]:
    """The parts of a function that can be replaced: code, defaults and the like."""
    defaults = function.__kwdefaults__
    return (function.__code__, function.__defaults__, None if defaults is None else tuple(defaults.items()))


def define(function: types.FunctionType, made_of: tuple[Any, ...]) -> None:
    """Restore what `definition` returned."""
    function.__code__, function.__defaults__, keywords = made_of
    function.__kwdefaults__ = None if keywords is None else dict(keywords)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Every global and attribute that `code`, or a function defined in it, mentions, as a name or in a string."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, tuple):  # names in a match statement, or of keyword arguments
            yield from (c for c in constant if isinstance(c, str))


def size(container: Any) -> int:
    """The number of items of a list, set, deque, tuple or dict."""
    cls: Any = type(container)
    return len(container) if cls.__len__ in _PLAIN_LENGTHS else builtin_base(cls).__len__(container)


_CONTAINERS: tuple[type, ...] = (list, set, tuple, frozenset, dict, collections.deque, collections.OrderedDict,
                                 collections.defaultdict)  # fmt: skip
_PLAIN_LENGTHS: set[Any] = {cls.__len__ for cls in _CONTAINERS}  # type: ignore[attr-defined]


def items_of(container: Any) -> list[Any]:
    """A shallow copy of the items of a list, set, deque or tuple."""
    return list(_raw_iteration(container))  # not of the container itself, whose class may have a `__len__` of its own


def _raw_iteration(container: Any) -> Iterator[Any]:
    base = builtin_base(type(container))
    return base.__iter__(container) if hasattr(base, "__iter__") else iter(container)


def table_of(table: dict[Any, Any]) -> dict[Any, Any]:
    """A shallow copy of a dict, in order, without calling overridden methods."""
    if type(table) is dict:
        return table.copy()
    if isinstance(table, collections.OrderedDict):
        return {key: dict.__getitem__(table, key) for key in collections.OrderedDict.__iter__(table)}
    return dict(dict.items(table))


def empty_like(container: Any) -> Callable[[], Any]:
    """A function that creates an empty container of the same class."""
    cls = type(container)
    base = builtin_base(cls)
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


def builtin_base(cls: type) -> Any:
    """The class of C that a class derives from: `object`, `dict` and so on."""
    return next(base for base in cls.__mro__ if not is_python_class(base))


def set_items(container: Any, items: list[Any]) -> None:
    """Replace the items of a list, set or deque."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), items)
        return
    base = builtin_base(type(container))
    base.clear(container)
    (set.update if issubclass(base, set) else base.extend)(container, items)


def set_table(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Replace the entries of a dict, in order."""
    if type(table) is dict:
        table.clear()
        table.update(entries)
        return
    base = builtin_base(type(table))
    base.clear(table)
    for key, value in entries.items():
        base.__setitem__(table, key, value)


class ModuleProxy:
    """A proxy for a module: all its attributes but `_model` are those of the module."""

    __slots__ = ()


def module_of(compiled: ModuleProxy) -> torch.nn.Module:
    """The module behind a proxy."""
    return compiled.__dict__["_model"]
