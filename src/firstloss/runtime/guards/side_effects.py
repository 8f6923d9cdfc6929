"""Whether a function may have side effects, as its bytecode shows: if not, it can run twice."""

from __future__ import annotations

import builtins
import functools
import importlib
import types
from typing import Any

import numpy as np

from .access import cell_content
from .bytecode import Instruction, instructions, with_inner
from .guards import undisguised

_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE",
           "DELETE_DEREF", "IMPORT_NAME")  # fmt: skip
_OF_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_MODULES = tuple(map(importlib.import_module, ("math", "_operator", "_bisect")))
_KNOWN = {np.interp, np.clip, np.where} | {getattr(builtins, name) for name in (
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max",
    "min", "pow", "range", "reversed", "round", "sorted", "str", "sum", "super", "tuple", "zip")}  # fmt: skip
_METHODS = {"get", "items", "keys", "values", "index", "count"}  # of containers, which change nothing


def has_side_effects(function: Any) -> bool:
    """Whether it may have side effects, where its code shows that it has none."""
    return _Search().function(function)


def method_has_side_effects(cls: type, name: str) -> bool:
    """Likewise, of a method, which may set attributes of its object."""
    return _Search().method(cls, name)


class _Search:
    """The search in a function, and in those that it calls."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def function(self, function: Any, cls: type | None = None) -> bool:
        """`cls`: that of the object whose method it is, which is a copy; None for another function."""
        function = undisguised(function)
        if isinstance(function, functools.partial):
            return any(map(self.function, (function.func, *function.args, *function.keywords.values())))
        if isinstance(function, types.MethodType):
            return self.function(function.__func__)
        if not isinstance(function, types.FunctionType):
            return callable(function) and not _is_known(function)
        if function.__module__.startswith("torch.optim.") or function.__code__ in self._seen:
            return False
        self._seen.add(function.__code__)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        inner = with_inner(function.__code__)
        return any(self._code(code, function, {n: cell_content(c) for n, c in cells.items()}, cls) for code in inner)

    def method(self, cls: type, name: str) -> bool:
        """Of a method, with those of the same name that it overrides."""
        found = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        found = [f.__func__ if isinstance(f, (staticmethod, classmethod)) else f for f in found]
        return not found or any(self.function(f, cls) for f in found)

    def _code(
        self, code: types.CodeType, function: types.FunctionType, cells: dict[str, Any], cls: type | None
    ) -> bool:
        steps = instructions(code)
        for i, step in enumerate(steps):
            if step.name in _STORES or step.name in _OF_ATTRIBUTES and cls is None:
                return True
            if step.name == "STORE_DEREF" and step.argument in function.__code__.co_freevars:
                return True
            if step.name in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF"):
                known, value = _value(step, function, cells)
                if known and not isinstance(value, types.ModuleType) and self.function(value):
                    return True
            known, value = _looked_up(steps[: i + 1], function, cells) if _looks_up(step) else (False, None)
            if known:  # whether it is called is not
                if not isinstance(value, types.ModuleType) and step.argument not in _METHODS and self.function(value):
                    return True
            elif _looks_up_method(step):
                is_own = cls is not None and hasattr(cls, step.argument)
                if self.method(cls, step.argument) if cls and is_own else step.argument not in _METHODS:
                    return True
        return False


def _value(step: Instruction, function: types.FunctionType, cells: dict[str, Any]) -> tuple[bool, Any]:
    """Whether the value that an instruction loads is known, and it."""
    if step.name == "LOAD_GLOBAL":
        table = function.__globals__
        known = step.argument in table or hasattr(builtins, step.argument)
        return known, table.get(step.argument, getattr(builtins, step.argument, None))
    return step.argument in cells, cells.get(step.argument)


def _looked_up(steps: list[Instruction], function: types.FunctionType, cells: dict[str, Any]) -> tuple[bool, Any]:
    """Whether what the last instruction looks up is an attribute of a known object, as in `np.linalg.norm`, and it;
    None if that is made when it is looked up."""
    path = []
    while steps and _looks_up(steps[-1]):
        path.append(steps[-1].argument)
        steps = steps[:-1]
    known, value = _value(steps[-1], function, cells) if steps else (False, None)
    for part in reversed(path) if known else ():
        value = getattr(value, "__dict__", {}).get(part, getattr(type(value), part, None))
    return known, value


def _is_known(function: Any) -> bool:
    """Whether a class, or a function of C, has no side effects."""
    if isinstance(function, type):
        return function in _KNOWN or issubclass(function, (BaseException, np.number))
    of_module = isinstance(function, types.BuiltinFunctionType) and function.__self__ in _MODULES
    return isinstance(function, np.ufunc) or of_module or any(function is known for known in _KNOWN)


def _looks_up(step: Instruction) -> bool:
    return step.name in ("LOAD_ATTR", "LOAD_METHOD")


def _looks_up_method(step: Instruction) -> bool:
    return step.name in ("LOAD_METHOD", "LOAD_SUPER_METHOD", "LOAD_SUPER_ATTR") or (
        step.name == "LOAD_ATTR" and "NULL" in step.symbol
    )
