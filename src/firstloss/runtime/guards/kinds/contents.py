"""Objects whose content is neither in attributes nor in items: arrays, buffers, generators, iterators, and the like."""

from __future__ import annotations

import array
import contextvars
import ctypes
import decimal
import functools
import logging
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ..effects import Effects
from ..equality import ComparedState
from ..guards import with_article
from ..kind import Kind, of
from ..reconstruct import Make, Reconstructor
from ..snapshot import LARGEST, Snapshot
from ..states import Content
from ..value_guards import Values
from .instances import UNKNOWN, WithAttributes

# Content of more bytes or objects than this is not compared in full at each call (4 MiB take a quarter of a
# millisecond), but by length and a sample of `_SAMPLED` objects or blocks.
_MAX_BYTES = 4 << 20
_MAX_OBJECTS = 1 << 16
_SAMPLED = 1 << 10
_BLOCK = 64  # bytes of each sample

# Types without content that can change.
FIXED = {int, float, bool, str, bytes, complex, type(None), types.FunctionType, types.BuiltinFunctionType, type,
         types.ModuleType, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size}  # fmt: skip


class OpaqueContent(Content):
    """Content that only its kind can read and restore."""

    __slots__ = ("kind",)

    def __init__(self, held: Any, read: Callable[[], Any], kind: Opaque) -> None:
        super().__init__(held, read)
        self.kind = kind

    def compare(self, effects: Effects) -> None:
        if effects.reads is None or not (self._has_run(effects) or not self.is_unchanged()):
            return
        effects.reads.guard_content(self.held)
        after = self.read()
        if self.kind.restore(self.held, after):
            effects.replaced(self.held, functools.partial(self.kind.restore, self.held), self.before, after)
        else:
            effects.changed_ids.add(id(self.held))
            effects.retrace_reason = f"it consumes or changes {with_article(type(self.held).__qualname__)}"

    def _has_run(self, effects: Effects) -> bool:
        """Whether it is a generator that may have run, even if its position is the same."""
        return isinstance(self.held, types.GeneratorType) and self.held.gi_code in effects.reads.ran

    def restore(self) -> bool:
        return self.is_unchanged() or self.kind.restore(self.held, self.before)


class Opaque(WithAttributes):
    """An object whose content only its kind can read."""

    def reader(self, obj: Any) -> Callable[[], Any] | None:
        """A function that returns the present content, for comparison; None if it has none that changes."""
        return functools.partial(self.read, obj)

    def read(self, obj: Any) -> Any:
        """The present content."""
        raise NotImplementedError

    def restore(self, obj: Any, before: Any) -> bool:
        """Restore the content that was read before; False where that is impossible."""
        return False

    def inside(self, obj: Any) -> Iterable[Any]:
        """The objects that are reached through it other than by an attribute."""
        return ()

    def too_large(self, obj: Any) -> str | None:
        """A description of the object if something in it may change undetected."""
        return None

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        read = self.reader(obj)
        if read is not None:
            snapshot.keep(OpaqueContent(obj, read, self))
        stack += self.inside(obj)

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        values.note_size(self.too_large(obj), description, name)
        values.content(obj, f"the content of {description}", name)
        for part in self.inside(obj):
            values.value(part, description, name)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        if hasattr(obj, "copy") and type(obj).__module__ == "numpy":
            copy = obj.copy()
            return lambda env: copy.copy()
        return reconstructor.cannot(obj)


# -- bytes --


def bytes_of(held: Any, view: Callable[[], np.ndarray] | None = None) -> Callable[[], Any]:
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


