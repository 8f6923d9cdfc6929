"""Objects whose content is neither in attributes nor in items: arrays, buffers, generators, iterators, and the like."""

from __future__ import annotations

import array
import contextvars
import ctypes
import decimal
import functools
import io
import logging
import operator
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
from ..kind import Kind, register
from ..reconstruct import Make, Reconstructor, constant
from ..snapshot import LARGEST, Snapshot
from ..states import Content
from ..value_guards import Values
from .instances import UNKNOWN, Unknown, WithAttributes

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
        self.kind: Opaque = kind

    def compare(self, effects: Effects) -> None:
        if effects.reads is None or not (self._has_run(effects) or not self.is_unchanged()):
            return
        effects.reads.guard_content(self.held)
        after = self.read()
        if self.can_be_restored():
            effects.replaced(self.held, functools.partial(self.kind.restore, self.held), self.before, after)
        else:
            effects.changed_ids.add(id(self.held))
            effects.retrace_reason = f"it consumes or changes {with_article(type(self.held).__qualname__)}"

    def _has_run(self, effects: Effects) -> bool:
        """Whether it is a generator that may have run, even if its position is the same."""
        return isinstance(self.held, types.GeneratorType) and self.held.gi_code in effects.reads.ran

    def restore(self) -> bool:
        return self.is_unchanged() or self.kind.restore(self.held, self.before)

    def can_be_restored(self) -> bool:
        after = self.read()
        return self.kind.restore(self.held, self.before) and self.kind.restore(self.held, after)


class Opaque(WithAttributes):
    """An object whose content only these functions can read.

    Attributes:
        state: the class of what a snapshot holds of its content.
    """

    state: type[OpaqueContent] = OpaqueContent

    def __init__(
        self,
        read: Callable[[Any], Any] = repr,
        *,
        reader: Callable[[Any], Callable[[], Any] | None] | None = None,
        restore: Callable[[Any, Any], Any] = lambda obj, before: False,
        inside: Callable[[Any], Iterable[Any]] = lambda obj: (),
        too_large: Callable[[Any], str | None] = lambda obj: None,
    ) -> None:
        """
        Args:
            read: returns an object's present content, for comparison.
            reader: in place of `read`, returns a function that does; None if there is no content that changes.
            restore: restores the content that was read before; returns False where that is impossible.
            inside: returns the objects that are reached other than by an attribute.
            too_large: returns a description of an object in which something may change undetected.
        """
        self.reader = reader or (lambda obj: functools.partial(read, obj))
        self._restore = restore
        self.inside = inside
        self._too_large = too_large

    def restore(self, obj: Any, before: Any) -> bool:
        """Restore the content that was read before; returns False where that is impossible."""
        return self._restore(obj, before) is not False

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        read = self.reader(obj)
        if read is not None:
            snapshot.keep(self.state(obj, read, self))
        stack += self.inside(obj)

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        values.note_size(self._too_large(obj), description, name)
        values.content(obj, f"the content of {description}", name)
        for part in self.inside(obj):
            values.value(part, description, name)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        if hasattr(obj, "copy") and type(obj).__module__ == "numpy":
            copy = obj.copy()
            return lambda env: copy.copy()
        return reconstructor.cannot(obj)


# -- arrays and buffers --


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


def _restore_bytes(obj: Any, before: Any) -> bool:
    if not isinstance(before, bytearray):
        return False
    with memoryview(obj) as content:
        if content.nbytes == len(before):
            content.cast("B")[:] = before
            return True
    try:
        if isinstance(obj, array.array):
            obj[:] = array.array(obj.typecode, bytes(before))
        elif isinstance(obj, bytearray):
            bytearray.__setitem__(obj, slice(None), before)
        else:
            return False
    except BufferError:  # others hold its memory, so that it cannot be resized
        return False
    return True


def _large_buffer(obj: Any) -> str | None:
    size = memoryview(obj).nbytes
    return f"a {type(obj).__name__} of {size:,} bytes" if size > _MAX_BYTES else None


