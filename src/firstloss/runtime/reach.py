"""What Python code a step can reach, and so which Python values it may read.

Found by names alone, without running or tracing anything: from the step's function to the globals and closure
variables that its code mentions, to the functions, classes and objects that these are, to those of their methods whose
names are mentioned anywhere, and so on. PyTorch, JAX, NumPy, Firstloss and Python's own library are not entered.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch

from .compiled import CompiledModel

# Code here reads no state of the user's.
_CLOSED = {"torch", "torchgen", "numpy", "jax", "jaxlib", "firstloss", "safetensors", *sys.stdlib_module_names}
_LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
# So much code is no step's own: a library that can reach all of itself. What lies beyond is left to `changes.verify`.
_MOST_FUNCTIONS = 4000


class Reach:
    """What can be reached from `roots`.

    Attributes:
        functions: the functions whose code may run.
        objects: the instances, classes and Python modules whose attributes that code may read.
        modules: the `nn.Module`s among the objects.
        names: every name that the code mentions.
        forwards: the code of the `forward`s of PyTorch's own modules among them.
    """

    def __init__(self, *roots: Any) -> None:
        self.functions: dict[types.CodeType, types.FunctionType] = {}
        self.objects: dict[int, Any] = {}
        self.modules: list[torch.nn.Module] = []
        self.names: set[str] = set()
        self.forwards: set[types.CodeType] = set()
        self._classes: dict[type, dict[str, list[Any]]] = {}
        self._todo: list[Any] = [*roots]
        self._fresh: set[str] = {"forward", "__call__", "step"}
        while self._todo or self._fresh:
            while self._todo and len(self.functions) < _MOST_FUNCTIONS:
                self._visit(self._todo.pop())
            self._todo.clear()
            self._look_up(self._fresh)

    def _visit(self, what: Any) -> None:
        if isinstance(what, types.FunctionType):
            self._function(what)
        elif isinstance(what, types.MethodType):
            self._todo += [what.__func__, what.__self__]
        elif isinstance(what, CompiledModel):
            self._todo.append(what.model)
        elif isinstance(what, functools.partial):
            self._todo += [what.func, *what.args, *what.keywords.values()]
        elif isinstance(what, property):
            self._todo += [f for f in (what.fget, what.fset) if f is not None]
        elif isinstance(what, (staticmethod, classmethod)):
            self._todo.append(what.__func__)
        elif hasattr(what, "__wrapped__") and not isinstance(what, type):
            self._todo.append(what.__wrapped__)
        elif isinstance(what, type):
            self._class(what)
        else:
            self._object(what)

    def _function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._todo.append(wrapped)
        code = function.__code__
        if code in self.functions or _is_closed(function.__module__):
            return
        self.functions[code] = function
        names = set(_names(code))
        self._mention(names)
        for name in names & function.__globals__.keys():
            self._follow(function.__globals__[name])
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents)
            except ValueError:  # not bound yet
                pass
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(default)

    def _follow(self, what: Any) -> None:
        """Visit a value that the code mentions, if there may be something behind it."""
        if isinstance(what, CompiledModel):
            what = what.model
        if isinstance(what, (types.FunctionType, types.MethodType, type, functools.partial)) or _holds_state(what):
            self._todo.append(what)

    def _class(self, cls: type) -> None:
        if cls in self._classes or _is_closed(cls.__module__):
            return
        self.objects[id(cls)] = cls
        self._methods(cls)

    def _methods(self, cls: type) -> None:
        """Note the methods of `cls` by name; those whose names are mentioned are visited."""
        for base in cls.__mro__:
            if base in self._classes:
                continue
            closed = _is_closed(base.__module__)
            if closed and not issubclass(base, torch.nn.Module):
                self._classes[base] = {}
                continue
            table = self._classes[base] = {}
            for name, member in vars(base).items():
                if not isinstance(member, (types.FunctionType, property, staticmethod, classmethod)):
                    continue
                if closed:
                    if name == "forward" and isinstance(member, types.FunctionType):
                        self.forwards.add(member.__code__)
                        self._mention(set(member.__code__.co_names))
                elif name in self.names:
                    self._todo.append(member)
                else:
                    table.setdefault(name, []).append(member)

    def _object(self, what: Any) -> None:
        if id(what) in self.objects:
            return
        self.objects[id(what)] = what
        if isinstance(what, types.ModuleType):
            self._attributes(vars(what))
            return
        self._methods(type(what))
        for base in type(what).__mro__:
            if not _is_closed(base.__module__):
                self.objects[id(base)] = base
        if isinstance(what, torch.nn.Module):
            self.modules.append(what)
            self._todo += [m for m in what._modules.values() if m is not None]
        self._attributes(getattr(what, "__dict__", {}))

    def _attributes(self, table: dict[str, Any]) -> None:
        for name, value in list(table.items()):
            if name in self.names:
                self._follow(value)

    def _mention(self, names: set[str]) -> None:
        fresh = names - self.names
        self.names |= fresh
        self._fresh |= fresh

    def _look_up(self, fresh: set[str]) -> None:
        """Methods and attributes that were met before their names were."""
        self.names |= fresh
        self._fresh = set()
        for table in self._classes.values():
            for name in fresh & table.keys():
                self._todo += table.pop(name)
        for what in list(self.objects.values()):
            table = getattr(what, "__dict__", {})
            for name in fresh & table.keys():
                self._follow(table[name])


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global and attribute name that `code`, or a function within it, mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _holds_state(what: Any) -> bool:
    """Whether `what` is an object of the user's that has attributes, or a Python module of the user's."""
    if isinstance(what, types.ModuleType):
        return not _is_closed(what.__name__) and not (getattr(what, "__file__", None) or "").startswith(_LIBRARY)
    if isinstance(what, torch.nn.Module):
        return True
    return hasattr(what, "__dict__") and not _is_closed(type(what).__module__) and not isinstance(what, torch.Tensor)


def _is_closed(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _CLOSED and module != "__main__"