@of(np.ndarray)
class Array(Opaque):
    """An array: its shape, dtype and bytes, or the objects in it."""

    def reader(self, obj: np.ndarray) -> Callable[[], Any]:
        held = np.asarray(obj)
        if held.dtype.hasobject:
            return lambda: (held.shape, *(held.ravel().tolist() if held.size <= _MAX_OBJECTS else ()))
        if held.flags.c_contiguous and held.dtype.itemsize:
            read = bytes_of(held, lambda: held.reshape(-1).view(np.uint8))
            return lambda: (held.shape, held.dtype, read())
        if held.nbytes <= _MAX_BYTES:
            return lambda: (held.shape, held.dtype, held.tobytes())
        return lambda: (held.shape, held.dtype, held.flat[:: held.size // _SAMPLED].tobytes())

    def restore(self, obj: np.ndarray, before: Any) -> bool:
        if obj.dtype.hasobject or obj.nbytes > _MAX_BYTES or not obj.flags.writeable:
            return False
        if obj.shape != before[0] or obj.dtype != before[1]:
            return False
        obj[...] = np.frombuffer(bytes(before[2]), obj.dtype).reshape(obj.shape)
        return True

    def inside(self, obj: np.ndarray) -> Iterable[Any]:
        return obj.ravel().tolist() if obj.dtype.hasobject and obj.size <= LARGEST else ()

    def too_large(self, obj: np.ndarray) -> str | None:
        size, limit = (obj.size, _MAX_OBJECTS) if obj.dtype.hasobject else (obj.nbytes, _MAX_BYTES)
        return f"an array of {obj.nbytes:,} bytes" if size > limit else None


@of(bytearray, array.array)
class Buffer(Opaque):
    """A buffer of bytes or numbers."""

    def reader(self, obj: Any) -> Callable[[], Any]:
        return bytes_of(obj)

    def restore(self, obj: Any, before: Any) -> bool:
        if not isinstance(before, bytearray):
            return False
        content = memoryview(obj).cast("B")
        if content.nbytes != len(before):
            return False
        content[:] = before
        return True

    def too_large(self, obj: Any) -> str | None:
        size = memoryview(obj).nbytes
        return f"a {type(obj).__name__} of {size:,} bytes" if size > _MAX_BYTES else None


_SIMPLE: Any = ctypes.c_int.__base__
# Functions of C libraries, which can do anything, and pointers, which refer to memory that they do not own.
_FOREIGN: Any = (
    type(ctypes.pythonapi.Py_IncRef).__mro__[1],
    type(ctypes.pointer(ctypes.c_int())).__mro__[1],
    ctypes.py_object,
    ctypes.c_char_p,
    ctypes.c_wchar_p,
)


@of(ctypes.Structure, ctypes.Union, ctypes.Array, _SIMPLE, *_FOREIGN)
class DataOfC(Buffer):
    """Data of ctypes, unless it refers to memory that it does not own."""

    def of_class(self, cls: type) -> Kind:
        return UNKNOWN if _has_pointers(cls) else self

    def reader(self, obj: Any) -> Callable[[], Any]:
        return bytes_of(obj, lambda: np.frombuffer(obj, np.uint8))

    def too_large(self, obj: Any) -> str | None:
        return None


def _has_pointers(cls: Any) -> bool:
    """Whether data of a ctypes class refers to memory that it does not own."""
    if issubclass(cls, _FOREIGN):
        return True
    if issubclass(cls, ctypes.Array):
        return _has_pointers(getattr(cls, "_type_", ctypes.c_byte))
    fields = [field for base in cls.__mro__ for field in vars(base).get("_fields_", ())]
    return any(_has_pointers(kind) for _, kind, *_ in fields)


@of(np.void)
class Row(Opaque):
    """A row of a structured array."""

    def read(self, obj: np.void) -> Any:
        return obj.dtype, None if obj.dtype.hasobject else obj.tobytes()

    def inside(self, obj: np.void) -> Iterable[Any]:
        return obj.tolist() if obj.dtype.hasobject else ()


# -- random generators --


@of(random.Random)
class PythonGenerator(Opaque):
    """A random generator of Python's."""

    def read(self, obj: random.Random) -> Any:
        return obj.getstate()

    def restore(self, obj: random.Random, before: Any) -> bool:
        obj.setstate(before)
        return True


@of(np.random.Generator)
class NumpyGenerator(Opaque):
    """A random generator of NumPy's."""

    def read(self, obj: np.random.Generator) -> Any:
        return ComparedState(obj.bit_generator.state)

    def restore(self, obj: np.random.Generator, before: Any) -> bool:
        obj.bit_generator.state = before.state
        return True


@of(np.random.RandomState)
class LegacyGenerator(Opaque):
    """A random generator of NumPy's older interface."""

    def read(self, obj: np.random.RandomState) -> Any:
        return ComparedState(obj.get_state())

    def restore(self, obj: np.random.RandomState, before: Any) -> bool:
        obj.set_state(before.state)
        return True


# -- context, locks, loggers --


@of(contextvars.ContextVar)
class Variable(Opaque):
    """A context variable: its value in this context."""

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        snapshot.keep(ValueInContext(obj, functools.partial(value_in, obj)))
        stack.append(value_in(obj))

    def inside(self, obj: contextvars.ContextVar) -> Iterable[Any]:
        return (value_in(obj),)


def value_in(variable: contextvars.ContextVar) -> Any:
    """The value of a context variable in this context; None if it has none."""
    try:
        return variable.get()
    except LookupError:
        return None


class ValueInContext(Content):
    """The value of a context variable."""

    __slots__ = ()

    def compare(self, effects: Effects) -> None:
        now = self.read()
        if now is self.before:
            return
        if effects.reads is not None:
            effects.reads.guard_content(self.held)
        effects.rebound(self.held, None, self.before, now, self.held.set)


@of(contextvars.Context)
class Context(Opaque):
    """A context: its variables with their values."""

    def read(self, obj: contextvars.Context) -> Any:
        return (*obj.keys(), *obj.values())

    def inside(self, obj: contextvars.Context) -> Iterable[Any]:
        return obj.values()


@of(type(threading.Lock()), type(threading.RLock()), decimal.Context)
class ShownState(Opaque):
    """A lock or a decimal context, whose `repr` tells its state."""

    def read(self, obj: Any) -> Any:
        return repr(obj)


@of(logging.Logger)
class Logger(Opaque):
    """A logger: what affects which messages are made."""

    def read(self, obj: logging.Logger) -> Any:
        return obj.getEffectiveLevel(), obj.disabled, obj.manager.disable


# -- iterators --


@of(types.GeneratorType)
class PythonIterator(Opaque):
    """A generator: its position, and its local variables."""

    def read(self, obj: types.GeneratorType) -> Any:
        frame = obj.gi_frame
        return None if frame is None else (frame.f_lasti, *frame.f_locals.values())

    def inside(self, obj: types.GeneratorType) -> Iterable[Any]:
        return () if obj.gi_frame is None else list(obj.gi_frame.f_locals.values())


class IteratorOfC(Opaque):
    """A builtin iterator whose position can be read."""

    def read(self, obj: Any) -> Any:
        """Its pickled state, flattened; its `repr` if it cannot be pickled."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from itertools: its iterators cannot be pickled from Python 3.14 on
                return tuple(_flattened(obj.__reduce__()[1:]))
        except (AttributeError, TypeError):
            return repr(obj)

    def inside(self, obj: Any) -> Iterable[Any]:
        state = self.read(obj)
        return state if isinstance(state, tuple) else ()


def _flattened(state: Any) -> Iterable[Any]:
    for part in state:
        if isinstance(part, tuple):
            yield from _flattened(part)
        else:
            yield part


class Tokenizer(Opaque):
    """An object of the tokenizers package. Serializing all of it takes milliseconds."""

    def reader(self, obj: Any) -> Callable[[], Any] | None:
        if not hasattr(type(obj), "get_vocab_size"):
            return None
        return lambda: (obj.get_vocab_size(), repr(obj.padding), repr(obj.truncation))
