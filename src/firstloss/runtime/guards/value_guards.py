"""Makes guards of what a step reads, and of everything reached from there."""

from __future__ import annotations

import abc
import functools
import io
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...compat.python_names import is_python_class, lru_cache_wrapper
from ...compat.torch_names import MODULE_TABLES
from ...optim.schedule import schedules_of
from . import lru_caches, mutable_state
from .bytecode import Updates, Use
from .equality import same
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
from .object_kinds import (
    MISSING,
    WEAK,
    ObjectKind,
    can_be_instrumented,
    class_table,
    definition,
    is_closed,
    is_closed_class,
    is_closed_function,
    is_installed,
    is_ours,
    items_of,
    kind_of,
    may_expire,
    module_of_class,
    own_attributes,
    referents,
)
from .recording import Executed
from .snapshot import OF_FIELDS, SETTINGS_OF_SYS, DictSnapshot, Snapshot

_PLAIN_DICTS = (dict, OrderedDict)


class Values:
    """Collects the guards of one trace.

    Attributes:
        tables, lists, cells, functions, reads: the guards, by what they guard.
        optimizers: each with its parameters.
        hooks: global hooks: the globals of PyTorch's module, the name in them, and the items of the dict.
        objects: by id, objects whose class is guarded.
        leaves: by id, tensors whose properties are guarded.
        classes: the classes of these objects, with the names that are read on the objects.
        looked_at: the ids of everything that was guarded.
        updates: updates that the step does not depend on.
        unwatched: containers that are too large to be compared at each call, by name, with a description.
        unwatchable: objects whose changes cannot be detected, by id, each with a description.
        weak: something is held by a weak reference, which may expire.
    """

    def __init__(self, snapshot: Snapshot, executed: Executed) -> None:
        self._snapshot = snapshot
        self._executed = executed
        self.unwatched: list[tuple[str, str]] = []
        self.unwatchable: dict[int, tuple[Any, str]] = {}
        self.weak = False
        self.tables: dict[int, TableGuard] = {}
        self.lists: dict[int, ListGuard] = {}
        self.cells: dict[int, CellGuard] = {}
        self.objects: dict[int, Any] = {}
        self.functions: dict[int, FunctionGuard] = {}
        self.reads: dict[Any, ReadGuard] = {}
        self.optimizers: list[tuple[torch.optim.Optimizer, list[torch.Tensor]]] = []
        self.hooks: list[tuple[dict, str, tuple]] = []
        self.leaves: dict[int, torch.Tensor] = {}
        self.classes: dict[type, set[str]] = {}
        self.looked_at: set[int] = set()
        self.updates = Updates(self.looked_at)
        self._classes_seen: set[tuple[type, int]] = set()
        self._in_class = 0  # the contents of classes and installed packages are code, and not the step's state

    def before(self, table: dict) -> dict:
        snapshot: DictSnapshot | None = self._snapshot.tables.get(id(table))
        return table if snapshot is None else snapshot.before

    def table(self, table: dict, describe: Callable[[Any], str], name: str | None) -> TableGuard:
        guard = self.tables.get(id(table))
        if guard is None:
            guard = self.tables[id(table)] = TableGuard(table, describe, name)
        return guard

    def name(self, table: dict, name: Any, before: Any, describe: Any, uses: list[Use] | None = None) -> None:
        """Guard a name in a dict that was read."""
        guard = self.table(table, describe, None)
        if name in guard.expected and guard.expected[name] is not MISSING and uses is None:
            return
        guard.expected[name] = before
        if before is not MISSING:
            self.value_in_use(before, uses or [None], describe(name), name)

    def value_in_use(self, value: Any, uses: list[Use], description: str, name: str) -> None:
        """Guard the content of a value that was read, as far as these uses depend on it."""
        if self.updates.collects(value, uses):
            return
        if not self.updates.collects_in_items(value, uses):
            self.value(value, description, name)
        elif isinstance(value, dict):  # which collections it holds, but not what they hold
            guard = self.table(value, lambda key: f"the content of {description}", name)
            guard.whole = True
            guard.expected = dict(self.before(value))
            if isinstance(value, defaultdict):
                self.value(value.default_factory, description, name)
        else:
            entry = self._snapshot.sequences.get(id(value))
            items = entry[1] if entry is not None else items_of(value)
            self.lists[id(value)] = ListGuard(value, items, f"the content of {description}", name)

    def value(self, value: Any, description: str, name: str) -> None:
        """Guard the content of a value that was read, and what is reached through it."""
        kind = kind_of(type(value))
        if kind is ObjectKind.LEAF or id(value) in self.looked_at:
            return
        self.looked_at.add(id(value))
        if kind is ObjectKind.TENSOR:
            self.leaves[id(value)] = value
            self._tensor_attributes(value)
            return
        if type(value) in _PLAIN_DICTS and not value and not self.before(value):  # most are: modules have a dozen each
            guard = self.table(value, lambda key: f"the content of {description}", name)
            guard.whole = True
            guard.expected = {}
            return
        inside = f"the content of {description}"
        if kind in (ObjectKind.DICT, ObjectKind.LIST, ObjectKind.SET, ObjectKind.DEQUE, ObjectKind.TUPLE):
            self._container(value, kind, description, inside, name)
        elif kind is ObjectKind.FUNCTION:
            if not is_closed_function(value):
                self.definition(value)
        elif kind is ObjectKind.BINDING:
            if id(value) in self._snapshot.opaque:
                _, read, reading = self._snapshot.opaque[id(value)]
                self.read(id(value), read, reading, inside, name)
            if isinstance(value, WEAK) and may_expire(value):
                self.weak = True
                self.unwatchable[id(value)] = (value, f"{description} (a weak reference)")
                return
            for part in referents(value):
                self.value(part, description, name)
            if isinstance(value, functools.partial):
                self._in_c(value, ("func", "args", "keywords"), description, name)
            if isinstance(value, lru_cache_wrapper) and not is_installed(value.__module__):
                self._cached(value, f"the cached results of {description}", name)
        elif kind is ObjectKind.CELL:
            entry = self._snapshot.cells.get(id(value))
            if entry is not None:
                self.cells.setdefault(id(value), CellGuard(value, entry[1], description, name))
                self.value(entry[1], description, name)
        elif kind is ObjectKind.CLASS:
            if not is_closed_class(value):
                self.of_class(value, set())
            if isinstance(value, abc.ABCMeta):
                token = abc.get_cache_token
                self.read("abc", token, token(), "the registry of abstract base classes", name)
        elif kind is ObjectKind.MODULE:
            if not is_closed(value.__name__) and not is_installed(value.__name__):
                self.some(vars(value), describe_global(vars(value)))
            elif is_closed(value.__name__) and not is_ours(value.__name__):
                self._library_module(vars(value))
        elif kind is ObjectKind.OPAQUE:
            self._opaque(value, description, inside, name)
        elif kind is ObjectKind.OURS:
            self._firstloss_object(value)
        elif kind is ObjectKind.UNKNOWN and not self._in_class:
            self.unwatchable[id(value)] = (value, description)
        if kind in (
            ObjectKind.INSTANCE,
            ObjectKind.DICT,
            ObjectKind.LIST,
            ObjectKind.SET,
            ObjectKind.DEQUE,
        ) and is_python_class(type(value)):
            if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):  # see `of_object`
                self.objects.setdefault(id(value), value)
            self.classes.setdefault(type(value), set())
        if isinstance(value, BaseException):
            fields: Any = type(value)
            self._in_c(value, _fields_in_c(fields), description, name)
        if kind is ObjectKind.INSTANCE and not _reads_are_recorded(type(value)):
            table = own_attributes(value)
            if table is not None:
                self.some(table, describe_attribute(value), all_of_them=True)

    def _library_module(self, table: dict) -> None:
        """A module of the standard library, PyTorch or NumPy, in which user code may have set or replaced something."""
        expected = self.table(table, describe_global(table), None).expected
        for name in self._executed.mentioned:
            current = undisguised(table.get(name, MISSING))
            expected.setdefault(name, current)
            if table is vars(sys) and name in SETTINGS_OF_SYS or isinstance(current, types.ModuleType):
                self.value(current, f"{table.get('__name__')}.{name}", name)

    def _cached(self, function: Any, description: str, name: str) -> None:
        """The cached results of a function behind an `lru_cache`. Those that this trace has added could not be copied
        before it, so the step is traced again."""
        results = lru_caches.results(function)
        new = any(kind_of(type(r)) is not ObjectKind.LEAF and not self._snapshot.holds(r) for r in results)
        self.read(id(function), lru_caches.unchanged(function), not new, description, name)
        for result in results:
            self.value(result, description, name)

    def _container(self, value: Any, kind: ObjectKind, description: str, inside: str, name: str) -> None:
        large = mutable_state.unwatched(value) if len(value) > mutable_state.LARGEST else None
        if large is not None and name:
            self.unwatched.append((name, f"{description}, {large}"))
        if kind is ObjectKind.DICT:
            if isinstance(value, defaultdict):
                factory = operator.attrgetter("default_factory")
                key = (id(value), "default_factory")
                self.read(key, functools.partial(factory, value), factory(value), f"the factory of {description}", name)
                self.value(factory(value), description, name)
            before = self.before(value)
            if id(value) not in self._snapshot.opaque:
                guard = self.table(value, lambda key: inside, name)
                guard.whole = True
                guard.expected = dict(before)
                items: Iterable[Any] = [*before, *before.values()]
            else:
                _, read, reading = self._snapshot.opaque[id(value)]
                self.read(id(value), read, reading, inside, name)
                return
        else:
            entry = self._snapshot.sequences.get(id(value))
            items = entry[1] if entry is not None else items_of(value)
            if kind is ObjectKind.LIST and len(items) <= mutable_state.LARGEST:
                self.lists[id(value)] = ListGuard(value, items, inside, name)
            elif kind is not ObjectKind.TUPLE and id(value) in self._snapshot.opaque:
                _, read, reading = self._snapshot.opaque[id(value)]
                self.read(id(value), read, reading, inside, name)
            elif kind is not ObjectKind.TUPLE:
                self.read(id(value), mutable_state.reader(value), _reading_of(value, items), inside, name)
            if len(items) > mutable_state.LARGEST:
                return
        for item in items:
            self.value(item, description, name)

    def _firstloss_object(self, value: Any) -> None:
        """An object of this package: its plain attributes, except those that the step changes."""
        _, before = self._snapshot.firstloss_objects.get(id(value), (value, {}))
        table = vars(value)
        expected = self.table(table, describe_attribute(value), None).expected
        expected.update({k: v for k, v in before.items() if same(v, table.get(k, MISSING))})
        expected.update(dict.fromkeys(self._executed.mentioned - table.keys(), MISSING))

    def _in_c(self, value: Any, names: tuple[str, ...], description: str, name: str) -> None:
        """Attributes that are stored in C rather than in a dict: the objects, and their contents."""
        read = functools.partial(_attributes, value, names)
        self.read((id(value), names), read, read(), f"the content of {description}", name)
        for content in read():
            if content is not MISSING:
                self.value(content, description, name)

    def _opaque(self, value: Any, description: str, inside: str, name: str) -> None:
        large = mutable_state.unwatched(value)
        if large is not None and name:
            self.unwatched.append((name, f"{description}, {large}"))
        entry = self._snapshot.opaque.get(id(value))
        if entry is not None:
            self.read(id(value), entry[1], entry[2], inside, name)
        for part in mutable_state.inside(value):
            self.value(part, description, name)

    def some(self, table: dict, describe: Callable[[Any], str], all_of_them: bool = False) -> None:
        """For an object whose reads are not recorded one by one: the attributes that the code mentions, or all if it
        may read any."""
        before = self.before(table)
        all_of_them = all_of_them or self._executed.any_attribute
        for name in before if all_of_them else self._executed.mentioned & before.keys():
            if name not in _IMPLICIT_MODULE_NAMES:
                self.name(table, name, before[name], describe)
        guard = self.table(table, describe, None)
        guard.whole = guard.whole or all_of_them and set(guard.expected) == set(before)
        for name in self._executed.mentioned - before.keys():
            guard.expected.setdefault(name, MISSING)

    def all_of(self, table: dict, describe: Callable[[Any], str]) -> None:
        """All attributes of an object, and that there are no others."""
        for name, before in self.before(table).items():
            self.name(table, name, before, describe)
        self.table(table, describe, None).whole = True

    def _tensor_attributes(self, tensor: torch.Tensor) -> None:
        snapshot = self._snapshot.tables.get(id(tensor.__dict__))
        if snapshot is not None:
            self.some(snapshot.table, lambda key: f"the attribute {key} of a tensor")

    def read(self, key: Any, read: Any, expected: Any, description: str, name: str) -> None:
        if read is not None and key not in self.reads:
            container_id = key if type(key) is int else key[0] if type(key) is tuple else 0
            self.reads[key] = ReadGuard(read, expected, description, name, container_id)

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
            for schedule in schedules_of(owner):
                self.value(schedule, f"a schedule of {with_article(type(owner).__qualname__)}", "")
            self.optimizers.append((owner, [p for g in self._snapshot.groups[id(owner)] for p in g["params"]]))

    def definition(self, function: types.FunctionType) -> None:
        if id(function) in self.functions:
            return
        name = function.__name__
        entry = self._snapshot.definitions.get(id(function))
        before = definition(function) if entry is None else entry[1]
        description = f"the code of {function.__qualname__} or its default arguments"
        for attribute in _FUNCTION_METADATA & self._executed.mentioned:
            read = functools.partial(operator.attrgetter(attribute), function)
            self.read((id(function), attribute), read, read(), f"{attribute} of {function.__qualname__}", attribute)
            self.value(read(), f"{attribute} of {function.__qualname__}", attribute)
        if "__globals__" in self._executed.mentioned:
            self.some(function.__globals__, describe_global(function.__globals__), all_of_them=True)
        if not _READS_CELLS.isdisjoint(self._executed.mentioned):
            for cell in function.__closure__ or ():
                self.value(cell, f"a variable that {function.__qualname__} uses", "")
        if id(function.__dict__) in self._snapshot.tables:
            self.some(function.__dict__, describe_attribute(function))
        self.functions[id(function)] = FunctionGuard(function, before, description, name)
        positional, defaults = before[0].co_varnames[: before[0].co_argcount], before[1] or ()
        for name, default in (
            *zip(positional[len(positional) - len(defaults) :], defaults, strict=True),
            *(before[2] or ()),
        ):
            self.value(default, f"a default argument of {function.__qualname__}", name)

    # -- classes --

    def of_class(self, cls: type, names: set[str]) -> None:
        if is_ours(module_of_class(cls)) or not is_python_class(cls):
            return
        if not is_closed_class(cls) and not is_installed(module_of_class(cls)):
            bases = operator.attrgetter("__mro__")
            description = f"the base classes of {cls.__qualname__}"
            self.read((id(cls), "__mro__"), functools.partial(bases, cls), cls.__mro__, description, "__bases__")
            for attribute in _CLASS_METADATA & self._executed.mentioned:
                read = functools.partial(operator.attrgetter(attribute), cls)
                self.read((id(cls), attribute), read, read(), f"{attribute} of {cls.__qualname__}", attribute)
        self._in_class += 1
        for base in (*cls.__mro__, *type.mro(type(cls))):
            self._base(base, names)
        self._in_class -= 1

    def _base(self, base: type, names: set[str]) -> None:
        if (base, len(names)) in self._classes_seen:
            return
        self._classes_seen.add((base, len(names)))
        if is_closed_class(base):
            self._closed_base(base, names)
        else:
            table = class_table(base)
            before = self.before(table)
            describe = describe_attribute(base)
            guard = self.table(table, describe, None)
            guard.of_class = True
            installed = is_installed(module_of_class(base))
            attribute = OF_FIELDS if self._executed.may_read_fields else ()
            for name in before:
                if installed and (name in names or _is_operator(name)):
                    guard.expected.setdefault(name, before[name])
                elif name in names or name in self._executed.mentioned or _is_operator(name) or name in attribute:
                    self.name(table, name, before[name], describe)
            missing = names | (_SET_ON_PACKAGE_CLASSES if installed else self._executed.mentioned | _OPERATORS)
            for name in missing - before.keys():
                guard.expected.setdefault(name, MISSING)

    def _closed_base(self, base: type, names: set[str]) -> None:
        """A class of PyTorch or the standard library, in which a method may be replaced."""
        if not is_python_class(base):
            return
        table = class_table(base)
        looked_up = names | {name for name in table if _is_operator(name)} | {"__call__"}
        if not module_of_class(base).startswith("torch"):
            looked_up |= self._executed.mentioned
        methods = {name: table.get(name, MISSING) for name in looked_up}
        guard = self.table(table, describe_attribute(base), None)
        guard.of_class = True
        guard.expected.update(methods)


