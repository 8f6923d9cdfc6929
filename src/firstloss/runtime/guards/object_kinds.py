"""The kinds of objects that guards distinguish, and direct access to each.

Objects are read and filled without calling methods that their classes override.
"""

from __future__ import annotations

import array
import ast
import collections
import contextlib
import contextvars
import datetime
import decimal
import enum
import functools
import gc
import logging
import operator
import os
import random
import re
import struct
import sys
import sysconfig
import threading
import types
import weakref
import zoneinfo
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import numpy as np
import torch

from ...compat.python_names import has_managed_dict, is_python_class, lru_cache_wrapper
from .mutable_state import C_DATA, FOREIGN, LOCKS, has_pointers, has_readable_position, is_iterator_of_c
from .native import native

# The code of these packages reads no state of the user's.
_LIBRARIES = {"torch", "torchgen", "numpy", "jax", "jaxlib", "firstloss", "safetensors", "sympy", "mpmath",
              "typing_extensions", "opt_einsum", "ml_dtypes", "triton", "packaging", "_pytest", "pytest"}  # fmt: skip
_CLOSED = {*_LIBRARIES, *sys.stdlib_module_names}
# Objects of these packages are not walked: they are the runtime itself.
_OURS = ("firstloss.", "jax.", "jaxlib.")
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # our own code
INSTALLED_FOLDERS = tuple({os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("purelib", "platlib")})


WEAK = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)


class ObjectKind(Enum):
    """How the snapshot treats an object."""

    LEAF = auto()  # immutable, with nothing in it
    TENSOR = auto()
    DICT = auto()
    LIST = auto()
    SET = auto()
    DEQUE = auto()
    TUPLE = auto()  # or a frozenset: immutable itself, but not what it holds
    FUNCTION = auto()
    CELL = auto()
    BINDING = auto()  # a method, a partial, a property: refers to other objects
    CLASS = auto()
    MODULE = auto()  # a Python module
    OPAQUE = auto()  # its content is not in attributes or items, but `mutable_state.py` can detect changes
    OURS = auto()  # an object of this package that users hold: schedules, metrics
    INSTANCE = auto()
    UNKNOWN = auto()  # a C object whose changes cannot be detected


