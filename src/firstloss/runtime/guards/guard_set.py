"""The guards of one traced step: collected after its trace, checked at each call, and explained.

All that the step's Python has read counts: attributes that were looked up while it was traced, globals and variables
that the code that ran names, what is in the containers that these hold, hooks, the functions themselves. A name that
was not there counts as missing.
"""

from __future__ import annotations

import builtins
import functools
import operator
import os
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ...capture.lost_history import is_returned
from ...compat.python_names import environment_of, is_python_class, lru_cache_wrapper
from ...compat.torch_names import (
    MODULE_TABLES,
    PARAMETER_FLAG,
    backward_hooks,
    is_parameter,
    post_accumulate_grad_hooks,
)
from ...program.source import Source
from . import bytecode, caches, contents
from .bytecode import Collect, ItemUpdate, Update, Use
from .kinds import (
    INSTALLED_FOLDERS,
    Kind,
    behind,
    can_be_instrumented,
    is_closed,
    is_installed,
    items_of,
    kind_of,
    table_of,
)
from .native import native
from .pytorch import namespaces, undisguised
from .recording import Recording, is_closed_code
from .snapshot import (
    MISSING,
    Snapshot,
    Table,
    apart_in_optimizers,
    cell_content,
    class_table,
    definition,
    own_attributes,
    slot_value,
)

_NUMBERS = (int, float)
_PLAIN = (int, float, bool, str, bytes, bytearray, complex, type(None), torch.dtype, torch.device, torch.Size)
# In these a module keeps its parts: looked up by nn.Module itself.
# Code of the user's that mentions one of these may look at all attributes of an object.
_ANY_ATTRIBUTE = {"vars", "__dict__", "globals", "dir", "attrgetter", "methodcaller", "asdict", "astuple", "format",
                  "format_map", "eval", "exec", "getmembers", "pickle", "deepcopy", "copy"}  # fmt: skip
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr"}


class Change(NamedTuple):
    """Something that a step reads is not what it was."""

    what: str  # for people
    name: str  # as the code mentions it
    old: Any
    new: Any
    place: int = 0  # the id of the dict, list, variable or object that holds it


