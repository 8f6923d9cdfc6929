"""Makes guards of what a step reads, and of everything reached from there."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Set
from typing import Any

import torch

from ...compat.python_names import is_python_class
from ...compat.torch_names import MODULE_TABLES
from ...optim.schedule import schedules_of
from .access import MISSING, class_table, slot_value
from .additions import Additions
from .bytecode import Passed, Use
from .guards import (
    CellGuard,
    FunctionGuard,
    ListGuard,
    ReadGuard,
    TableGuard,
    describe_attribute,
    describe_global,
    undisguised,
    with_article,
)
from .kind import kind_of
from .operators import OPERATORS, is_operator
from .packages import is_closed_class, is_installed, is_runtime, module_of_class
from .recording import Executed
from .snapshot import IMPLICIT_NAMES, OF_FIELDS, SETTINGS_OF_SYS, Snapshot


class Values:
    """Collects the guards of one trace.

    Attributes:
        snapshot: what the step could reach.
        executed: the code that has run.
        tables, lists, cells, functions, reads: the guards, by what they guard.
        objects: by id, objects whose class is guarded.
        tensors: by id, tensors whose properties are guarded.
        classes: the classes of these objects, with the names that are read on the objects.
        looked_at: the ids of everything that was guarded.
        additions: collections that the step only adds to.
        too_large: containers that are too large to be compared at each call, by name, with a description.
        unguardable: objects whose changes cannot be detected, by id, each with a description.
        weak: something is held by a weak reference, which may expire.
        in_class: greater than 0 within classes, whose contents are code, and not the step's state.
    """

    def __init__(self, snapshot: Snapshot, executed: Executed, passed: Collection[Passed]) -> None:
        """`passed`: as for `Additions`."""
        self.snapshot = snapshot
        self.executed = executed
        self.too_large: list[tuple[str, str]] = []
        self.unguardable: dict[int, tuple[Any, str]] = {}
        self.weak = False
        self.tables: dict[int, TableGuard] = {}
        self.lists: dict[int, ListGuard] = {}
        self.deques: dict[int, ListGuard] = {}
        self.cells: dict[int, CellGuard] = {}
        self.objects: dict[int, Any] = {}
        self.functions: dict[int, FunctionGuard] = {}
        self.reads: dict[Any, ReadGuard] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.classes: dict[type, set[str]] = {}
        self.looked_at: set[int] = set()
        self.additions: Additions = Additions(self.looked_at, passed)
        self.in_class: int = 0
        self._classes_seen: set[tuple[type, int]] = set()

    # -- of values, by their kinds --

    def value(self, value: Any, description: str, name: str) -> None:
        """Guard the content of a value that was read, and what is reached through it."""
        kind = kind_of(type(value))
        if not kind.is_leaf and id(value) not in self.looked_at:
            self.looked_at.add(id(value))
            kind.guard(value, self, description, name)

    def value_in_use(self, value: Any, uses: list[Use], description: str, name: str) -> None:
        """Guard the content of a value that was read, as far as these uses depend on it."""
        if self.additions.collects(value, uses):
            return
        if not self.additions.collects_in_items(value, uses):
            self.value(value, description, name)
        elif isinstance(value, dict):  # which collections it holds, but not what they hold
            guard = self.table(value, lambda key: f"the content of {description}", name)
            guard.whole = True
            guard.expected = dict(self.before(value))
            if isinstance(value, defaultdict):
                self.value(value.default_factory, description, name)
        else:
            self.lists[id(value)] = ListGuard(
                value, self.snapshot.items_before(value), f"the content of {description}", name
            )

    # -- for kinds --

    def is_leaf(self, value: Any) -> bool:
        """Whether a value is immutable, and refers to no other objects."""
        return kind_of(type(value)).is_leaf

    def before(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """The former content of a dict."""
        state = self.snapshot.table(table)
        return table if state is None else state.before

    def table(self, table: dict[Any, Any], describe: Callable[[Any], str], name: str | None) -> TableGuard:
        """The guard of a dict."""
        guard = self.tables.get(id(table))
        if guard is None:
            guard = self.tables[id(table)] = TableGuard(table, describe, name)
        return guard

    def read(
        self, key: Any, read: Callable[[], Any], expected: Any, description: str, name: str, owner: Any = None
    ) -> None:
        """Guard what a function returns; once for each `key`, which is the id of an object, or begins with it.

        Args:
            owner: an object whose slot it is.
        """
        if key not in self.reads:
            container_id = key if type(key) is int else key[0] if type(key) is tuple else 0
            self.reads[key] = ReadGuard(read, expected, description, name, container_id, owner)

    def slot(self, owner: Any, name: str, before: Any, uses: list[Use] | None = None) -> None:
        """Guard an attribute in `__slots__`, and its content as far as these uses depend on it."""
        description = describe_attribute(owner)(name)
        self.read((id(owner), name), functools.partial(slot_value, owner, name), before, description, name, owner)
        if before is not MISSING:
            self.value_in_use(before, uses or [None], description, name)

    def content(self, value: Any, description: str, name: str) -> bool:
        """Guard what the snapshot holds of an object that only its kind can read; returns whether there is any."""
        content = self.snapshot.content(value)
        if content is not None:
            self.read(id(value), content.read, content.before, description, name)
        return content is not None

    def fields(self, value: Any, names: tuple[str, ...], description: str, name: str) -> None:
        """Guard attributes that are stored in C rather than in a dict: the objects, and their contents."""
        read = functools.partial(_attributes, value, names)
        self.read((id(value), names), read, read(), f"the content of {description}", name)
        for content in read():
            if content is not MISSING:
                self.value(content, description, name)

    def note_size(self, too_large: str | None, description: str, name: str) -> None:
        """Note that an object is too large to be compared at each call."""
        if too_large is not None and name:
            self.too_large.append((name, f"{description}, {too_large}"))

    # -- of names --

    def name(self, table: dict[Any, Any], name: Any, before: Any, describe: Any, uses: list[Use] | None = None) -> None:
        """Guard a name in a dict that was read."""
        guard = self.table(table, describe, None)
        if name in guard.expected and guard.expected[name] is not MISSING and uses is None:
            return
        guard.expected[name] = before
        if before is not MISSING:
            self.value_in_use(before, uses or [None], describe(name), name)

    def mentioned_in(self, table: dict[Any, Any], describe: Callable[[Any], str], all_of_them: bool = False) -> None:
        """For an object whose reads are not recorded one by one: the attributes that the code mentions, or all if it
        may read any."""
        before, mentioned = self.before(table), self.executed.attributes
        all_of_them = all_of_them or self.executed.any_attribute
        for name in before if all_of_them else mentioned & before.keys():
            if name not in IMPLICIT_NAMES:
                self.name(table, name, before[name], describe)
        guard = self.table(table, describe, None)
        guard.whole = guard.whole or all_of_them and set(guard.expected) == set(before)
        guard.expect_absent(mentioned)

    def all_of(self, table: dict[Any, Any], describe: Callable[[Any], str]) -> None:
        """All attributes of an object, and that there are no others."""
        for name, before in self.before(table).items():
            self.name(table, name, before, describe)
        self.table(table, describe, None).whole = True

    def library_module(self, table: dict[Any, Any]) -> None:
        """A module of the standard library, PyTorch or NumPy, in which user code may have set or replaced something."""
        guard = self.table(table, describe_global(table), None)
        guard.expect_absent(self.executed.attributes)
        for name in self.executed.attributes & table.keys():
            current = undisguised(table[name])
            guard.expected.setdefault(name, current)
            if table is vars(sys) and name in SETTINGS_OF_SYS or isinstance(current, types.ModuleType):
                self.value(current, f"{table.get('__name__')}.{name}", name)

    def of_object(self, owner: Any) -> None:
        """Guard an object of which something was read."""
        if id(owner) in self.objects:
            return
        self.objects[id(owner)] = owner
        if isinstance(owner, torch.nn.Module):
            table = owner.__dict__
            for part in MODULE_TABLES:
                self.name(table, part, self.before(table).get(part, MISSING), describe_attribute(owner))
        elif isinstance(owner, torch.optim.Optimizer):
            kind = with_article(type(owner).__qualname__)
            for schedule in schedules_of(owner):
                self.value(schedule, f"a schedule of {kind}", "")
            before = self.snapshot.parameters_before(owner)
            key, read = (id(owner), "params"), functools.partial(_parameters_in, owner)
            self.read(key, read, before, f"the parameters of {kind}", "param_groups")
            self.tensors.update((id(parameter), parameter) for parameter in before)

    def function(self, function: types.FunctionType) -> None:
        """Guard what user code reads of a function; its definition, too, if it has run or code may read that."""
        if self.executed.depends_on(function):
            self.definition(function)
        elif id(function) not in self.functions:
            self._attributes_of_function(function)

    def _attributes_of_function(self, function: types.FunctionType) -> None:
        for attribute in _FUNCTION_METADATA & self.executed.mentioned:
            read = functools.partial(operator.attrgetter(attribute), function)
            self.read((id(function), attribute), read, read(), f"{attribute} of {function.__qualname__}", attribute)
            self.value(read(), f"{attribute} of {function.__qualname__}", attribute)
        if self.snapshot.table(function.__dict__) is not None:
            self.mentioned_in(function.__dict__, describe_attribute(function))

    def definition(self, function: types.FunctionType) -> None:
        """Guard a function's code, its default arguments, and what user code reads of it."""
        if id(function) in self.functions:
            return
        name, mentioned = function.__name__, self.executed.mentioned
        before = self.snapshot.definition_before(function)
        self._attributes_of_function(function)
        if "__globals__" in mentioned:
            self.mentioned_in(function.__globals__, describe_global(function.__globals__), all_of_them=True)
        if not _READS_CELLS.isdisjoint(mentioned):
            for cell in function.__closure__ or ():
                self.value(cell, f"a variable that {function.__qualname__} uses", "")
        description = f"the code of {function.__qualname__} or its default arguments"
        self.functions[id(function)] = FunctionGuard(function, before, description, name)
        positional, defaults = before[0].co_varnames[: before[0].co_argcount], before[1] or ()
        for name, default in (
            *zip(positional[len(positional) - len(defaults) :], defaults, strict=True),
            *(before[2] or ()),
        ):
            self.value(default, f"a default argument of {function.__qualname__}", name)

    # -- classes --

    def of_class(self, cls: type, names: set[str]) -> None:
        """Guard the names that are read on instances of a class, and its operators."""
        if is_runtime(module_of_class(cls)) or not is_python_class(cls):
            return
        if not is_closed_class(cls) and not is_installed(module_of_class(cls)):
            bases = operator.attrgetter("__mro__")
            description = f"the base classes of {cls.__qualname__}"
            self.read((id(cls), "__mro__"), functools.partial(bases, cls), cls.__mro__, description, "__bases__")
            for attribute in _CLASS_METADATA & self.executed.mentioned:
                read = functools.partial(operator.attrgetter(attribute), cls)
                self.read((id(cls), attribute), read, read(), f"{attribute} of {cls.__qualname__}", attribute)
        self.in_class += 1
        for base in (*cls.__mro__, *type.mro(type(cls))):
            self._base(base, names)
        self.in_class -= 1

    def _base(self, base: type, names: set[str]) -> None:
        if (base, len(names)) in self._classes_seen:
            return
        self._classes_seen.add((base, len(names)))
        if is_closed_class(base):
            self._closed_base(base, names)
            return
        table, mentioned = class_table(base), self.executed.attributes
        before, describe = self.before(table), describe_attribute(base)
        guard = self.table(table, describe, None)
        guard.of_class = base
        installed = is_installed(module_of_class(base))
        attribute = OF_FIELDS if self.executed.may_read_fields else ()
        for name in before:
            if installed and (name in names or is_operator(name)):
                guard.expected.setdefault(name, before[name])
            elif name in names or name in mentioned or is_operator(name) or name in attribute:
                self.name(table, name, before[name], describe)
        guard.expect_absent(names, *((_SET_ON_PACKAGE_CLASSES,) if installed else (mentioned, OPERATORS)))

    def _closed_base(self, base: type, names: set[str]) -> None:
        """A class of PyTorch or the standard library, in which a method may be replaced."""
        if not is_python_class(base):
            return
        table = class_table(base)
        looked_up: list[Set[str]] = [names, _CALL]
        if not module_of_class(base).startswith("torch"):
            looked_up.append(self.executed.attributes)
        guard = self.table(table, describe_attribute(base), None)
        guard.of_class = base
        guard.expected.update({name: value for name, value in table.items() if is_operator(name)})
        guard.expected.update({name: table[name] for names in looked_up for name in names & table.keys()})
        guard.expect_absent(*looked_up)


def _attributes(value: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple([getattr(value, name, MISSING) for name in names])


def _parameters_in(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return tuple([p for group in optimizer.param_groups for p in group["params"]])


_CALL = frozenset({"__call__"})
# Names that may be set on classes of installed packages.
_SET_ON_PACKAGE_CLASSES = {"__call__", "__getattr__", "__getattribute__"}
_READS_CELLS = {"__closure__", "cell_contents", "getclosurevars"}
_CLASS_METADATA = {"__name__", "__qualname__"}
_FUNCTION_METADATA = {"__doc__", "__name__", "__qualname__", "__annotations__"}  # besides code and defaults