# Immutable, and refer to no other objects. Listed one by one, since the `__module__` of a C class is not reliable.
LEAVES: tuple[type, ...] = (
    int, float, bool, str, bytes, complex, type(None), type(...), type(NotImplemented), range, types.CodeType,
    types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias,
    types.UnionType, operator.attrgetter, re.Pattern, re.Match, struct.Struct, decimal.Decimal, contextvars.Token,
    datetime.date, datetime.time, datetime.timedelta, datetime.timezone,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator, torch.Stream,
    type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor), np.dtype, np.generic, np.ufunc,
    logging.Manager,
)  # fmt: skip
# C classes with Python subclasses whose instances have no hidden state.
_PLAIN_BASES = {object, types.SimpleNamespace, datetime.tzinfo, zoneinfo.ZoneInfo}
# Modules of packages whose C classes have no mutable state that matters.
_HARMLESS = {"typing", "torch", "pybind11_builtins", "_abc", "_collections"}
# C classes whose instances refer to other objects that cannot be exchanged.
_HOLDERS: tuple[type, ...] = (
    slice, super, operator.itemgetter, operator.methodcaller, type(functools.cmp_to_key(lambda a, b: 0)),
    type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip
# C classes whose content, or the memory that they refer to, cannot be watched.
_UNKNOWN: tuple[type, ...] = (
    weakref.finalize,  # reads a registry of the standard library
    torch.jit.ScriptModule,  # its attributes are in C++
    torch.UntypedStorage, torch.TypedStorage, memoryview, types.FrameType, types.TracebackType, types.CoroutineType,
    types.AsyncGeneratorType, *FOREIGN,
)  # fmt: skip


def kind_of(cls: type) -> ObjectKind:
    """The kind of a class's instances. A container with attributes counts as a container."""
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _kind_of(cls)
    return kind


_kinds: dict[type, ObjectKind] = {}


def _kind_of(cls: type) -> ObjectKind:
    if issubclass(cls, enum.Enum):
        return ObjectKind.LEAF if is_closed_class(cls) and not _changes(cls) else ObjectKind.INSTANCE
    if issubclass(cls, np.void):  # a row of an array
        return ObjectKind.UNKNOWN if issubclass(cls, np.record) else ObjectKind.OPAQUE
    if issubclass(cls, LEAVES):
        return ObjectKind.INSTANCE if _has_attributes(cls) and not is_closed_class(cls) else ObjectKind.LEAF
    if issubclass(cls, _UNKNOWN) or issubclass(cls, C_DATA) and has_pointers(cls):
        return ObjectKind.UNKNOWN
    for kinds, kind in (
        (torch.Tensor, ObjectKind.TENSOR),
        (dict, ObjectKind.DICT),
        (list, ObjectKind.LIST),
        (set, ObjectKind.SET),
        (collections.deque, ObjectKind.DEQUE),
        ((tuple, frozenset), ObjectKind.TUPLE),
        (types.FunctionType, ObjectKind.FUNCTION),
        (types.CellType, ObjectKind.CELL),
        ((types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial, property,
          staticmethod, classmethod, functools.cached_property, *_HOLDERS,
          *WEAK, types.MappingProxyType,
          lru_cache_wrapper), ObjectKind.BINDING),
        (type, ObjectKind.CLASS),
        (types.ModuleType, ObjectKind.MODULE),
        ((np.ndarray, bytearray, array.array, contextvars.ContextVar, contextvars.Context, types.GeneratorType,
          random.Random, np.random.Generator, np.random.RandomState, logging.Logger, decimal.Context, *LOCKS, *C_DATA),
         ObjectKind.OPAQUE),
    ):  # fmt: skip
        if issubclass(cls, kinds):
            return kind
    if is_iterator_of_c(cls):
        return ObjectKind.OPAQUE if has_readable_position(cls) else ObjectKind.UNKNOWN
    if module_of_class(cls).partition(".")[0] == "tokenizers":
        return ObjectKind.OPAQUE
    if is_ours(module_of_class(cls)) and not issubclass(cls, (torch.optim.Optimizer, ModuleProxy)):
        held = module_of_class(cls).startswith(_THE_USERS) and bool(cls.__dictoffset__) and not issubclass(cls, type)
        return ObjectKind.OURS if held else ObjectKind.LEAF
    if issubclass(cls, threading.local):
        return ObjectKind.INSTANCE
    if not all(is_of_python(base) or _is_harmless(base) for base in cls.__mro__):
        return ObjectKind.UNKNOWN
    if module_of_class(cls).partition(".")[0] in _STATELESS:
        return ObjectKind.LEAF
    return ObjectKind.INSTANCE if _has_attributes(cls) else ObjectKind.LEAF


_THE_USERS = ("firstloss.optim.", "firstloss.metrics.", "firstloss.amp.")
_PLAIN = (ObjectKind.LEAF, ObjectKind.FUNCTION, ObjectKind.TUPLE)


def _has_attributes(cls: type) -> bool:
    return bool(cls.__dictoffset__ or slots(cls))


def _changes(cls: type[enum.Enum]) -> bool:
    """Whether the values of an enumeration's members are mutable."""
    return any(kind_of(type(value)) not in _PLAIN for value in _values(cls))


def _values(cls: type[enum.Enum]) -> Iterator[Any]:
    """The values of an enumeration's members."""
    for member in cls:
        yield from member.value if type(member.value) is tuple else (member.value,)


# Modules of the standard library whose objects refer to everything, and have no effect on what a step computes.
_STATELESS = {"typing", "importlib", "abc"}


def is_of_python(cls: type) -> bool:
    """Whether a class was defined in Python, so that its instances have attributes only."""
    return has_managed_dict(cls) or "__slots__" in vars(cls)


def _is_harmless(base: type) -> bool:
    if base in _PLAIN_BASES or issubclass(base, (BaseException, threading.local, ast.AST)):
        return True
    return is_harmless_module(module_of_class(base))


def is_harmless_module(module: str) -> bool:
    """Whether no mutable state of the objects of a module's C classes affects a computation."""
    return module in _HARMLESS or module.partition(".")[0] in _HARMLESS


def is_ours(module: str | None) -> bool:
    """Whether a module is part of the runtime."""
    return module is not None and f"{module}.".startswith(_OURS)


def is_closed(module: Any) -> bool:
    """Whether the code of a module reads no state of the user's."""
    # In a C class `__module__` may be a descriptor.
    return not isinstance(module, str) or module.partition(".")[0] in _CLOSED and module != "__main__"


def module_of_class(cls: type) -> str:
    """The `__module__` of a class. Some classes of ctypes have none; in a C class it may be a descriptor."""
    module = getattr(cls, "__module__", None)
    return module if isinstance(module, str) else "builtins"


def is_closed_class(cls: type) -> bool:
    """`is_closed` for the module that defines a class: a class that was created outside of a module has `builtins` as
    its module, and one of `dataclasses.make_dataclass` has `types`."""
    module = module_of_class(cls)
    if module in ("builtins", "types") and is_python_class(cls):
        return vars(sys.modules[module]).get(cls.__qualname__) is cls
    return is_closed(module)


def own_module(function: types.FunctionType) -> str | None:
    """The module that defines a function, or its `__module__`, which `functools.wraps` sets: the user's, if one of them
    is. None if the function was created outside of a module."""
    names = [None if n == "builtins" else n for n in (function.__globals__.get("__name__"), function.__module__)]
    return next((n for n in names if n is None or not is_closed(n) and not is_installed(n)), names[1])


def is_closed_function(function: types.FunctionType) -> bool:
    """`is_closed` for the module of a function."""
    module = own_module(function)
    return module is not None and is_closed(module)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module belongs to an installed package rather than to the user."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and os.path.realpath(file).startswith(INSTALLED_FOLDERS)


def can_be_instrumented(cls: type) -> bool:
    """Whether attribute reads of its instances can be recorded: whether it is a Python class whose look-up can be
    replaced."""
    if cls is types.SimpleNamespace:
        return native is not None
    return (
        is_python_class(cls)
        and not issubclass(cls, (torch.Tensor, enum.Enum, type, types.ModuleType))
        and (not is_ours(module_of_class(cls)) or issubclass(cls, torch.optim.Optimizer))
    )


def slots(cls: type) -> tuple[str, ...]:
    """The names in the `__slots__` of a Python class."""
    names = _slots.get(cls)
    if names is None:
        bases = [base for base in cls.__mro__ if is_python_class(base) and "__slots__" in vars(base)]
        members = [(name, member) for base in bases for name, member in vars(base).items()]
        names = _slots[cls] = tuple(n for n, member in members if isinstance(member, types.MemberDescriptorType))
    return names


_slots: dict[type, tuple[str, ...]] = {}


def may_expire(reference: Any) -> bool:
    """Whether a weak reference may expire, as far as is known. References to parts of the training itself do not, such
    as those of schedulers to their optimizer."""
    return any(
        held is not None
        and not isinstance(held, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.FunctionType))
        for held in referents(reference)
    )