class TableGuard:
    """Names in a dict: all of them (`whole`), in their order, or some."""

    __slots__ = ("table", "expected", "whole", "_describe", "name")

    def __init__(self, table: dict, describe: Callable[[Any], str], name: str | None = None) -> None:
        self.table = table
        self.expected: dict[Any, Any] = {}
        self.whole = False
        self._describe = describe
        self.name = name  # as the code mentions the dict, where its keys are not names

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Key, old and new content of what has changed; the key is MISSING for the dict as a whole."""
        plain = type(self.table) is dict
        get = self.table.get if plain else lambda key, default: dict.get(self.table, key, default)
        if plain and all(map(operator.is_, map(self.table.get, self.expected), self.expected.values())):
            entries: Iterable[tuple[Any, Any]] = ()  # there may be thousands, as in PyTorch's modules
        else:
            entries = self.expected.items()
        for key, old in entries:
            new = get(key, MISSING)
            if new is not old and not same(old, new) and undisguised(new) is not undisguised(old):
                yield key, old, new
        if self.whole:
            before = [key for key, value in self.expected.items() if value is not MISSING]
            now = list(table_of(self.table))
            if now != before:
                yield MISSING, before, now

    def change(self, key: Any, old: Any, new: Any) -> Change:
        """In words."""
        name = self.name if self.name is not None else str(key)
        return Change(self._describe(key), name, old, new, id(self.table))


class ListGuard:
    """The items of a list."""

    __slots__ = ("list", "expected", "what", "name")

    def __init__(self, list_: list, expected: list, what: str, name: str) -> None:
        self.list = list_
        self.expected = expected
        self.what = what
        self.name = name

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """As of a TableGuard."""
        now = items_of(self.list)
        if len(now) != len(self.expected):
            yield MISSING, self.expected, now
            return
        for i, (old, new) in enumerate(zip(self.expected, now, strict=True)):
            if new is not old and not same(old, new):
                yield i, old, new

    def change(self, key: Any, old: Any, new: Any) -> Change:
        """As of a TableGuard."""
        return Change(self.what, self.name, old, new, id(self.list))


class CellGuard:
    """A variable of an enclosing function."""

    __slots__ = ("cell", "expected", "what", "name")

    def __init__(self, cell: types.CellType, expected: Any, what: str, name: str) -> None:
        self.cell = cell
        self.expected = {None: expected}
        self.what = what
        self.name = name

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """As of a TableGuard."""
        try:
            now = self.cell.cell_contents
        except ValueError:
            now = MISSING
        if now is not self.expected[None] and not same(self.expected[None], now):
            yield None, self.expected[None], now

    def change(self, key: Any, old: Any, new: Any) -> Change:
        """As of a TableGuard."""
        return Change(self.what, self.name, old, new, id(self.cell))


class ReadGuard(NamedTuple):
    """What a function gives, compared with what it gave."""

    read: Callable[[], Any]
    expected: Any
    what: str
    name: str
    place: int


class GuardSet:
    """What a step has read.

    Attributes:
        unwatched: what is too large to be compared at each call, by name, and as people say it.
        unwatchable: what nobody can tell of whether it has changed.
        updated: by the id of their dict or cell and their name, numbers that only their own update has read.
        collected: by id, the collections that were only added to.
        counted: by id, dicts and lists whose numbers only their own updates have read, with these by key.
        unknown: functions that ran, and that were not known before: what they read before is not known either.
    """

    def __init__(self, snapshot: Snapshot, recording: Recording, step: str) -> None:
        self._snapshot: Any = snapshot
        self._step = step
        self.unwatched: list[tuple[str, str]] = []
        self.unwatchable: dict[int, tuple[Any, str]] = {}
        self.updated: dict[tuple[int, Any], tuple[Any, list[Update], bool]] = {}
        self.collected: dict[int, Any] = {}
        self.counted: dict[int, tuple[Any, dict[Any, list[Update]]]] = {}
        self.unknown: list[types.CodeType] = []
        self._tables: dict[int, TableGuard] = {}
        self._lists: dict[int, ListGuard] = {}
        self._cells: dict[int, CellGuard] = {}
        self._objects: dict[int, Any] = {}
        self._reads: dict[Any, ReadGuard] = {}
        self._leaves: dict[int, torch.Tensor] = {}  # tensors, for what PyTorch keeps beside their content
        self._classes: dict[type, set[str]] = {}
        self._classes_seen: set[tuple[type, int]] = set()
        self._looked_at: set[int] = set()
        self._in_class = 0  # what a class or an installed package holds is code, and no state of the step's
        self._sites: dict[str, list[bytecode.Source]] = {}
        executed = recording.executed()
        if executed is None:
            executed = [
                (inner, functions[0].__globals__)
                for code, functions in snapshot.functions.items()
                if not is_installed(functions[0].__module__)  # nobody changes those between the first two calls
                for inner in bytecode.with_inner(code)
            ]
        cached = [f for f in snapshot.cached if not is_closed(f.__module__) and not is_installed(f.__module__)]
        executed = [*executed, *((inner, f.__globals__) for f in cached for inner in bytecode.with_inner(f.__code__))]
        self._codes = [code for code, _ in executed]
        own = [code for code, table in executed if not is_installed(table.get("__name__"))]
        self.mentioned = {name for code in own for name in _names(code)}
        self._any_attribute = any(not _ANY_ATTRIBUTE.isdisjoint(code.co_names) or _computes(code) for code in own)
        self._functions(executed, recording)
        self._attributes(recording)
        for function in cached:
            self._reads_of(function)
        for root in snapshot.roots:
            if kind_of(type(root)) in (Kind.BINDING, Kind.CLASS):  # a method, perhaps of a class
                self._value(root, "the step or its arguments", "")
        self._classes_read()

    # -- what is read --

    def _functions(self, executed: list[tuple[types.CodeType, dict]], recording: Recording) -> None:
        snapshot = self._snapshot
        known = {inner for code in snapshot.functions for inner in bytecode.with_inner(code)}
        globals_: dict[tuple[int, str], tuple[dict, list[Use]]] = {}
        cells: dict[int, tuple[types.CellType, str, types.FunctionType, list[Use]]] = {}
        for code, table in executed:
            if code not in known and not _is_generated(code, table) and not is_installed(table.get("__name__")):
                self.unknown.append(code)
            for name in bytecode.global_names(code):
                globals_.setdefault((id(table), name), (table, []))[1].extend(bytecode.uses_of(code, name))
            for module, name in bytecode.imports(code):
                self._imported(module, name)
            for function in snapshot.functions.get(code, ()):
                self._definition(function)
                for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                    uses = [use for inner in bytecode.with_inner(code) for use in bytecode.uses_of(inner, name)]
                    cells.setdefault(id(cell), (cell, name, function, []))[3].extend(uses)
        for (_, name), (table, uses) in globals_.items():
            self._global(table, name, uses)
        for cell, name, function, uses in cells.values():
            self._cell(cell, name, function, uses)
        for table in recording.whole:
            self._table(table, _describe_global(table), None)
            for name, value in self._before(table).items():
                if not name.startswith("__"):
                    self._name(table, name, value, _describe_global(table))
        if {"environ", "getenv"} & self.mentioned:
            self._read("environ", _environment, snapshot_environment(snapshot), "what is in os.environ", "environ")

    def _reads_of(self, function: types.FunctionType) -> None:
        """What a function may read of objects, of which nothing was noted, since it did not run."""
        names = [name for code in bytecode.with_inner(function.__code__) for name in bytecode.global_names(code)]
        held = [self._before(function.__globals__).get(name) for name in names]
        held += [cell_content(cell) for cell in function.__closure__ or ()]
        for value in held:
            table = own_attributes(value) if kind_of(type(value)) is Kind.INSTANCE else None
            if table is not None:
                self._some(table, _describe_attribute(value))

    def _definition(self, function: types.FunctionType) -> None:
        if id(function) in self._reads:
            return
        name = function.__name__
        known = self._snapshot.definitions.get(id(function))
        before = definition(function) if known is None else known[1]
        what = f"the code of {function.__qualname__} or its default arguments"
        if id(function.__dict__) in self._snapshot.tables:
            self._some(function.__dict__, _describe_attribute(function))
        self._read(id(function), lambda: definition(function), before, what, name)
        for default in (*(before[1] or ()), *(value for _, value in before[2] or ())):
            self._value(default, f"a default argument of {function.__qualname__}", name)

    def _global(self, table: dict, name: str, uses: list[Use]) -> None:
        before = self._before(table).get(name, MISSING)
        if is_installed(table.get("__name__")) and kind_of(type(before)) not in (Kind.FUNCTION, Kind.CLASS):
            self._table(table, _describe_global(table), None).expected[name] = before
            return
        if self._decides_nothing((id(table), name), before, uses):
            return
        self._name(table, name, before, _describe_global(table), uses)
        if before is MISSING:
            own = vars(builtins)
            self._name(own, name, own.get(name, MISSING), _describe_global(own))

    def _cell(self, cell: types.CellType, name: str, function: types.FunctionType, uses: list[Use]) -> None:
        known = self._snapshot.cells.get(id(cell))
        before = known[1] if known is not None else MISSING
        if self._decides_nothing((id(cell), None), before, uses):
            return
        what = f"the variable {name} that {function.__qualname__} uses"
        self._cells[id(cell)] = CellGuard(cell, before, what, name)
        if not self._collects(before, uses):
            self._value(before, what, name)

    def _attributes(self, recording: Recording) -> None:
        snapshot = self._snapshot
        for (_, name), (owner, sites) in list(recording.reads.items()):
            if id(owner) not in snapshot.seen:  # made in the step
                continue
            uses = [bytecode.use_at(*site) for site in sites for _ in range(min(sites[site], 2))]
            self._object(owner)
            if isinstance(owner, torch.optim.Optimizer) and apart_in_optimizers(name):
                if name == "param_groups" and any(not is_closed_file(code) for code, _ in sites):
                    self._groups(owner)
                continue
            self._classes.setdefault(type(owner), set()).add(name)
            table = own_attributes(owner)
            describe = _describe_attribute(owner)
            if name == "__dict__":
                if table is not None and not isinstance(owner, torch.nn.Module):
                    for key, value in self._before(table).items():
                        self._name(table, key, value, describe)
                    self._tables[id(table)].whole = True if id(table) in self._tables else False
                continue
            slotted = snapshot.slotted.get(id(owner))
            if slotted is not None and name in slotted.names:
                before = slotted.before[slotted.names.index(name)]
                if not self._decides_nothing((id(owner), name), before, uses):
                    self._read((id(owner), name), _slot_reader(owner, name), before, describe(name), name)
                    if not self._collects(before, uses):
                        self._value(before, describe(name), name)
                continue
            if table is None:
                continue
            before = self._before(table).get(name, MISSING)
            if not self._decides_nothing((id(table), name), before, uses):
                self._name(table, name, before, describe, uses)

    def _object(self, owner: Any) -> None:
        """An object of which something is read."""
        if id(owner) in self._objects:
            return
        self._objects[id(owner)] = owner
        if isinstance(owner, torch.nn.Module):
            table = owner.__dict__
            for part in MODULE_TABLES:
                self._name(table, part, self._before(table).get(part, MISSING), _describe_attribute(owner))
        elif isinstance(owner, torch.optim.Optimizer):
            self._read(
                (id(owner), "params"),
                lambda: tuple([p for group in owner.param_groups for p in group["params"]]),
                tuple([p for group in self._snapshot.groups[id(owner)] for p in group["params"]]),
                f"the parameters of {_a(type(owner).__qualname__)}",
                "param_groups",
            )

    def _groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Code of the user's reads the parameter groups."""

        def read() -> tuple:
            return tuple([v for g in optimizer.param_groups for k, v in g.items() if k != "params"])

        before = tuple([v for g in self._snapshot.groups[id(optimizer)] for k, v in g.items() if k != "params"])
        what = f"the parameter groups of {_a(type(optimizer).__qualname__)}"
        self._read((id(optimizer), "groups"), read, before, what, "param_groups")

    def _classes_read(self) -> None:
        """Attributes that objects share, methods among them."""
        for cls, names in list(self._classes.items()):
            self._class(cls, names)

    def _class(self, cls: type, names: set[str]) -> None:
        if is_closed(cls.__module__) and not issubclass(cls, (torch.nn.Module, torch.optim.Optimizer)):
            return
        self._in_class += 1
        for base in (*cls.__mro__, *type.mro(type(cls))):
            self._base(base, names)
        self._in_class -= 1

    def _base(self, base: type, names: set[str]) -> None:
        if (base, len(names)) in self._classes_seen:
            return
        self._classes_seen.add((base, len(names)))
        if is_closed(base.__module__):
            self._closed_base(base, names)
        else:
            table = class_table(base)
            before = self._before(table)
            describe = _describe_attribute(base)
            guard = self._table(table, describe, None)
            installed = is_installed(base.__module__)
            for name in before:
                if installed and (name in names or _is_operator(name)):
                    guard.expected.setdefault(name, before[name])
                elif name in names or name in self.mentioned or _is_operator(name):
                    self._name(table, name, before[name], describe)
            missing = names if installed else names | self.mentioned
            for name in missing - before.keys():
                guard.expected.setdefault(name, MISSING)

    def _closed_base(self, base: type, names: set[str]) -> None:
        """A class of PyTorch's, of which somebody may replace a method."""
        if base.__module__.partition(".")[0] != "torch" or not is_python_class(base):
            return
        table = class_table(base)
        looked_up = names | {name for name in table if _is_operator(name)} | {"__call__"}
        found = {name: table.get(name, MISSING) for name in looked_up}
        self._table(table, _describe_attribute(base), None).expected.update(found)

    def _imported(self, module: str, name: str) -> None:
        found = sys.modules.get(module)
        if found is not None and not is_closed(module) and not is_installed(module):
            table = vars(found)
            self._name(table, name, self._before(table).get(name, MISSING), _describe_global(table))

    # -- what is in what is read --

    def _before(self, table: dict) -> dict:
        known: Table | None = self._snapshot.tables.get(id(table))
        return table if known is None else known.before

    def _table(self, table: dict, describe: Callable[[Any], str], name: str | None) -> TableGuard:
        guard = self._tables.get(id(table))
        if guard is None:
            guard = self._tables[id(table)] = TableGuard(table, describe, name)
        return guard

    def _name(self, table: dict, name: Any, before: Any, describe: Any, uses: list[Use] | None = None) -> None:
        """A name in a dict is read."""
        guard = self._table(table, describe, None)
        if name in guard.expected and guard.expected[name] is not MISSING and uses is None:
            return
        guard.expected[name] = before
        if before is not MISSING and not self._collects(before, uses or [None]):
            self._value(before, describe(name), name)

    def _value(self, value: Any, what: str, name: str) -> None:
        """What is in something that was read, and in what is in that."""
        kind = kind_of(type(value))
        if kind is Kind.LEAF or id(value) in self._looked_at:
            return
        self._looked_at.add(id(value))
        if kind is Kind.TENSOR:
            self._leaves[id(value)] = value
            self._tensor_attributes(value)
            return
        inside = f"what is in {what}"
        if kind in (Kind.DICT, Kind.LIST, Kind.SET, Kind.DEQUE, Kind.TUPLE):
            self._container(value, kind, what, inside, name)
        elif kind is Kind.FUNCTION:
            if not is_closed(value.__module__):
                self._definition(value)
        elif kind is Kind.BINDING:
            if id(value) in self._snapshot.opaque:
                _, read, reading = self._snapshot.opaque[id(value)]
                self._read(id(value), read, reading, inside, name)
            for part in behind(value):
                self._value(part, what, name)
            if isinstance(value, lru_cache_wrapper) and not is_installed(value.__module__):
                self._cached(value, f"what {what} has cached", name)
        elif kind is Kind.CELL:
            known = self._snapshot.cells.get(id(value))
            if known is not None:
                self._cells.setdefault(id(value), CellGuard(value, known[1], what, name))
                self._value(known[1], what, name)
        elif kind is Kind.CLASS:
            if not is_closed(value.__module__):
                self._class(value, set())
            self._ambient(value, name)
        elif kind is Kind.MODULE:
            self._ambient(value, name)
            if not is_closed(value.__name__) and not is_installed(value.__name__):
                self._some(vars(value), _describe_global(vars(value)))
            elif value.__name__ in sys.stdlib_module_names:
                self._of_python(vars(value))
        elif kind is Kind.OPAQUE:
            self._opaque(value, what, inside, name)
        elif kind is Kind.UNKNOWN and not self._in_class:
            self.unwatchable[id(value)] = (value, what)
        if kind in (Kind.INSTANCE, Kind.DICT, Kind.LIST, Kind.SET, Kind.DEQUE) and is_python_class(type(value)):
            self._objects.setdefault(id(value), value) if not isinstance(value, torch.nn.Module) else None
            self._classes.setdefault(type(value), set())
        if kind is Kind.INSTANCE and not can_be_instrumented(type(value)):
            table = own_attributes(value)
            if table is not None:
                self._some(table, _describe_attribute(value), all_of_them=True)

    def _of_python(self, table: dict) -> None:
        """A module of Python's own library, in which somebody may have put or replaced something."""
        expected = self._table(table, _describe_global(table), None).expected
        for name in self.mentioned:
            expected.setdefault(name, table.get(name, MISSING))

    def _ambient(self, value: Any, name: str) -> None:
        """Settings of the thread's, by which a class or the functions of a module go."""
        known = self._snapshot.opaque.get(id(value))
        if known is not None:
            self._read(id(value), known[1], known[2], f"the settings by which {name} goes", name)

    def _cached(self, function: Any, what: str, name: str) -> None:
        """What a function behind `lru_cache` has kept. What it has kept in this trace could not be copied before: the
        step is traced once more."""
        found = caches.results(function)
        new = any(kind_of(type(r)) is not Kind.LEAF and not self._snapshot.holds(r) for r in found)
        self._read(id(function), caches.unchanged(function), not new, what, name)
        for result in found:
            self._value(result, what, name)

    def _container(self, value: Any, kind: Kind, what: str, inside: str, name: str) -> None:
        large = contents.unwatched(value)
        if large is not None and name:
            self.unwatched.append((name, f"{what}, {large}"))
        if kind is Kind.DICT:
            if isinstance(value, defaultdict):
                factory = operator.attrgetter("default_factory")
                key = (id(value), "default_factory")
                self._read(key, functools.partial(factory, value), factory(value), f"the factory of {what}", name)
                self._value(factory(value), what, name)
            before = self._before(value)
            if id(value) not in self._snapshot.opaque:
                guard = self._table(value, lambda key: inside, name)
                guard.whole = True
                guard.expected = dict(before)
                items: Iterable[Any] = before.values()
            else:
                _, read, reading = self._snapshot.opaque[id(value)]
                self._read(id(value), read, reading, inside, name)
                return
        else:
            known = self._snapshot.sequences.get(id(value))
            items = known[1] if known is not None else items_of(value)
            if kind is Kind.LIST and len(items) <= contents.LARGEST:
                self._lists[id(value)] = ListGuard(value, items, inside, name)
            elif kind is not Kind.TUPLE and id(value) in self._snapshot.opaque:
                _, read, reading = self._snapshot.opaque[id(value)]
                self._read(id(value), read, reading, inside, name)
            elif kind is not Kind.TUPLE:
                self._read(id(value), contents.reader(value), _reading_of(value, items), inside, name)
            if len(items) > contents.LARGEST:
                return
        for item in items:
            self._value(item, what, name)

    def _opaque(self, value: Any, what: str, inside: str, name: str) -> None:
        large = contents.unwatched(value)
        if large is not None and name:
            self.unwatched.append((name, f"{what}, {large}"))
        known = self._snapshot.opaque.get(id(value))
        if known is not None:
            self._read(id(value), known[1], known[2], inside, name)
        for part in contents.inside(value):
            self._value(part, what, name)

    def _some(self, table: dict, describe: Callable[[Any], str], all_of_them: bool = False) -> None:
        """Of an object whose reads are not noted one by one: the attributes that the code mentions, or may."""
        before = self._before(table)
        all_of_them = all_of_them or self._any_attribute
        for name in before if all_of_them else self.mentioned & before.keys():
            if not (isinstance(name, str) and name.startswith("__")):
                self._name(table, name, before[name], describe)
        guard = self._table(table, describe, None)
        guard.whole = guard.whole or all_of_them and set(guard.expected) == set(before)
        for name in self.mentioned - before.keys():
            guard.expected.setdefault(name, MISSING)

    def _tensor_attributes(self, tensor: torch.Tensor) -> None:
        known = self._snapshot.tables.get(id(tensor.__dict__))
        if known is not None:
            self._some(known.table, lambda key: f"the attribute {key} of a tensor")

    def _read(self, key: Any, read: Any, expected: Any, what: str, name: str) -> None:
        if read is not None and key not in self._reads:
            place = key if type(key) is int else key[0] if type(key) is tuple else 0
            self._reads[key] = ReadGuard(read, expected, what, name, place)

    # -- what is not read --

    def _decides_nothing(self, place: tuple, before: Any, uses: list[Use]) -> bool:
        """Whether a number is read by nothing but its own update, as in `n += 1`."""
        if type(before) not in _NUMBERS or not uses:
            return False
        if not all(isinstance(use, Update) for use in uses):
            return False
        self.updated[place] = (before, [use for use in uses if isinstance(use, Update)], len(uses) == 1)
        return True

    def _collects(self, before: Any, uses: list[Use] | None) -> bool:
        """Whether a collection is only added to, or only counted in."""
        kind = kind_of(type(before))
        if uses and all(isinstance(use, Collect) for use in uses) and kind in (Kind.LIST, Kind.SET, Kind.DEQUE):
            self.collected[id(before)] = before
            return True
        if uses and all(isinstance(use, ItemUpdate) for use in uses) and type(before) in (dict, list, defaultdict):
            known = self.counted.setdefault(id(before), (before, {}))[1]
            for use in uses:
                if isinstance(use, ItemUpdate):
                    known.setdefault(use.key, []).append(use.update)
            return True
        return False

    def item_updates(self, container: Any, before: Any, now: Any) -> list[tuple[Any, tuple]] | None:
        """If the step does nothing with a dict or a list but count in it: the keys of the items that have changed, each
        with what `updated` holds of a number."""
        if id(container) not in self.counted or id(container) in self._looked_at:
            return None
        updates = self.counted[id(container)][1]
        if list(_keys(now)) != list(_keys(before)):
            return None
        changed = [key for key in _keys(now) if now[key] is not before[key]]
        if not all(key in updates and type(before[key]) in _NUMBERS for key in changed):
            return None
        return [(key, (before[key], updates[key], len(updates[key]) == 1)) for key in changed]

    def only_collected(self, container: Any) -> bool:
        """Whether the step does nothing with a collection but add to it."""
        return id(container) in self.collected and id(container) not in self._looked_at

    def guard_content(self, container: Any) -> None:
        """The step has changed what is in it, though it was seen to read nothing there: what was there counts."""
        self._looked_at.discard(id(container))
        self._value(container, f"{_a(type(container).__qualname__)} that the step changes", "")

    def guard_number(self, place: tuple) -> None:
        """A number whose own update cannot be repeated counts like any other."""
        before, _, _ = self.updated.pop(place)
        where, name = place
        if where in self._snapshot.cells:
            cell, _ = self._snapshot.cells[where]
            self._cells[where] = CellGuard(cell, before, "a variable that the step counts in", "")
        elif where in self._snapshot.slotted:
            owner = self._snapshot.slotted[where].owner
            self._read(place, _slot_reader(owner, name), before, _describe_attribute(owner)(name), name)
        else:
            known = self._snapshot.tables[where]
            describe = _describe_global(known.table) if known.kind == "globals" else _describe_attribute(known.owner)
            self._name(known.table, name, before, describe)

    # -- what there is to watch for at each call --

    def finish(self, state_of_generators: list[Any], weights: set[int]) -> None:
        """All is collected; from here on it can be checked.

        Args:
            state_of_generators: as `generators()` gave it before the trace.
            weights: the ids of tensors whose gradients others watch.
        """
        for (name, read), before in zip(_GENERATORS.items(), state_of_generators, strict=True):
            if read() != before:
                self._read(name, read, before, f"the state of the random generator of Python's {name}", name)
        for where, name, table in self._snapshot.hooks:
            before = self._before(table)
            self._read(
                name,
                lambda where=where, name=name: tuple(where[name].items()) if where[name] else (),
                tuple(before.items()),
                f"PyTorch's {name}",
                name,
            )
            for hook in before.values():
                self._value(hook, f"PyTorch's {name}", name)
        self._snapshot = None
        for namespace in namespaces():
            if id(namespace.table) in self._tables:
                self._tables[id(namespace.table)].expected |= namespace.expected
            else:
                self._table(namespace.table, namespace.describe, None).expected = namespace.expected
        self.tables = list(self._tables.values())
        self.lists = list(self._lists.values())
        self.cells = list(self._cells.values())
        self._classes_of = [(owner, type(owner)) for owner in self._objects.values()]
        self._reads_list = list(self._reads.values())
        self._orders = [
            (g, tuple(g.table)) for g in self.tables if g.whole and len(g.table) > 1 and type(g.table) is not dict
        ]
        leaves = list(self._leaves.values())
        self._weights = [t for t in leaves if t.requires_grad]
        self._hooked = _hooks(self._weights)
        self._apart = [t for t in leaves if id(t) not in weights]
        self._facts = _facts(self._apart)
        self._watch: Any = None  # made when all is found to fit: the step may have changed what it reads itself
        self.tensors: dict[int, list[tuple[Any, Any]]] = {}  # by id, the places that hold a tensor
        guard: Any
        for guard in (*self.tables, *self.lists, *self.cells):
            entries = enumerate(guard.expected) if isinstance(guard, ListGuard) else guard.expected.items()
            for key, value in entries:
                if isinstance(value, torch.Tensor):
                    self.tensors.setdefault(id(value), []).append((guard, key))

    def _watched(self) -> None:
        """All fits now: what changes from here on is seen at once."""
        if self._watch is None and native is not None and _versions_work():
            self._watch = native.Watch(
                [guard.table for guard in self.tables],
                [guard.list for guard in self.lists],
                [(guard.cell, guard.expected[None]) for guard in self.cells],
                self._classes_of,
            )

    def changes(self, move: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], bool]) -> list[Change]:
        """What has changed since the step was traced, of what it reads; mostly nothing.

        Args:
            move: told which tensors stand now in the places of which; says whether the compiled step can take them.
        """
        watch = self._watch
        if watch is None:
            hits: Any = [
                *(("d", i) for i in range(len(self.tables))),
                *(("l", i) for i in range(len(self.lists))),
                *(("c", i) for i in range(len(self.cells))),
                *(("o", i) for i, (owner, cls) in enumerate(self._classes_of) if type(owner) is not cls),
            ]
        else:
            hits = watch.changed()
        found: list[Change] = []
        if hits is not None:
            found = self._differing(hits, move)
        for guard in self._reads_list:
            now = guard.read()
            if not same(guard.expected, now):
                found.append(Change(guard.what, guard.name, guard.expected, now, guard.place))
        for table, order in self._orders:
            if tuple(table.table) != order:
                found.append(table.change(MISSING, order, tuple(table.table)))
        if _hooks(self._weights) != self._hooked:
            found.append(Change("the hooks of a tensor", "register_hook", None, None))
        if self._apart and _facts(self._apart) != self._facts:
            found.append(Change("the shape, dtype, gradient or memory of a tensor", "", None, None))
        if not found:
            self._watched()
        return found

    def _differing(self, hits: list[tuple[str, int]], move: Any) -> list[Change]:
        found: list[tuple[Any, tuple]] = []
        for kind, n in hits:
            if kind == "o":
                owner, cls = self._classes_of[n]
                found.append((None, (f"the class of {_a(cls.__qualname__)}", cls, type(owner))))
                continue
            guard = self._guard(kind, n)
            found += [(guard, change) for change in guard.changes()]
        if found and not self._moved(found, move):
            return [
                guard.change(*change) if guard is not None else Change(change[0], "__class__", *change[1:])
                for guard, change in found
            ]
        if self._watch is not None:
            for kind, n in hits:
                if kind != "o":
                    self._watch.settle(kind, n)
        return []

    def _guard(self, kind: str, n: int) -> Any:
        kinds: dict[str, list[Any]] = {"d": self.tables, "l": self.lists, "c": self.cells}
        return kinds[kind][n]

    def _moved(self, found: list[tuple[Any, tuple]], move: Any) -> bool:
        """Whether all that has changed is that tensors stand in the places of others that were like them."""
        new_of: dict[int, torch.Tensor] = {}
        old_of: dict[int, torch.Tensor] = {}
        count: dict[int, int] = {}
        for guard, (key, old, new) in found:
            if guard is None or key is MISSING or not _alike(old, new):
                return False
            if new_of.setdefault(id(old), new) is not new:
                return False
            old_of[id(old)] = old
            count[id(old)] = count.get(id(old), 0) + 1
        if any(len(self.tensors[i]) != n for i, n in count.items()):
            return False  # it is still in another place as well
        now = [id(new_of[i]) if i in new_of else i for i in self.tensors]
        if len(set(now)) != len(now):
            return False  # two places hold one tensor now, and held two before
        if not move([(old_of[i], new) for i, new in new_of.items()]):
            return False
        places = {i: self.tensors.pop(i) for i in new_of}
        for i, where in places.items():
            self.tensors[id(new_of[i])] = where
            for guard, key in where:
                guard.expected[key] = new_of[i]
        self._apart = [new_of.get(id(t), t) for t in self._apart]
        self._facts = _facts(self._apart)
        return True

    # -- what is said --

    def where_read(self, name: str, own: bool = False) -> Source | None:
        """A line that reads it; if `own`, of the user's code and not of an installed package's."""
        return self._line(name, lambda found: found.reads, own)

    def where_written(self, name: str) -> Source | None:
        """A line that writes it."""
        return self._line(name, lambda found: found.writes, False)

    def _line(self, name: str, part: Callable[[bytecode.Lines], dict[str, Source]], own: bool) -> Source | None:
        for code in self._codes:
            if own and code.co_filename.startswith(INSTALLED_FOLDERS):
                continue
            for inner in bytecode.with_inner(code):
                found = part(bytecode.lines(inner)).get(name)
                if found is not None:
                    return found
        return None


