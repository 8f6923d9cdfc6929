"""A snapshot of everything that a step's Python can reach, before the step runs.

Found without running or tracing anything: from the step to its arguments, globals and closure variables, to the
functions, classes and objects that these are, and to all that is in those. Modules of PyTorch, JAX, NumPy and of
Python's own library are not entered; of installed packages' modules what the code mentions is.
"""

from __future__ import annotations

import array
import collections
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ...capture.constants import owned_by_torch
from ...compat.python_names import is_python_class, lru_cache_wrapper
from ...compat.torch_names import (
    PARAMETER_FLAG,
    DisableTorchDispatch,
    backward_hooks,
    post_accumulate_grad_hooks,
)
from ...optim.schedule import schedules_of
from . import lru_caches, mutable_state
from .bytecode import attributes_set, imports, with_inner
from .equality import same
from .introspection import (
    MISSING,
    cell_content,
    class_table,
    definition,
    names_in,
    own_attributes,
    slot_value,
)
from .object_kinds import (
    ModuleProxy,
    ObjectKind,
    is_closed,
    is_closed_class,
    is_installed,
    is_ours,
    items_of,
    kind_of,
    module_of,
    module_of_class,
    own_module,
    referents,
    slots,
    table_of,
)

# What holds more items than this is data: it is copied, but what is in it is not looked into.
_MOST_ITEMS = mutable_state.LARGEST
# So many objects are no step's own: what is beyond is not known, and the step is traced each time.
_MOST_OBJECTS = 2_000_000


class DictSnapshot(NamedTuple):
    """A dict of attributes, variables or items, and its former content."""

    table: dict
    before: dict
    owner: Any  # whose attributes these are; the module's name for globals; None for a dict's own items
    kind: str  # "attributes", "globals", "items"


class SlotsSnapshot(NamedTuple):
    """An object with `__slots__`, and their former values."""

    owner: Any
    names: tuple[str, ...]
    before: tuple


