"""Classes and modules."""

from __future__ import annotations

import abc
import sys
import types
from typing import Any

from ..access import class_table
from ..guards import describe_global
from ..kind import Kind, of
from ..packages import is_closed, is_closed_class, is_installed, is_runtime, module_of_class
from ..reconstruct import Make, Reconstructor, constant
from ..snapshot import IMPLICIT_NAMES, OF_FIELDS, SETTINGS_OF_SYS, Snapshot
from ..states import Table
from ..value_guards import Values

_IMPLICIT_ATTRIBUTES = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
                        "_abc_impl", "__dataclass_fields__"}  # fmt: skip


@of(type)
class Class(Kind):
    """A class: its attributes and its bases, if it is not a library's."""

    refers = True

    def visit(self, obj: type, snapshot: Snapshot, stack: list[Any]) -> None:
        if is_closed_class(obj):
            return
        table = class_table(obj)
        snapshot.keep(Table(table, table.copy(), obj, "attributes"))
        skipped = _IMPLICIT_ATTRIBUTES if is_installed(module_of_class(obj)) else _IMPLICIT_ATTRIBUTES - OF_FIELDS
        stack += [value for name, value in table.items() if name not in skipped]
        stack += [base for base in (type(obj), *obj.__mro__[1:]) if not is_closed_class(base)]

    def guard(self, obj: type, values: Values, description: str, name: str) -> None:
        if not is_closed_class(obj):
            values.of_class(obj, set())
        if isinstance(obj, abc.ABCMeta):
            token = abc.get_cache_token
            values.read("abc", token, token(), "the registry of abstract base classes", name)

    def make(self, obj: type, reconstructor: Reconstructor) -> Make:
        return constant(obj)


@of(types.ModuleType)
class Module(Kind):
    """A module: its globals, if it is the user's."""

    def visit(self, obj: types.ModuleType, snapshot: Snapshot, stack: list[Any]) -> None:
        if obj is sys:
            stack += [getattr(sys, name) for name in SETTINGS_OF_SYS]
        if is_closed(obj.__name__) or is_installed(obj.__name__):
            return
        table = vars(obj)
        snapshot.keep(Table(table, table.copy(), obj.__name__, "globals"))
        found = [value for name, value in table.items() if name not in IMPLICIT_NAMES]
        stack += [value for value in found if not isinstance(value, types.ModuleType)]

    def guard(self, obj: types.ModuleType, values: Values, description: str, name: str) -> None:
        if not is_closed(obj.__name__):
            if not is_installed(obj.__name__):
                values.mentioned_in(vars(obj), describe_global(vars(obj)))
        elif not is_runtime(obj.__name__):
            values.library_module(vars(obj))

    def make(self, obj: types.ModuleType, reconstructor: Reconstructor) -> Make:
        return constant(obj)
