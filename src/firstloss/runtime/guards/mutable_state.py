"""State of objects beside their attributes: items, bytes, the positions of iterators.

`reader(held)` returns a function that reads this state, if a step's Python code could find it changed although no name
is rebound; `inside(held)` returns the objects that are reached through `held`.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import decimal
import functools
import itertools
import logging
import os
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch

from ...compat.python_names import environment_of, is_python_class
from .equality import ComparedState, same_items

# Of containers with more items than this, the items are watched, but not their contents.
LARGEST = 1024
# Containers with more items or bytes than this are not compared in full at each call (65,536 items or 4 MiB take a
# quarter of a millisecond), but by length and a sample of `_SAMPLED` items or blocks.
MAX_ITEMS = 1 << 16
_MAX_BYTES = 4 << 20
_SAMPLED = 1 << 10
_BLOCK = 64  # bytes of an array for each sample

_SEQUENCES = (list, collections.deque)
_SETS = (set, frozenset)
_BUFFERS = (bytearray, array.array)
_SIMPLE: Any = ctypes.c_int.__base__
C_DATA: Any = (ctypes.Structure, ctypes.Union, ctypes.Array, _SIMPLE)
# Functions of C libraries, which can do anything, and pointers, which refer to memory that they do not own.
FOREIGN: Any = (
    type(ctypes.pythonapi.Py_IncRef).__mro__[1],
    type(ctypes.pointer(ctypes.c_int())).__mro__[1],
    ctypes.py_object,
    ctypes.c_char_p,
    ctypes.c_wchar_p,
)


def has_pointers(cls: Any) -> bool:
    """Whether data of a ctypes class refers to memory that it does not own."""
    if issubclass(cls, FOREIGN):
        return True
    if issubclass(cls, ctypes.Array):
        return has_pointers(getattr(cls, "_type_", ctypes.c_byte))
    fields = [field for base in cls.__mro__ for field in vars(base).get("_fields_", ())]
    return any(has_pointers(kind) for _, kind, *_ in fields)


LOCKS = (type(threading.Lock()), type(threading.RLock()))
_MODULES_OF_ITERATORS = ("builtins", "itertools", "_collections")
_WRAPPERS = (collections.UserDict, collections.UserList)


def reader(held: Any) -> Callable[[], Any] | None:
    """A function that returns the present state of `held`, for comparison; None if only attributes of `held` can
    change."""
    kind = type(held)
    if kind in _FIXED:
        return None
    if isinstance(held, (dict, *_SEQUENCES, set)):
        return _items_of(held)
    if isinstance(held, np.ndarray):
        return _array_of(held)
    if isinstance(held, _BUFFERS):
        return _bytes_of(held)
    if isinstance(held, contextvars.ContextVar):
        return lambda: value_in(held)
    if isinstance(held, contextvars.Context):
        return lambda: (*held.keys(), *held.values())
    if isinstance(held, C_DATA):
        return _bytes_of(held, lambda: np.frombuffer(held, np.uint8))
    if isinstance(held, (*LOCKS, decimal.Context)):
        return functools.partial(repr, held)
    if isinstance(held, np.void):
        return lambda: (held.dtype, None if held.dtype.hasobject else held.tobytes())
    if isinstance(held, logging.Logger):
        return lambda: (held.getEffectiveLevel(), held.disabled, held.manager.disable)
    if isinstance(held, types.GeneratorType):
        return lambda: _position_of_generator(held)
    if isinstance(held, random.Random):
        return held.getstate
    if isinstance(held, np.random.Generator):
        return lambda: ComparedState(held.bit_generator.state)
    if isinstance(held, np.random.RandomState):
        return lambda: ComparedState(held.get_state())
    if held is os.environ:
        return environment
    if is_iterator_of_c(kind):
        return lambda: _position(held)
    # Of the tokenizers package. Serializing all of it takes milliseconds.
    if str(getattr(kind, "__module__", "")).partition(".")[0] == "tokenizers" and hasattr(kind, "get_vocab_size"):
        return lambda: (held.get_vocab_size(), repr(held.padding), repr(held.truncation))
    return None


def restore_contents(held: Any, before: Any) -> bool:
    """Restore the state that `reader` returned before; False where that is impossible."""
    if isinstance(held, np.ndarray) and not held.dtype.hasobject and held.nbytes <= _MAX_BYTES:
        if held.shape != before[0] or held.dtype != before[1] or not held.flags.writeable:
            return False
        held[...] = np.frombuffer(bytes(before[2]), held.dtype).reshape(held.shape)
        return True
    if isinstance(held, (*_BUFFERS, *C_DATA)) and isinstance(before, bytearray):
        content = memoryview(held).cast("B")  # type: ignore[arg-type]
        if content.nbytes != len(before):
            return False
        content[:] = before
        return True
    if isinstance(held, random.Random):
        held.setstate(before)
    elif isinstance(held, np.random.Generator):
        held.bit_generator.state = before.state
    elif isinstance(held, np.random.RandomState):
        held.set_state(before.state)
    elif held is os.environ:
        restore_environment(before)
    else:
        return False
    return True


def environment() -> tuple:
    """The variables in `os.environ`."""
    return tuple(environment_of(os.environ).items())


def restore_environment(before: tuple) -> None:
    """Restore what `environment` returned."""
    set_environment(environment_changes(environment(), before))


def filters() -> tuple:
    """The warning filters."""
    return tuple(warnings.filters)


def raising(among: Iterable[tuple]) -> tuple:
    """The filters in `among` that turn warnings into errors; the others only affect what is printed."""
    return tuple([entry for entry in among if entry[0] == "error"])


def set_filters(filters: tuple) -> None:
    """Restore what `filters` returned."""
    warnings.resetwarnings()  # also invalidates the record of warnings that were shown already
    warnings.filters[:] = filters  # type: ignore[index]  # a list at run time


def environment_changes(before: tuple, after: tuple) -> dict[str, str | None]:
    """The variables that differ `after`; None for those that were deleted."""
    old, new = dict(before), dict(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {os.fsdecode(name): os.fsdecode(new[name]) if name in new else None for name in names}


def set_environment(values: dict[str, str | None]) -> None:
    """Set these variables, and delete those that are None."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def value_in(variable: contextvars.ContextVar) -> Any:
    """The value of a context variable in this context; None if it has none."""
    try:
        return variable.get()
    except LookupError:
        return None


