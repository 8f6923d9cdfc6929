"""What Python code a step can reach, and so which Python values it may read.

Found by names alone, without running or tracing anything: from the step's function to the globals and closure
variables that its code mentions, to the functions, classes and objects that these are, to what they hold, to those of
their methods whose names are mentioned anywhere, and so on. PyTorch, JAX, NumPy, Firstloss and Python's own library are
not entered. Of installed packages only what is mentioned by name is: their tables of functions lead everywhere, and do
not change.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import contents
from .compiled import CompiledModel, module_of

# Code here reads no state of the user's.
_LIBRARIES = {"torch", "torchgen", "numpy", "jax", "jaxlib", "firstloss", "safetensors"}
_CLOSED = {*_LIBRARIES, *sys.stdlib_module_names}
_LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_INSTALLED = tuple({os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("purelib", "platlib")})
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# So much code is no step's own: a library that can reach all of itself. What lies beyond is left to `changes.verify`.
_MOST_FUNCTIONS = 4000
# And so many lists and dicts are data.
_MOST_HOLDERS = 4000
# Methods that Python calls without their name being mentioned are operators, or are for these, which no step does.
_NO_OPERATORS = {"__new__", "__init__", "__post_init__", "__del__", "__repr__", "__str__", "__format__", "__dir__",
                 "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
                 "__init_subclass__", "__class_getitem__", "__set_name__", "__sizeof__"}  # fmt: skip
_CONSTRUCTION = ("__new__", "__init__", "__post_init__")
# Code that mentions one of these may name an attribute by a string.
_BY_STRING = {"getattr", "setattr", "hasattr", "vars", "globals", "__dict__", "attrgetter"}


class Reach:
    """What can be reached from `roots`.

    Attributes:
        functions: the functions whose code may run.
        objects: the instances, classes, functions and Python modules whose attributes that code may read.
        holders: what may hold something else without an attribute being bound anew (`contents.py`).
        modules: the `nn.Module`s among the objects.
        names: every name that the code mentions.
        forwards: the code of the `forward`s of PyTorch's own modules among them.
    """

    def __init__(self, *roots: Any) -> None:
        self.functions: dict[types.CodeType, types.FunctionType] = {}
        self.objects: dict[int, Any] = {}
        self.holders: dict[int, Any] = {}
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
        if self.names & {"environ", "getenv"}:
            self.holders[id(os.environ)] = os.environ

    def _visit(self, what: Any) -> None:
        if contents.holds(what):
            self._holder(what)
        if isinstance(what, types.FunctionType):
            self._function(what)
        elif isinstance(what, types.MethodType):
            self._todo += [what.__func__, what.__self__]
        elif isinstance(what, CompiledModel):
            self._todo.append(module_of(what))
        elif isinstance(what, functools.partial):
            self._todo += [what.func, *what.args, *what.keywords.values()]
        elif isinstance(what, property):
            self._todo += [f for f in (what.fget, what.fset) if f is not None]
        elif isinstance(what, (staticmethod, classmethod)):
            self._todo.append(what.__func__)
        elif isinstance(what, type):
            self._class(what)
        elif "__wrapped__" in getattr(what, "__dict__", ()):
            self.objects[id(what)] = what
            self._todo.append(what.__wrapped__)
        elif not _is_plain(what):
            self._object(what)

    def _holder(self, what: Any) -> None:
        if id(what) in self.holders or len(self.holders) > _MOST_HOLDERS:
            return
        self.holders[id(what)] = what
        for inner in contents.inside(what):
            self._follow(inner)

    def _function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._todo.append(wrapped)
        code = function.__code__
        nowhere = function.__module__ in (None, "builtins")  # Python code that was run by exec
        if code in self.functions or _is_closed(function.__module__) and not nowhere:
            return
        self.functions[code] = function
        if function.__dict__:
            self.objects[id(function)] = function
            self._attributes(function.__dict__)
        names = set(_names(code))
        self._mention(names)
        own = not is_installed(function.__module__)
        for name in names & function.__globals__.keys():
            found = function.__globals__[name]
            if own or not contents.holds(found):
                self._follow(found)
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
            what = module_of(what)
        callables = (types.FunctionType, types.MethodType, type, functools.partial)
        if isinstance(what, callables) or _holds_state(what) or contents.holds(what):
            self._todo.append(what)

    def _class(self, cls: type) -> None:
        if cls in self._classes or _is_closed(cls.__module__):
            return
        self.objects[id(cls)] = cls
        self._methods(cls)
        for base in cls.__mro__:  # code that mentions it may make one
            if not _is_closed(base.__module__) and not is_installed(base.__module__):
                self._todo += [vars(base)[name] for name in _CONSTRUCTION if name in vars(base)]

    def _methods(self, cls: type) -> None:
        """Note the methods of `cls` by name; operators and those whose names are mentioned are visited."""
        for base in cls.__mro__:
            if base in self._classes:
                continue
            closed = _is_closed(base.__module__)
            if closed and not issubclass(base, torch.nn.Module):
                self._classes[base] = {}
                continue
            table = self._classes[base] = {}
            own = not closed and not is_installed(base.__module__)
            if own:
                self._attributes(vars(base))
            for name, member in vars(base).items():
                if not isinstance(member, (types.FunctionType, property, staticmethod, classmethod)):
                    continue
                if closed:
                    if name == "forward" and isinstance(member, types.FunctionType):
                        self.forwards.add(member.__code__)
                        self._mention(set(member.__code__.co_names))
                elif name in self.names or own and _is_operator(name):
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
        self._attributes(attributes(what))

    def _attributes(self, table: Mapping[str, Any]) -> None:
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
            own = attributes(what)
            for name in fresh & own.keys():
                self._follow(own[name])


class Slotted(Mapping[str, Any]):
    """The attributes of an object that keeps them in `__slots__`."""

    def __init__(self, owner: Any, names: set[str]) -> None:
        self._owner = owner
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        try:
            return getattr(self._owner, name)
        except AttributeError:  # not bound yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def attributes(what: Any) -> Mapping[str, Any]:
    """The attributes that are the object's own, by name."""
    table = getattr(what, "__dict__", None)
    if table is not None:
        return table
    return Slotted(what, _slots(type(what)))  # type: ignore[arg-type]