def _keys(container: Any) -> Iterable[Any]:
    return range(len(container)) if isinstance(container, list) else container


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same to a step's Python: the same object, or equal plain ones."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return bool(a == b) or a != a
    if isinstance(a, (tuple, frozenset)) and len(a) == len(b):
        return all(map(operator.is_, a, b)) or all(map(same, a, b)) if isinstance(a, tuple) else a == b
    return False


def generators() -> list[Any]:
    """The states of the generators whose numbers a trace cannot see."""
    return [read() for read in _GENERATORS.values()]


def _numpy_state() -> tuple:
    name, words, *rest = np.random.get_state()
    return name, words.tobytes(), *rest


# PyTorch's own are part of the Program.
_GENERATORS: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy": _numpy_state}


def _environment() -> tuple:
    return tuple(environment_of(os.environ).items())


def snapshot_environment(snapshot: Snapshot) -> tuple:
    """What the environment was before the step."""
    return snapshot.environment


def _hooks(tensors: list[torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for tensor in tensors:
        hooks, after = backward_hooks(tensor), post_accumulate_grad_hooks(tensor)
        if hooks or after:
            found.append((id(tensor), *(tuple(table.values()) for table in (hooks, after) if table)))
    return found


def _facts(tensors: list[torch.Tensor]) -> list[tuple]:
    """What of tensors decides a step, beside their content."""
    return [(t.requires_grad, t.requires_grad and t.is_leaf and t.grad is not None, t.shape, t.dtype) for t in tensors]


def _alike(old: Any, new: Any) -> bool:
    """Whether a tensor can stand in the place of another."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    if isinstance(new, torch.nn.Parameter):
        return False
    if (old.requires_grad or new.requires_grad) and not (is_returned(old) and is_returned(new)):
        return False
    if (old.shape, old.dtype, old.device, old.layout) != (new.shape, new.dtype, new.device, new.layout):
        return False
    attributes = {*old.__dict__, *new.__dict__} - {"_store", PARAMETER_FLAG}
    return not attributes and not is_parameter(new) and not is_parameter(old)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, tuple):
            yield from (c for c in constant if isinstance(c, str))


def _is_generated(code: types.CodeType, table: dict) -> bool:
    """Whether it is a module's own code, or a named tuple's."""
    return code.co_name == "<module>" or str(table.get("__name__", "namedtuple_")).startswith("namedtuple_")


def _computes(code: types.CodeType) -> bool:
    """Whether it names attributes by strings that it works out."""
    if _BY_STRING.isdisjoint(code.co_names):
        return False
    return not any(isinstance(c, str) and c.isidentifier() for c in code.co_consts)


def _reading_of(container: Any, items: Any) -> Any:
    """What `contents.reader` would have given when these were its items."""
    if isinstance(container, set):
        return contents.reader(set(items))()  # type: ignore[misc]
    return contents.reader(list(items))()  # type: ignore[misc]


def _slot_reader(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: slot_value(owner, name)


def _describe_global(table: dict) -> Callable[[Any], str]:
    return lambda name: f"the global {name} of {table.get('__name__', '?')}"


def _describe_attribute(owner: Any) -> Callable[[Any], str]:
    if isinstance(owner, type):
        return lambda name: f"the attribute {name} of the class {owner.__qualname__}"
    if isinstance(owner, types.FunctionType):
        return lambda name: f"the attribute {name} of the function {owner.__qualname__}"
    cls = type(owner)
    return lambda name: f"the attribute {name} of {_a(cls.__qualname__)}"


def is_closed_file(code: types.CodeType) -> bool:
    """Whether code is PyTorch's or ours."""
    return is_closed_code(code, {"__name__": None}) or f"{os.sep}torch{os.sep}" in code.co_filename


def _is_operator(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("__") and name.endswith("__") and name not in _NO_OPERATORS


_NO_OPERATORS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
                 "__getattribute__", "__slots__", "__qualname__", "__dataclass_fields__", "__orig_bases__",
                 "__parameters__", "__match_args__", "__firstlineno__", "__static_attributes__"}  # fmt: skip


def _a(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


_works: list[bool] = []


def _versions_work() -> bool:
    """Whether this Python counts a dict's changes: tried out, since it does not promise to."""
    if not _works:
        _works.append(_try_versions())
    return _works[0]


def _try_versions() -> bool:
    class Thing:
        pass

    def seen(change: Callable[[], None], table: dict) -> bool:
        before = native.dict_version(table)
        change()
        return bool(native.dict_version(table) != before)

    def count(thing: Any) -> None:
        thing.n += 1

    table: dict[str, Any] = {"a": 1, "b": 2}
    found = [
        seen(lambda: table.update(a=3), table),
        seen(lambda: table.__setitem__("c", 3), table),
        seen(lambda: table.pop("b"), table),
        seen(lambda: table.clear(), table),
    ]
    thing: Any = Thing()
    thing.n = 0
    for _ in range(50):  # until the interpreter has specialized it
        count(thing)
    own = thing.__dict__
    found += [seen(lambda: count(thing), own) for _ in range(50)]
    return all(found)