# Methods of generators whose state is guarded in any case.
_OF_THE_PROCESS = {
    method
    for module in (random, np.random)
    for method in vars(module).values()
    if isinstance(method, types.BuiltinFunctionType)
}


def referents(binding: Any) -> Iterator[Any]:
    """The objects behind a method, a partial, a property and the like."""
    if isinstance(binding, types.MethodType):
        yield from (binding.__func__, binding.__self__)
    elif isinstance(binding, (types.BuiltinFunctionType, types.MethodWrapperType)):
        if binding not in _OF_THE_PROCESS and not isinstance(binding.__self__, (types.ModuleType, type)):
            yield binding.__self__
    elif isinstance(binding, functools.partial):
        yield from (binding.func, *binding.args, binding.keywords, binding.__dict__)
    elif isinstance(binding, property):
        yield from (f for f in (binding.fget, binding.fset, binding.fdel) if f is not None)
    elif isinstance(binding, functools.cached_property):
        yield binding.func
    elif isinstance(binding, (staticmethod, classmethod)):
        yield binding.__func__
    elif isinstance(binding, weakref.ref):
        yield binding()
    elif type(binding) in (weakref.ProxyType, weakref.CallableProxyType):
        with contextlib.suppress(ReferenceError):
            yield binding.__reduce_ex__.__self__
    elif isinstance(binding, types.MappingProxyType):
        yield from binding.values()
    elif isinstance(binding, lru_cache_wrapper):
        yield binding.__wrapped__
    elif isinstance(binding, _HOLDERS):
        yield from gc.get_referents(binding)


