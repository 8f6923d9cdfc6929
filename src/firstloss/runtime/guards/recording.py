"""Record what a step reads and stores while it is traced: the code that runs, with the names that it mentions and their
lines, and the attributes that are read, set and deleted.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.modules.module

from ...compat.installed import is_installed_file
from ...compat.python_names import getframe, is_python_class
from ...interpreter import Undo
from ...program.source import Source
from . import bytecode
from .external_state import ExternalCalls
from .external_writes import ExternalWrites
from .native import native
from .packages import (
    PACKAGE,
    is_closed,
    is_closed_function,
    is_installed,
    is_runtime,
    module_of_class,
    own_module,
)
from .snapshot import IMPLICIT_NAMES, Snapshot

Site = tuple[types.CodeType, int]  # a code object, and the offset of an instruction in it
# A compiled model reads, sets and deletes the model's attributes for its callers.
_THROUGH = os.path.join(PACKAGE, "runtime", "compiled_model.py")
_RUNTIME = os.path.join(PACKAGE, "runtime") + os.sep  # reads nothing on behalf of the step
# Reads of parameters and modules from `__dict__` by nn.Module itself.
_LOOKS_INSIDE = (str(torch.nn.modules.module.__file__), PACKAGE)


def can_be_instrumented(cls: type) -> bool:
    """Whether attribute reads of its instances can be recorded: whether it is a Python class whose look-up can be
    replaced."""
    if cls is types.SimpleNamespace:
        return native is not None
    return (
        is_python_class(cls)
        and not issubclass(cls, (torch.Tensor, enum.Enum, type, types.ModuleType))
        and (not is_runtime(module_of_class(cls)) or issubclass(cls, torch.optim.Optimizer))
    )


class Recording:
    """Records the code that runs, and the attributes that are read and stored, in one thread, from `begin` on.

    Attributes:
        reads: by object (its id) and attribute, the object, the instructions that have read it, and whether the step
            had set it before the first of them.
        deletes: likewise, those that have deleted it; not of a `SimpleNamespace`.
        stores: likewise, those that have set it; not of a `SimpleNamespace`.
        shown: the objects (their ids) and attributes that are first read when they are not what they were.
        codes: by its address, code that has run, with its globals; None if that is not known.
        whole: globals that were accessed as a dict.
        outside: the external state that was read; known where `codes` are.
        writes: what was written and cannot be undone; likewise.
        computed: classes that define `__getattribute__`, which may read any attribute.
        passed: the ids of the objects that are passed to step closures themselves, with the places of these calls.
    """

    def __init__(self, classes: Iterable[type], is_held: Callable[[Any], bool], profile: bool) -> None:
        """
        Args:
            classes: the classes of the objects whose reads and stores are recorded.
            is_held: whether an object existed before the step.
            profile: also record the code that runs and the C functions that it calls. It costs some 15% of a trace.
        """
        self.passed: set[bytecode.Passed] = set()
        self.reads: dict[tuple[int, str], tuple[Any, dict[Site, int], bool]] = {}
        self.stores: dict[tuple[int, str], tuple[Any, dict[Site, int], bool]] = {}
        self.deletes: dict[tuple[int, str], tuple[Any, dict[Site, int], bool]] = {}
        self.shown: set[tuple[int, str]] = set()
        self.codes: dict[int, tuple[types.CodeType, dict[Any, Any]]] | None = None
        self.whole: list[dict[Any, Any]] = []
        self.outside: ExternalCalls = ExternalCalls()
        self.writes: ExternalWrites = ExternalWrites(is_held)
        self._classes = [cls for cls in classes if cls is not types.SimpleNamespace and can_be_instrumented(cls)]
        self.computed: set[type] = {cls for cls in self._classes if _overrides_lookup(cls)}
        self._profile = profile

    def begin(self, undo: Undo) -> None:
        """Record what this thread reads and runs, until `undo` is called."""
        thread = threading.get_ident()
        methods = {
            "__getattribute__": functools.partial(_recording_method, self.reads, self.stores, thread),
            "__setattr__": functools.partial(_recording_method, self.stores, {}, thread),
            "__delattr__": functools.partial(_recording_method, self.deletes, self.stores, thread),
        }
        methods_before = [
            (cls, name, cls.__dict__.get(name), getattr(cls, name)) for cls in self._classes for name in methods
        ]
        for cls, name, own_method, method in methods_before:
            undo(_restore_classes, cls, name, own_method)
            with contextlib.suppress(TypeError, AttributeError):  # an immutable class
                setattr(cls, name, methods[name](method))
        if native is not None:
            undo(native.record_attributes, types.SimpleNamespace, None)
            native.record_attributes(types.SimpleNamespace, _recorder(self.reads, {}, thread))
        if self._profile:
            self.codes = {}
            record_calls(undo, self._called, self.codes, self.whole)

    def _called(self, function: Any, frame: types.FrameType) -> bool:
        """Record a call of a C function; returns whether to report further calls of it."""
        writes = self.writes.called(function, frame)
        return self.outside.called(function, frame) or writes

    def times_read(self, owner: Any) -> int:
        """How often an attribute of an object has been read, except by `step`."""
        sites_of_reads = [
            sites for (owner_id, name), (_, sites, _) in self.reads.items() if owner_id == id(owner) and name != "step"
        ]
        return sum(sum(sites.values()) for sites in sites_of_reads)

    def show(self, owner: Any, name: str) -> None:
        """Note that something is shown to the step as an attribute, from here on, which needs no guard."""
        if (id(owner), name) not in self.reads:
            self.shown.add((id(owner), name))

    def forget(self) -> None:
        """Drop the records, which refer to objects that the step has created."""
        self.reads.clear()
        self.stores.clear()
        self.deletes.clear()
        self.shown.clear()
        self.codes = None
        self.whole.clear()

    def executed(self) -> list[tuple[types.CodeType, dict[Any, Any]]] | None:
        """The code that has run, except for library code; None if it was not recorded."""
        if self.codes is None:
            return None
        return [(code, table) for code, table in self.codes.values() if not is_closed_code(code, table)]


def is_closed_code(code: types.CodeType, table: dict[Any, Any]) -> bool:
    """Whether it is library code that reads no state of the user's."""
    name = table.get("__name__")
    return (
        is_runtime(name) or name not in (None, "builtins") and is_closed(name) or code.co_filename.startswith(PACKAGE)
    )