def _array_reader(obj: np.ndarray) -> Callable[[], Any]:
    """Returns a function that reads shape, dtype and bytes, or the objects in an array of objects."""
    held = np.asarray(obj)
    if held.dtype.hasobject:
        return lambda: (held.shape, *(held.ravel().tolist() if held.size <= _MAX_OBJECTS else ()))
    if held.flags.c_contiguous and held.dtype.itemsize:
        read = _bytes_of(held, lambda: held.reshape(-1).view(np.uint8))
        return lambda: (held.shape, held.dtype, read())
    if held.nbytes <= _MAX_BYTES:
        return lambda: (held.shape, held.dtype, held.tobytes())
    return lambda: (held.shape, held.dtype, held.flat[:: held.size // _SAMPLED].tobytes())


def _restore_array(obj: np.ndarray, before: Any) -> bool:
    if obj.dtype.hasobject or obj.nbytes > _MAX_BYTES or not obj.flags.writeable:
        return False
    if obj.shape != before[0] or obj.dtype != before[1]:
        return False
    obj[...] = np.frombuffer(bytes(before[2]), obj.dtype).reshape(obj.shape)
    return True


def _large_array(obj: np.ndarray) -> str | None:
    size, limit = (obj.size, _MAX_OBJECTS) if obj.dtype.hasobject else (obj.nbytes, _MAX_BYTES)
    return f"an array of {obj.nbytes:,} bytes" if size > limit else None


def _objects_in(obj: Any) -> Iterable[Any]:
    """The objects in an array, or in a row of one."""
    if not obj.dtype.hasobject or obj.size > LARGEST:
        return ()
    objects: Iterable[Any] = obj.ravel().tolist() if isinstance(obj, np.ndarray) else obj.tolist()
    return objects


register(
    (np.ndarray,),
    Opaque(reader=_array_reader, restore=_restore_array, inside=_objects_in, too_large=_large_array),
)
register((bytearray, array.array), Opaque(reader=_bytes_of, restore=_restore_bytes, too_large=_large_buffer))
register(
    (np.void,),  # a row of a structured array
    Opaque(lambda row: (row.dtype, None if row.dtype.hasobject else row.tobytes()), inside=_objects_in),
)

_SIMPLE: Any = ctypes.c_int.__base__
# Functions of C libraries, which can do anything, and pointers, which refer to memory that they do not own.
_FOREIGN: Any = (
    type(ctypes.pythonapi.Py_IncRef).__mro__[1],
    type(ctypes.pointer(ctypes.c_int())).__mro__[1],
    ctypes.py_object,
    ctypes.c_char_p,
    ctypes.c_wchar_p,
)


class DataOfC(Opaque):
    """Data of ctypes, unless it refers to memory that it does not own."""

    def of_class(self, cls: type) -> Kind:
        return UNKNOWN if _has_pointers(cls) else self


def _has_pointers(cls: Any) -> bool:
    """Whether data of a ctypes class refers to memory that it does not own."""
    if issubclass(cls, _FOREIGN):
        return True
    if issubclass(cls, ctypes.Array):
        return _has_pointers(getattr(cls, "_type_", ctypes.c_byte))
    fields = [field for base in cls.__mro__ for field in vars(base).get("_fields_", ())]
    return any(_has_pointers(kind) for _, kind, *_ in fields)


def _reader_of_c(obj: Any) -> Callable[[], Any]:
    return _bytes_of(obj, lambda: np.frombuffer(obj, np.uint8))


_data_of_c = DataOfC(reader=_reader_of_c, restore=_restore_bytes)
register((ctypes.Structure, ctypes.Union, ctypes.Array, _SIMPLE, *_FOREIGN), _data_of_c)


# -- random generators --


def _set_bit_generator(obj: np.random.Generator, before: Any) -> None:
    obj.bit_generator.state = before.state


register((random.Random,), Opaque(random.Random.getstate, restore=random.Random.setstate))
register(
    (np.random.Generator,),
    Opaque(lambda obj: ComparedState(obj.bit_generator.state), restore=_set_bit_generator),
)
register(
    (np.random.RandomState,),
    Opaque(lambda obj: ComparedState(obj.get_state()), restore=lambda obj, before: obj.set_state(before.state)),
)


# -- context, locks, loggers --


class ContextVariable(Opaque):
    """A context variable: its value in this context, which is compared as an object."""

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        snapshot.keep(ValueInContext(obj, functools.partial(_value_in, obj)))
        stack.append(_value_in(obj))


def _value_in(variable: contextvars.ContextVar[Any]) -> Any:
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
        effects.rebound(self.held, self.before, now, self.held.set)


register((contextvars.ContextVar,), ContextVariable(_value_in, inside=lambda obj: (_value_in(obj),)))
register(
    (contextvars.Context,), Opaque(lambda obj: (*obj.keys(), *obj.values()), inside=lambda obj: list(obj.values()))
)
register((type(threading.Lock()), type(threading.RLock()), decimal.Context), Opaque(repr))
register((logging.Logger,), Opaque(lambda obj: (obj.getEffectiveLevel(), obj.disabled, obj.manager.disable)))


def _view_content(obj: types.MappingProxyType[Any, Any]) -> tuple[Any, ...]:
    """The content of a read-only view of a dict, or of a class's attributes."""
    return (*obj.keys(), *obj.values())


class ReadOnlyView(Opaque):
    """A read-only view of a dict, or of a class's attributes."""

    refers = True

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        return constant(obj)


register((types.MappingProxyType,), ReadOnlyView(_view_content, inside=lambda obj: list(obj.values())))


# -- iterators and tokenizers --


def _position_of_generator(obj: types.GeneratorType[Any, Any, Any]) -> Any:
    """The position of a generator, and its local variables."""
    frame = obj.gi_frame
    return None if frame is None else (frame.f_lasti, *frame.f_locals.values())


def _locals_of(obj: types.GeneratorType[Any, Any, Any]) -> Iterable[Any]:
    return () if obj.gi_frame is None else list(obj.gi_frame.f_locals.values())


def position(iterator: Any) -> Any:
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
        elif type(part) is list and not part:
            yield ()  # of an exhausted iterator, which makes a new list each time
        else:
            yield part


def _parts_of_position(iterator: Any) -> Iterable[Any]:
    state = position(iterator)
    return state if isinstance(state, tuple) else ()


def _tokenizer_reader(obj: Any) -> Callable[[], Any] | None:
    """Of the tokenizers package. Serializing all of it takes milliseconds."""
    if not hasattr(type(obj), "get_vocab_size"):
        return None
    return lambda: (obj.get_vocab_size(), repr(obj.padding), repr(obj.truncation))


register((types.GeneratorType,), Opaque(_position_of_generator, inside=_locals_of))
ITERATOR_OF_C = Opaque(position, inside=_parts_of_position)
TOKENIZER = Opaque(reader=_tokenizer_reader)


class UnknownIterator(Unknown):
    """An iterator of C whose position cannot be read or set. Most tell at least whether they have advanced."""

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        snapshot.keep(OpaqueContent(obj, functools.partial(_progress, obj), ITERATOR_OF_C))


def _progress(iterator: Any) -> tuple[Any, ...]:
    """What is left (`struct.iter_unpack`), the line (`csv.reader`), or the index (`numpy.flatiter`)."""
    left = operator.length_hint(iterator, -1)
    return left, getattr(iterator, "line_num", None), getattr(iterator, "index", None)


UNKNOWN_ITERATOR = UnknownIterator()


def _state_of_memory_file(file: Any) -> tuple[Any, ...] | None:
    """Its content, line ends and position, without attributes; None if it is closed."""
    return None if file.closed else (*file.__getstate__()[:-1], None)


def _restore_memory_file(file: Any, before: tuple[Any, ...] | None) -> bool:
    if file.closed or before is None:
        return file.closed and before is None
    try:
        file.__setstate__(before)
    except BufferError:  # `file.getbuffer()` is held
        return False
    return True


class MemoryFileContent(OpaqueContent):
    """What a file in memory contains, and its position, which are others at each call of a step that uses it."""

    __slots__ = ()

    def compare(self, effects: Effects) -> None:
        super().compare(effects)
        if effects.reads is not None and not self.is_unchanged():
            effects.retrace_reason = f"it consumes or changes {with_article(type(self.held).__qualname__)}"


class MemoryFile(Opaque):
    """A file in memory: what an abandoned trace has read or written is undone, and a step that reads it is traced at
    each call."""

    state = MemoryFileContent

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        UNKNOWN.guard(obj, values, description, name)  # comparing it at each call would copy all of it


register((io.StringIO, io.BytesIO), MemoryFile(_state_of_memory_file, restore=_restore_memory_file))