class Snapshot:
    """Everything reachable from `roots`, as it was when this was created.

    Attributes:
        tables: by the dict's id, dicts of attributes, globals and items.
        sequences: by id, lists, sets and deques, each with its items.
        cells: by id, variables of enclosing functions.
        slotted: by id, objects with `__slots__`.
        opaque: by id, objects whose content only `mutable_state.py` can read: with a reader and what it gave.
        functions: by their code, the functions that may run; `definitions` is what each was made of.
        modules: the `nn.Module`s.
        optimizers: the optimizers.
        classes: the classes, made by Python, of the objects that were reached.
        tensors: by id.
        types: objects whose class may become another one.
        cached: functions behind a cache of `functools`, which may not run though the step calls them.
        unknown: by id, objects of which nobody can say whether they have changed.
        groups: by the optimizer's id, what was in its parameter groups.
        states: likewise its state, by weight.
        seed: of PyTorch's generator.
        environment: what was in `os.environ`.
        filters: of warnings.
        ours: by id, objects of this package's classes, with their attributes that are plain values.
        module_names: what the code sets in modules that are not entered, by the id of their dict and the name: the
            module, the name and what was there.
        hooks: where PyTorch keeps the hooks of all modules and of all optimizers: a module's globals, a name, a dict.
    """

    def __init__(self, roots: Iterable[Any], functions: Iterable[types.FunctionType] = ()) -> None:
        self.tables: dict[int, DictSnapshot] = {}
        self.sequences: dict[int, tuple[Any, list]] = {}
        self.cells: dict[int, tuple[types.CellType, Any]] = {}
        self.slotted: dict[int, SlotsSnapshot] = {}
        self.opaque: dict[int, tuple[Any, Callable[[], Any], Any]] = {}
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self.definitions: dict[int, tuple[types.FunctionType, tuple]] = {}
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.classes: set[type] = set()
        self.tensors: dict[int, torch.Tensor] = {}
        self.unknown: dict[int, Any] = {}
        self.types: list[tuple[Any, type]] = []
        self.groups: dict[int, list[dict[str, Any]]] = {}
        self.states: dict[int, dict[Any, Any]] = {}
        self.seed = torch.initial_seed()
        self.ours: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.cached: list[types.FunctionType] = []
        self.module_names: dict[tuple[int, str], tuple[types.ModuleType, str, Any]] = {}
        self.seen: dict[int, Any] = {}
        self.environment = mutable_state.environment()
        self.filters = mutable_state.filters()
        self._mentioned: set[tuple[int, str]] = set()
        self._beyond: set[int] = set()  # the ids of what large containers hold
        self.roots = list(roots)
        self.hooks = list(_hook_tables())
        self._walk([*self.roots, *functions, *(table for _, _, table in self.hooks)])

    def add_root(self, root: Any) -> None:
        """Walk what is reachable from one more root."""
        self._walk([root])

    def weights(self) -> list[torch.Tensor]:
        """The tensors that gradients are or were computed for: a frozen weight may still have one."""
        with DisableTorchDispatch():
            tensors = [t for t in self.tensors.values() if t.is_leaf or t.retains_grad]
            return [t for t in tensors if t.is_leaf and t.requires_grad or t.grad is not None]

    def holds(self, what: Any) -> bool:
        """Whether an object existed before the step."""
        return id(what) in self.seen or id(what) in self._beyond

    def shares_memory(self, tensor: torch.Tensor, edited: bool = False) -> bool:
        """Whether a real tensor is in the memory of an array that existed before the step; with `edited`, of one whose
        content has changed."""
        arrays = [entry for entry in self.opaque.values() if isinstance(entry[0], (np.ndarray, bytearray, array.array))]
        held = [content for content, read, before in arrays if not edited or not same(before, read())]
        if not held or tensor.layout != torch.strided or owned_by_torch(tensor):
            return False
        with DisableTorchDispatch(), torch.no_grad():
            own = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()  # whatever its dtype
        return any(np.may_share_memory(own, np.asarray(memoryview(content))) for content in held if len(content))

    # -- the walk --

    def _walk(self, todo: list[Any]) -> None:
        while todo and len(self.seen) < _MOST_OBJECTS:
            self._visit(todo.pop(), todo)

    def _visit(self, what: Any, todo: list[Any]) -> None:
        kind = kind_of(type(what))
        if kind is ObjectKind.LEAF:
            return
        if id(what) in self.seen:
            return
        self.seen[id(what)] = what
        if kind is ObjectKind.TENSOR:
            self.tensors[id(what)] = what
            self._tensor(what, todo)
            return
        if kind in (ObjectKind.DICT, ObjectKind.LIST, ObjectKind.SET, ObjectKind.DEQUE) and len(what) > _MOST_ITEMS:
            read = mutable_state.reader(what)
            assert read is not None
            self.opaque[id(what)] = (what, read, read())
        if kind is ObjectKind.DICT:
            self._table(what, None, "items", todo)
            if isinstance(what, collections.defaultdict):
                todo.append(what.default_factory)
        elif kind in (ObjectKind.LIST, ObjectKind.SET, ObjectKind.DEQUE, ObjectKind.TUPLE):
            items = items_of(what)
            if kind is not ObjectKind.TUPLE:
                self.sequences[id(what)] = (what, items)
            if len(items) <= _MOST_ITEMS:
                todo += items
            else:
                self._beyond.update(map(id, items))
        elif kind is ObjectKind.FUNCTION:
            self._function(what, todo)
            return
        elif kind is ObjectKind.CELL:
            content = cell_content(what)
            self.cells[id(what)] = (what, content)
            if content is not MISSING:
                todo.append(content)
            return
        elif kind is ObjectKind.BINDING:
            todo.extend(referents(what))
            if isinstance(what, lru_cache_wrapper) and isinstance(what.__wrapped__, types.FunctionType):
                self.cached.append(what.__wrapped__)
                if not is_installed(what.__wrapped__.__module__):
                    todo += lru_caches.results(what)
            if isinstance(what, types.MappingProxyType):
                self.opaque[id(what)] = (what, read := _proxy_reader(what), read())
        elif kind is ObjectKind.CLASS:
            self._class(what, todo)
            return
        elif kind is ObjectKind.MODULE:
            self._module(what, todo)
            return
        elif kind is ObjectKind.OPAQUE:
            read = mutable_state.reader(what)
            if read is not None:
                self.opaque[id(what)] = (what, read, read())
            todo.extend(mutable_state.inside(what))
        elif kind is ObjectKind.UNKNOWN:
            self.unknown[id(what)] = what
            return
        elif kind is ObjectKind.OURS:
            plain = {k: v for k, v in vars(what).items() if kind_of(type(v)) is ObjectKind.LEAF}
            self.ours[id(what)] = (what, plain)
            return
        self._instance(what, todo)

    def _instance(self, what: Any, todo: list[Any]) -> None:
        """The attributes of an object."""
        cls = type(what)
        if issubclass(cls, ModuleProxy):
            todo.append(module_of(what))
            return
        table = own_attributes(what)
        if isinstance(what, torch.optim.Optimizer):  # its state and its groups are `optimizers.py`'s
            self.optimizers.append(what)
            self.groups[id(what)] = [{**group, "params": list(group["params"])} for group in what.param_groups]
            state = what.state.items()
            self.states[id(what)] = {p: dict(held) if isinstance(held, dict) else held for p, held in state}
            assert table is not None
            before = table_of(table)
            self.tables[id(table)] = DictSnapshot(table, before, what, "attributes")
            self.seen[id(table)] = table
            todo += [v for k, v in before.items() if not is_guarded_elsewhere(k)]
            todo += [p for group in what.param_groups for p in group["params"]]
            todo += schedules_of(what)
        elif table is not None:
            self._table(table, what, "attributes", todo)
        names = slots(cls)
        if names:
            values = tuple(slot_value(what, name) for name in names)
            self.slotted[id(what)] = SlotsSnapshot(what, names, values)
            todo += [value for value in values if value is not MISSING]
        if is_python_class(cls):
            self.types.append((what, cls))
            if cls not in self.classes:
                self.classes.add(cls)
                todo += [base for base in cls.__mro__ if not is_closed_class(base)]
            if isinstance(what, torch.nn.Module):
                self.modules.append(what)

    def _table(self, table: dict, owner: Any, kind: str, todo: list[Any]) -> None:
        before = table_of(table) if table else {}
        self.tables[id(table)] = DictSnapshot(table, before, owner, kind)
        if kind == "attributes":
            self.seen[id(table)] = table
        if kind == "attributes":
            todo += before.values()
        elif len(before) <= _MOST_ITEMS:
            todo += before
            todo += before.values()
        else:
            self._beyond.update(map(id, before), map(id, before.values()))

    def _tensor(self, what: torch.Tensor, todo: list[Any]) -> None:
        if (what.is_leaf or what.retains_grad) and what.grad is not None:
            todo.append(what.grad)
        for hooks in (backward_hooks(what), post_accumulate_grad_hooks(what)) if what.requires_grad else ():
            todo += (hooks or {}).values()
        table = what.__dict__
        if table and not table.keys() <= _OUR_ATTRIBUTES:
            self._table(table, what, "attributes", todo)

    def _function(self, what: types.FunctionType, todo: list[Any]) -> None:
        code = what.__code__
        own = own_module(what)
        if is_ours(own) or own is not None and is_closed(own):
            if what.__closure__ and not is_ours(own):  # a decorator of a library around a user's function
                todo += [content for cell in what.__closure__ if callable(content := cell_content(cell))]
            return
        if what.__dict__ or not is_installed(own):
            self._table(what.__dict__, what, "attributes", todo)
        self.functions.setdefault(code, []).append(what)
        self.definitions[id(what)] = (what, definition(what))
        self._globals(what.__globals__, set(names_in(code)), is_installed(own), todo)
        if not is_installed(own):  # what a package imports, the user seldom changes
            self._set_in_modules(what)
            imported = {name for inner in with_inner(code) for name in imports(inner, what.__globals__)}
            todo += [module for name in imported if type(module := sys.modules.get(name)) is types.ModuleType]
        todo.extend(what.__closure__ or ())
        todo.extend(what.__defaults__ or ())
        todo.extend((what.__kwdefaults__ or {}).values())

    def _set_in_modules(self, function: types.FunctionType) -> None:
        """`torch.nn.functional.gelu = ...`."""
        for first, *path, name in {path for code in with_inner(function.__code__) for path in attributes_set(code)}:
            module = function.__globals__.get(first)
            for part in path:
                module = vars(module).get(part) if isinstance(module, types.ModuleType) else None
            if isinstance(module, types.ModuleType) and is_closed(module.__name__):
                self.module_names.setdefault((id(vars(module)), name), (module, name, vars(module).get(name, MISSING)))

    def _globals(self, table: dict, names: set[str], installed: bool, todo: list[Any]) -> None:
        if id(table) not in self.tables:
            self.tables[id(table)] = DictSnapshot(table, table.copy(), table.get("__name__", "?"), "globals")
        for name in names & table.keys():
            place = (id(table), name)
            if place not in self._mentioned:
                self._mentioned.add(place)
                # What installed packages define leads to all of them; what they hold may be changed from outside.
                if not installed or kind_of(type(table[name])) is ObjectKind.INSTANCE:
                    todo.append(table[name])

    def _class(self, what: type, todo: list[Any]) -> None:
        if is_closed_class(what):
            return
        table = class_table(what)
        self.tables[id(table)] = DictSnapshot(table, table.copy(), what, "attributes")
        skipped = _NOT_THE_USERS if is_installed(module_of_class(what)) else _NOT_THE_USERS - OF_FIELDS
        todo += [value for name, value in table.items() if name not in skipped]
        todo += [base for base in (type(what), *what.__mro__[1:]) if not is_closed_class(base)]

    def _module(self, what: types.ModuleType, todo: list[Any]) -> None:
        if what is sys:
            todo += [getattr(sys, name) for name in SETTINGS_OF_SYS]
        if is_closed(what.__name__) or is_installed(what.__name__):
            return
        table = vars(what)
        self.tables[id(table)] = DictSnapshot(table, table.copy(), what.__name__, "globals")
        todo += [v for v in table.values() if kind_of(type(v)) is not ObjectKind.MODULE]


def _hook_tables() -> Iterator[tuple[dict, str, dict]]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    for where in (vars(module), vars(optimizer)):
        for name, table in where.items():
            if name.startswith("_global_") and isinstance(table, dict):
                yield where, name, table


SETTINGS_OF_SYS = ("argv", "path")  # lists that are there for anybody to change
_OUR_ATTRIBUTES = {"_storage", PARAMETER_FLAG}
OF_FIELDS = {"__annotations__", "__dataclass_fields__"}
_NOT_THE_USERS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
                  "_abc_impl", "__dataclass_fields__"}  # fmt: skip


def is_guarded_elsewhere(name: str) -> bool:
    """Whether an attribute of optimizers is guarded by `optimizers.py`, or serves checkpoints."""
    return name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_") and "state_dict" in name


def _proxy_reader(proxy: types.MappingProxyType) -> Callable[[], tuple]:
    """A function that returns the content of a read-only view of a dict, or of a class's attributes."""
    return lambda: (*proxy.keys(), *proxy.values())
