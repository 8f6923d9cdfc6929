"""The code that ran while a step was traced: the names that it mentions, and their lines."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

from ...program.source import Source
from . import bytecode
from .object_kinds import INSTALLED_FOLDERS, is_closed_function, is_installed, own_module
from .recording import Recording
from .snapshot import Snapshot

# User code that mentions one of these may read all attributes of an object.
_ANY_ATTRIBUTE = {"vars", "__dict__", "globals", "dir", "attrgetter", "methodcaller", "asdict", "astuple", "format",
                  "format_map", "eval", "exec", "getmembers", "pickle", "deepcopy", "copy"}  # fmt: skip
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
        any_attribute: some of that code may read all attributes of an object.
        reads_past_classes: some of it looks attributes up by a method of a class, mostly `object.__getattribute__`.
        stores_past_classes: some of it sets attributes by a method of a class, mostly `object.__setattr__`.
        modules: the names of the modules of the code, libraries included.
        may_read_fields: modules have run that read the annotations of classes and the fields of dataclasses.
        lines: the lines where the code reads and writes names.
    """

    def __init__(self, snapshot: Snapshot, recording: Recording) -> None:
        self.modules = {table.get("__name__") for _, table in (recording.codes or {}).values()}
        self.may_read_fields = recording.codes is None or not _TELL_FIELDS.isdisjoint(self.modules)
        executed = recording.executed()
        if executed is None:
            executed = [
                (inner, functions[0].__globals__)
                for code, functions in snapshot.functions.items()
                if not is_installed(own_module(functions[0]))  # nobody changes those between the first two calls
                for inner in bytecode.with_inner(code)
            ]
        self.cached = [f for f in snapshot.cached if not is_closed_function(f) and not is_installed(own_module(f))]
        executed += [(inner, f.__globals__) for f in self.cached for inner in bytecode.with_inner(f.__code__)]
        self.code = executed
        self.lines = CodeLines([code for code, _ in executed])
        own = [code for code, table in executed if not is_installed(table.get("__name__"))]
        self.mentioned = {name for code in own for name in _names(code)}
        self.any_attribute = any(not _ANY_ATTRIBUTE.isdisjoint(code.co_names) or _computes(code) for code in own)
        self.reads_past_classes = any(
            not _PAST_LOOKUP.isdisjoint(_names(code)) for code in own if code.co_name not in _PAST_LOOKUP
        )
        self.stores_past_classes = any(not _BY_METHOD.isdisjoint(code.co_names) for code in own)
        self._own = own

    def reads_handled_exception(self) -> bool:
        """Whether user code may inspect the exception that is being handled, or raise it again."""
        return any(not _HANDLED.isdisjoint(code.co_names) or bytecode.raises_again(code) for code in self._own)


class CodeLines:
    """The lines where code reads and writes names."""

    def __init__(self, codes: list[types.CodeType]) -> None:
        self._codes = codes

    def where_read(self, name: str, own: bool = False) -> Source | None:
        """A line that reads the name; with `own`, a line of user code and not of an installed package."""
        return self._line(name, lambda found: found.reads, own)

    def where_written(self, name: str) -> Source | None:
        """A line that writes the name."""
        return self._line(name, lambda found: found.writes, False)

    def _line(self, name: str, part: Callable[[bytecode.NameLines], dict[str, Source]], own: bool) -> Source | None:
        for code in self._codes:
            if own and code.co_filename.startswith(INSTALLED_FOLDERS):
                continue
            for inner in bytecode.with_inner(code):
                found = part(bytecode.lines(inner)).get(name)
                if found is not None:
                    return found
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
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