def items_of(container: Any) -> list[Any]:
    """A shallow copy of the items of a list, set, deque or tuple."""
    return list(container) if type(container).__iter__ in _PLAIN_ITERATION else list(_raw_iteration(container))


_PLAIN_ITERATION = {list.__iter__, set.__iter__, tuple.__iter__, frozenset.__iter__, collections.deque.__iter__}


def _raw_iteration(container: Any) -> Iterator[Any]:
    bases: tuple[Any, ...] = (list, set, tuple, frozenset, collections.deque)
    return next((base.__iter__(container) for base in bases if isinstance(container, base)), iter(container))


def table_of(table: dict) -> dict:
    """A shallow copy of a dict, in order, without calling overridden methods."""
    if type(table) is dict:
        return table.copy()
    if isinstance(table, collections.OrderedDict):
        return {key: dict.__getitem__(table, key) for key in collections.OrderedDict.__iter__(table)}
    return dict(dict.items(table))


class ModuleProxy:
    """A proxy for a module: all its attributes but `_model` are those of the module."""

    __slots__ = ()


def module_of(compiled: ModuleProxy) -> torch.nn.Module:
    """The module behind a proxy."""
    return compiled.__dict__["_model"]


MISSING: Any = object()


def own_attributes(obj: Any) -> dict | None:
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


def slot_reader(obj: Any, name: str) -> Callable[[], Any]:
    """A function that returns the value of the slot."""
    return functools.partial(slot_value, obj, name)


def cell_content(cell: types.CellType) -> Any:
    """The value of a cell, MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def class_table(cls: type) -> dict:
    """The dict behind a class's `__dict__`, which is a read-only view of it."""
    return gc.get_referents(cls.__dict__)[0]


def definition(function: types.FunctionType) -> tuple:
    """The parts of a function that can be replaced: code, defaults and the like."""
    defaults = function.__kwdefaults__
    return (function.__code__, function.__defaults__, None if defaults is None else tuple(defaults.items()))


def define(function: types.FunctionType, made_of: tuple) -> None:
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


def empty_like(container: Any) -> Callable[[], Any]:
    """A function that creates an empty container of the same class."""
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
    """The builtin class that `cls` derives from."""
    return next(base for base in cls.__mro__ if not is_python_class(base))


def set_items(container: Any, items: list[Any]) -> None:
    """Replace the items of a list, set or deque."""
    kind = kind_of(type(container))
    if kind is ObjectKind.LIST:
        list.__setitem__(container, slice(None), items)
        return
    base = _builtin(type(container))
    base.clear(container)
    (set.update if kind is ObjectKind.SET else base.extend)(container, items)


def set_table(table: dict, entries: dict) -> None:
    """Replace the entries of a dict, in order."""
    if type(table) is dict:
        table.clear()
        table.update(entries)
        return
    base = _builtin(type(table))
    base.clear(table)
    for key, value in entries.items():
        base.__setitem__(table, key, value)