@functools.cache
def _slots(cls: Any) -> set[str]:
    """The names in the `__slots__` of a class of the user's."""
    bases = [base for base in cls.__mro__ if not _is_closed(base.__module__)]
    return {name for base in bases for name, m in vars(base).items() if isinstance(m, types.MemberDescriptorType)}


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global and attribute name that `code`, or a function within it, mentions."""
    yield from code.co_names
    if not _BY_STRING.isdisjoint(code.co_names):
        yield from (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def names_by_string(code: types.CodeType) -> bool:
    """Whether code of the user's names attributes by strings that it works out, so that it may read any."""
    if _BY_STRING.isdisjoint(code.co_names) or code.co_filename.startswith((_LIBRARY, _OURS, *_INSTALLED)):
        return False
    return not any(isinstance(c, str) and c.isidentifier() for c in code.co_consts)


def _holds_state(what: Any) -> bool:
    """Whether `what` is an object of the user's that has attributes, or a Python module of the user's."""
    if isinstance(what, types.ModuleType):
        return not _is_closed(what.__name__) and not (getattr(what, "__file__", None) or "").startswith(_LIBRARY)
    if isinstance(what, torch.nn.Module):
        return True
    if isinstance(what, torch.Tensor) or _is_plain(what):
        return False
    kind = type(what)
    if not hasattr(what, "__dict__"):
        return not _is_closed(kind.__module__) and bool(_slots(kind))  # type: ignore[arg-type]
    return _is_open_root(kind.__module__)


def _is_plain(what: Any) -> bool:
    """Whether there is nothing behind it but what `contents` sees."""
    return type(what) in (dict, list, set, tuple, str, int, float, bool, bytes, type(None), weakref.ref)


def _is_operator(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _NO_OPERATORS


def _is_closed(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _CLOSED and module != "__main__"


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module is an installed package's, and not the user's own."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and os.path.realpath(file).startswith(_INSTALLED)


def _is_open_root(module: str | None) -> bool:
    """Whether instances of that module's classes may have attributes that users set: Python's own namespaces too."""
    return module is not None and module.partition(".")[0] not in _LIBRARIES
