"""How to look into objects, past what their classes make of that."""

from __future__ import annotations

import functools
import gc
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

MISSING: Any = object()


def own_attributes(what: Any) -> dict | None:
    """The dict of an object's own attributes, if it has one."""
    if not type(what).__dictoffset__ and not isinstance(what, threading.local):
        return None
    table = what.__dict__ if isinstance(what, threading.local) else object.__getattribute__(what, "__dict__")
    return table if isinstance(table, dict) else None


def slot_value(what: Any, name: str) -> Any:
    """What a slot holds, MISSING if nothing."""
    for base in type(what).__mro__:
        member = base.__dict__.get(name)
        if isinstance(member, types.MemberDescriptorType):
            try:
                return member.__get__(what)
            except AttributeError:
                return MISSING
    return MISSING


def slot_reader(what: Any, name: str) -> Callable[[], Any]:
    """Gives what the slot holds at each call."""
    return functools.partial(slot_value, what, name)


def cell_content(cell: types.CellType) -> Any:
    """What a variable holds, MISSING if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def class_table(cls: type) -> dict:
    """The dict behind a class's `__dict__`, which shows it read-only."""
    return gc.get_referents(cls.__dict__)[0]


def definition(function: types.FunctionType) -> tuple:
    """What a function is made of, and can be given another."""
    defaults = function.__kwdefaults__
    return (function.__code__, function.__defaults__, None if defaults is None else tuple(defaults.items()))


def define(function: types.FunctionType, made_of: tuple) -> None:
    """Make it what `definition` gave."""
    function.__code__, function.__defaults__, keywords = made_of
    function.__kwdefaults__ = None if keywords is None else dict(keywords)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Every global and attribute that `code`, or a function within it, mentions, by name or by a string."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, tuple):  # of a match statement, or of keywords
            yield from (c for c in constant if isinstance(c, str))