def _attributes(value: Any, names: tuple[str, ...]) -> tuple:
    return tuple([getattr(value, name, MISSING) for name in names])


def _reads_are_recorded(cls: type) -> bool:
    """Whether all attribute reads of its instances are recorded. For a `SimpleNamespace`, the C part does that for the
    class itself and not for subclasses."""
    return can_be_instrumented(cls) and (cls is types.SimpleNamespace or not issubclass(cls, types.SimpleNamespace))


def _reading_of(container: Any, items: Any) -> Any:
    """The result of `mutable_state.reader` if these were the container's items."""
    if isinstance(container, set):
        return mutable_state.reader(set(items))()  # type: ignore[misc]
    return mutable_state.reader(list(items))()  # type: ignore[misc]


# The names that Python looks up in a class for operators and statements.
_OPERATORS = {
    *(name for kind in (object, type, int, float, list, dict, set, str, bytes, property, memoryview, io.StringIO)
      for name in dir(kind) if name.startswith("__") and callable(getattr(kind, name, None))),
    "__aenter__", "__aexit__", "__aiter__", "__anext__", "__array__", "__array_function__", "__array_ufunc__",
    "__await__", "__bool__", "__class_getitem__", "__complex__", "__copy__", "__deepcopy__", "__del__", "__delete__",
    "__float__",
    "__fspath__", "__getattr__", "__imatmul__", "__index__", "__instancecheck__", "__int__", "__length_hint__",
    "__match_args__", "__matmul__", "__missing__", "__mro_entries__", "__rmatmul__", "__set__", "__set_name__",
    "__subclasscheck__", "__torch_dispatch__", "__torch_function__",
} - {"__class__"}  # fmt: skip
# Those that may be set on classes of installed packages.
_SET_ON_PACKAGE_CLASSES = {"__call__", "__getattr__", "__getattribute__"}


def _is_operator(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("__") and name.endswith("__") and name not in _NOT_OPERATORS


@functools.cache
def _fields_in_c(cls: Any) -> tuple[str, ...]:
    """The names of the fields of exceptions of a class that are stored in C."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    bases = [base for base in cls.__mro__ if not is_python_class(base)]
    names = {name: None for base in bases for name, member in vars(base).items() if isinstance(member, kinds)}
    return tuple(name for name in names if name not in ("__dict__", "__traceback__"))


# Names that Python itself looks up in every module.
_IMPLICIT_MODULE_NAMES = {"__builtins__", "__loader__", "__spec__", "__dict__", "__weakref__"}
_READS_CELLS = {"__closure__", "cell_contents", "getclosurevars"}
_CLASS_METADATA = {"__name__", "__qualname__"}
_FUNCTION_METADATA = {
    "__doc__",
    "__name__",
    "__qualname__",
    "__annotations__",
}  # of functions, besides code and defaults
_NOT_OPERATORS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
                 "__slots__", "__qualname__", "__dataclass_fields__", "__orig_bases__",
                 "__parameters__", "__firstlineno__", "__static_attributes__"}  # fmt: skip