def _overrides_lookup(cls: type) -> bool:
    method = cls.__getattribute__
    return isinstance(method, types.FunctionType) and not is_closed(method.__module__)


def _restore_classes(cls: type, name: str, own_method: Any) -> None:
    """Restore the method that `cls` itself defined, if any."""
    if own_method is not None:
        setattr(cls, name, own_method)
    elif name in cls.__dict__:
        delattr(cls, name)


def record_calls(
    undo: Undo,
    called: Callable[[Any, types.FrameType], bool],
    codes: dict[int, tuple[types.CodeType, dict[Any, Any]]],
    whole: list[dict[Any, Any]],
) -> None:
    """Record what this thread runs, until `undo` is called.

    Args:
        called: called with each C function, and the frame that calls it; returns whether to report further calls of it.
        codes: see `Recording`.
        whole: likewise.
    """
    undo(_stop, None if native is not None else _suspended())
    if native is not None:
        native.start(codes, whole, called)
    else:
        sys.setprofile(_profiler(codes, whole, called))


def _suspended() -> Any:
    """The profiler that is active, which is suspended; None if there is none."""
    profiler: Any = sys.getprofile()
    if profiler is not None and not callable(profiler):  # cProfile's
        profiler.disable()
    return profiler


def _stop(suspended: Any) -> None:
    if native is not None:
        native.stop()
    elif suspended is None or callable(suspended):
        sys.setprofile(suspended)
    else:
        sys.setprofile(None)
        suspended.enable()