def _items_of(held: Any) -> Callable[[], Any]:
    """Returns a function that reads up to `LARGEST` items as a tuple; for more items, it returns the same object as
    long as they are the same."""
    last: list = []

    def read() -> Any:
        nonlocal last
        length = len(held)
        if length <= LARGEST:
            return (*dict.keys(held), *dict.values(held)) if isinstance(held, dict) else tuple(held)
        if length > MAX_ITEMS:
            return length, *_sample(held, length)
        items = [*dict.keys(held), *dict.values(held)] if isinstance(held, dict) else list(held)
        if not same_items(last, items):
            last = items
        return last

    return read


def _sample(held: Any, length: int) -> tuple:
    if isinstance(held, list):
        return tuple(held[:: length // _SAMPLED])
    if isinstance(held, set):
        return ()
    ends = (held, reversed(held))  # where dicts and deques grow
    keys = [key for end in ends for key in itertools.islice(end, _SAMPLED // 2)]
    return (*keys, *(dict.__getitem__(held, key) for key in keys)) if isinstance(held, dict) else tuple(keys)


def _array_of(held: np.ndarray) -> Callable[[], Any]:
    """Returns a function that reads shape, dtype and bytes, or the objects in an array of objects. Attributes of
    subclasses are handled elsewhere."""
    held = np.asarray(held)
    if held.dtype.hasobject:
        return lambda: (held.shape, *(held.ravel().tolist() if held.size <= MAX_ITEMS else ()))
    if held.flags.c_contiguous and held.dtype.itemsize:
        read = _bytes_of(held, lambda: held.reshape(-1).view(np.uint8))
        return lambda: (held.shape, held.dtype, read())
    if held.nbytes <= _MAX_BYTES:
        return lambda: (held.shape, held.dtype, held.tobytes())
    return lambda: (held.shape, held.dtype, held.flat[:: held.size // _SAMPLED].tobytes())


def _bytes_of(held: Any, view: Callable[[], np.ndarray] | None = None) -> Callable[[], Any]:
    """Returns a function that reads the bytes of a buffer. It returns the same object as long as they are unchanged, so
    that they are not copied each time.

    Args:
        view: returns the bytes of `held` as an array.
    """
    last = bytearray()

    def whole() -> np.ndarray:
        return np.frombuffer(held, np.uint8) if len(held) else np.empty(0, np.uint8)

    def read() -> Any:
        nonlocal last
        now = (view or whole)()
        if len(now) > _MAX_BYTES:
            stride = len(now) // _SAMPLED
            return len(now), now[: stride * _SAMPLED].reshape(_SAMPLED, stride)[:, :_BLOCK].tobytes()
        if not bytearray.__eq__(last, now):
            last = bytearray(now)
        return last

    return read


def unwatched(held: Any) -> str | None:
    """A description of `held` if something in it may change undetected; else None."""
    if isinstance(held, np.ndarray):
        size, limit = (held.size, MAX_ITEMS) if held.dtype.hasobject else (held.nbytes, _MAX_BYTES)
        return f"an array of {held.nbytes:,} bytes" if size > limit else None
    if isinstance(held, _BUFFERS):
        size = memoryview(held).nbytes
        return f"a {type(held).__name__} of {size:,} bytes" if size > _MAX_BYTES else None
    if not isinstance(held, (dict, *_SEQUENCES, *_SETS, tuple)) or len(held) <= LARGEST:
        return None
    changes = not isinstance(held, (tuple, frozenset)) and len(held) > MAX_ITEMS
    items = [*dict.keys(held), *dict.values(held)] if isinstance(held, dict) else held
    others = {kind.__name__ for kind in _kinds(items)}
    description = f"a {type(held).__name__} of {len(held):,} items"
    return description + (f" ({', '.join(sorted(others))})" if others else "") if changes or others else None


def _kinds(items: Iterable[Any]) -> set[type]:
    """The mutable types among these items and the items of tuples in them."""
    kinds = set(map(type, items))
    if tuple in kinds:
        kinds = (kinds | {type(x) for item in items if type(item) is tuple for x in item}) - {tuple}
    return {kind for kind in kinds if kind not in _FIXED and not issubclass(kind, (np.generic, torch.Tensor, Enum))}


def inside(held: Any) -> Iterable[Any]:
    """The objects that are reached through `held` other than by an attribute."""
    if isinstance(held, dict):
        return [*dict.keys(held), *dict.values(held)] if len(held) <= LARGEST else ()
    if isinstance(held, (*_SEQUENCES, *_SETS, tuple)):
        return list(held) if len(held) <= LARGEST else ()
    if isinstance(held, _WRAPPERS):
        return (held.data,)
    if isinstance(held, contextvars.ContextVar):
        return (value_in(held),)
    if isinstance(held, contextvars.Context):
        return held.values()
    if isinstance(held, np.ndarray):
        return held.ravel().tolist() if held.dtype.hasobject and held.size <= LARGEST else ()
    if isinstance(held, weakref.ref):
        return (held(),)
    if isinstance(held, functools.partial):
        return (held.func, *held.args, *held.keywords.values())
    if isinstance(held, types.GeneratorType):
        return () if held.gi_frame is None else list(held.gi_frame.f_locals.values())
    if isinstance(held, np.void):
        return held.tolist() if held.dtype.hasobject else ()
    if is_iterator_of_c(type(held)):
        state = _position(held)
        return state if isinstance(state, tuple) else ()
    return ()


def holds(held: Any) -> bool:
    """Whether `held` may contain anything."""
    return type(held) not in _FIXED and (reader(held) is not None or bool(inside(held)))


_FIXED = {int, float, bool, str, bytes, complex, type(None), types.FunctionType, types.BuiltinFunctionType, type,
          types.ModuleType, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size}  # fmt: skip


def _position_of_generator(generator: types.GeneratorType) -> Any:
    """The position of a generator, and its local variables."""
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, *frame.f_locals.values())


def is_iterator_of_c(cls: type) -> bool:
    """Whether it is one of Python's builtin iterator classes."""
    # Not `hasattr`, which the metaclass of a Python class may override, as mocks do. (Some classes of ctypes have no
    # module.)
    return (
        getattr(cls, "__module__", None) in _MODULES_OF_ITERATORS
        and not is_python_class(cls)
        and hasattr(cls, "__next__")
    )


def has_readable_position(cls: type) -> bool:
    """Whether an iterator of this C class can be pickled."""
    return cls.__reduce__ is not object.__reduce__


def _position(iterator: Any) -> Any:
    """The position of a builtin iterator: its pickled state, flattened; its `repr` if it cannot be pickled."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from itertools: its iterators cannot be pickled from Python 3.14 on
            return tuple(_flattened(iterator.__reduce__()[1:]))
    except (AttributeError, TypeError):
        return repr(iterator)


def _flattened(state: Any) -> Iterable[Any]:
    for part in state:
        if isinstance(part, tuple):
            yield from _flattened(part)
        else:
            yield part