def _recording_method(found: dict[Any, Any], stored: dict[Any, Any], thread: int, method: Callable[..., Any]) -> Any:
    """A method of a class that records which attribute of which object is accessed, and calls `method`."""
    if native is not None:
        return native.recording_method(found, stored, thread, _THROUGH, _RUNTIME, _LOOKS_INSIDE, method)
    record = _recorder(found, stored, thread, depth=2)

    def recorded_access(self: Any, name: str, *value: Any) -> Any:
        record(self, name)
        return method(self, name, *value)

    return recorded_access


def _recorder(table: dict[Any, Any], stored: dict[Any, Any], thread: int, depth: int = 1) -> Callable[[Any, str], None]:
    """A function that records a read or a store: of which object, by which instruction of the code `depth` frames up,
    and whether it was `stored` before the first."""

    def record(owner: Any, name: str) -> None:
        frame = getframe(depth)
        while frame.f_code.co_filename == _THROUGH and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        if name == "__class__" or name == "__dict__" and code.co_filename.startswith(_LOOKS_INSIDE):
            return
        if threading.get_ident() != thread or code.co_filename.startswith(_RUNTIME):
            return
        key = id(owner), name
        if key not in table:
            table[key] = (owner, {}, key in stored)
        sites, site = table[key][1], (code, frame.f_lasti)
        sites[site] = sites.get(site, 0) + 1

    return record


def _profiler(codes: dict[Any, Any], whole: list[Any], called: Callable[..., bool]) -> Callable[..., Any]:
    dull: set[Any] = set()

    def record(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes[id(frame.f_code)] = (frame.f_code, frame.f_globals)
        elif event == "c_call" and argument is globals:
            whole.append(frame.f_globals)
        elif event == "c_call":
            owner = argument.__self__
            # Not a bound method, which would keep its object: PyTorch copies a gradient that somebody else holds.
            is_function = owner is None or isinstance(owner, (type, types.ModuleType))
            key = argument if is_function else (type(owner), argument.__name__)
            if key not in dull and not called(argument, frame):
                dull.add(key)

    return record


def functions_of(codes: Iterable[types.CodeType]) -> list[types.FunctionType]:
    """The functions with these code objects."""
    code_objects = list(codes)
    if not code_objects:
        return []
    ids = set(map(id, code_objects))
    return [f for f in gc.get_referrers(*code_objects) if type(f) is types.FunctionType and id(f.__code__) in ids]


# User code that mentions one of these may read what a function is made of.
_OF_FUNCTIONS = {"__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__", "cell_contents",
                 "getclosurevars", "signature"}  # fmt: skip
# User code that mentions one of these may read all attributes of an object.
_ANY_ATTRIBUTE = {"vars", "__dict__", "globals", "dir", "attrgetter", "methodcaller", "format", "format_map", "eval",
                  "exec", "pickle"}  # fmt: skip
# Likewise, if code of these modules has run: `copy` is also a method of dicts and lists.
_ANY_ATTRIBUTE_BY = {"copy": "copy", "deepcopy": "copy", "asdict": "dataclasses", "astuple": "dataclasses",
                     "getmembers": "inspect"}  # fmt: skip
_TELL_FIELDS = {"dataclasses", "typing", "inspect"}
_BY_METHOD = {"__setattr__", "__delattr__"}
_PAST_LOOKUP = {"__getattribute__", "__get__", "getattr_static"}
_HANDLED = {"__context__", "format_exc", "print_exc"}
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr"}


class Executed:
    """The code that the Python part of a step has executed.

    Attributes:
        code: the code objects, each with the globals that it ran with.
        cached: functions behind an `lru_cache` that held results before the step.
        mentioned: all names in code that does not belong to an installed package.
        attributes: those of them that may be names of attributes.
        any_attribute: some of that code may read all attributes of an object.
        reads_past_classes: some of it looks attributes up by a method of a class, mostly `object.__getattribute__`.
        stores_past_classes: some of it sets attributes by a method of a class, mostly `object.__setattr__`.
        modules: the names of the modules of the code, libraries included.
        may_read_fields: modules have run that read the annotations of classes and the fields of dataclasses.
        lines: the lines where the code reads and writes names.
    """

    def __init__(self, snapshot: Snapshot, recording: Recording) -> None:
        self.modules: set[Any | None] = {table.get("__name__") for _, table in (recording.codes or {}).values()}
        self.may_read_fields: bool = recording.codes is None or not _TELL_FIELDS.isdisjoint(self.modules)
        executed = recording.executed()
        if executed is None:
            executed = [
                (inner, functions[0].__globals__)
                for code, functions in snapshot.functions.items()
                if not is_installed(own_module(functions[0]))  # nobody changes those between the first two calls
                for inner in bytecode.with_inner(code)
            ]
        self.cached: list[types.FunctionType] = [
            f for f in snapshot.cached if not is_closed_function(f) and not is_installed(own_module(f))
        ]
        executed += [(inner, f.__globals__) for f in self.cached for inner in bytecode.with_inner(f.__code__)]
        self.code = executed
        self.lines: CodeLines = CodeLines([code for code, _ in executed])
        user_code = [code for code, table in executed if not is_installed(table.get("__name__"))]
        self.mentioned: set[str] = {name for code in user_code for name in _names(code)}
        attributes = {name for code in user_code for name in (*bytecode.attribute_names(code), *_constants(code))}
        self.attributes: set[str] = attributes - IMPLICIT_NAMES
        any_attribute = _ANY_ATTRIBUTE | {
            name for name, module in _ANY_ATTRIBUTE_BY.items() if recording.codes is None or module in self.modules
        }
        self.any_attribute: bool = any(
            not any_attribute.isdisjoint(code.co_names) or _computes(code) for code in user_code
        )
        self.reads_past_classes: bool = any(
            not _PAST_LOOKUP.isdisjoint(_names(code)) for code in user_code if code.co_name not in _PAST_LOOKUP
        )
        self.stores_past_classes: bool = any(not _BY_METHOD.isdisjoint(code.co_names) for code in user_code)
        self._user_code = user_code
        self._ran = {code for code, _ in executed}
        self._inspects = self.any_attribute or not _OF_FUNCTIONS.isdisjoint(self.mentioned)

    def depends_on(self, function: types.FunctionType) -> bool:
        """Whether a function has run, or user code may read what it is made of."""
        return self._inspects or function.__code__ in self._ran

    def reads_handled_exception(self) -> bool:
        """Whether user code may inspect the exception that is being handled, or raise it again."""
        return any(not _HANDLED.isdisjoint(code.co_names) or bytecode.raises_again(code) for code in self._user_code)


class CodeLines:
    """The lines where code reads and writes names."""

    def __init__(self, codes: list[types.CodeType]) -> None:
        self._codes = codes

    def where_read(self, name: str, user_code: bool = False) -> Source | None:
        """A line that reads the name; with `user_code`, a line of user code and not of an installed package."""
        return self._line(name, lambda lines: lines.reads, user_code)

    def where_written(self, name: str) -> Source | None:
        """A line that writes the name."""
        return self._line(name, lambda lines: lines.writes, False)

    def _line(
        self, name: str, part: Callable[[bytecode.NameLines], dict[str, Source]], user_code: bool
    ) -> Source | None:
        for code in self._codes:
            if user_code and is_installed_file(code.co_filename):
                continue
            for inner in bytecode.with_inner(code):
                line = part(bytecode.lines(inner)).get(name)
                if line is not None:
                    return line
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from _constants(code)


def _constants(code: types.CodeType) -> Iterator[str]:
    """The strings in `code` that may be names."""
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, tuple):
            yield from (c for c in constant if isinstance(c, str))


def _computes(code: types.CodeType) -> bool:
    """Whether it accesses attributes by names that it computes."""
    if _BY_STRING.isdisjoint(code.co_names):
        return False
    return not any(isinstance(c, str) and c.isidentifier() for c in code.co_consts)
