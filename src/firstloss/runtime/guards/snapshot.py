"""A snapshot of everything that the Python code of a step can reach, before the step runs.

Built without running or tracing anything, by walking from the step to its arguments, globals and closure variables, to
their functions, classes and objects, and to the contents of those. Modules of PyTorch, JAX, NumPy and the standard
library are not entered; of other installed packages, only what the code mentions is.
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
from .object_kinds import (
    MISSING,
    ModuleProxy,
    ObjectKind,
    cell_content,
    class_table,
    definition,
    is_closed,
    is_closed_class,
    is_installed,
    is_ours,
    items_of,
    kind_of,
    module_of,
    module_of_class,
    names_in,
    own_attributes,
    own_module,
    referents,
    slot_value,
    slots,
    table_of,
)

# Containers with more items are treated as data: copied, but their items are not walked.
_MAX_ITEMS = mutable_state.LARGEST
# The walk stops here. What is beyond is not known, and the step is traced at each call.
_MAX_OBJECTS = 2_000_000


class DictSnapshot(NamedTuple):
    """A dict of attributes, globals or items, and its former content."""

    table: dict
    before: dict
    owner: Any  # the object with these attributes; the module's name for globals; None for a dict's own items
    kind: str  # "attributes", "globals", "items"


class SlotsSnapshot(NamedTuple):
    """An object with `__slots__`, and their former values."""

    owner: Any
    names: tuple[str, ...]
    before: tuple


class Snapshot:
    """Everything reachable from `roots`, as of the creation of the snapshot.

    Attributes:
        tables: by id, dicts of attributes, globals and items.
        sequences: by id, lists, sets and deques, each with its items.
        cells: by id, variables of enclosing functions.
        slotted: by id, objects with `__slots__`.
        opaque: by id, objects whose content only `mutable_state.py` can read, each with a reader and its result.
        functions: by code object, the functions that may run; `definitions` has the `definition` of each.
        modules: the `nn.Module`s.
        optimizers: the optimizers.
        classes: the Python classes of the objects.
        tensors: by id.
        types: objects whose class may be replaced, each with its class.
        cached: functions behind an `lru_cache`, which may not run though the step calls them.
        unknown: by id, objects whose changes cannot be detected.
        groups: by the optimizer's id, its parameter groups.
        states: by the optimizer's id, its state by weight.
        seed: the initial seed of PyTorch's default generator.
        environment: the variables in `os.environ`.
        filters: the warning filters.
        ours: by id, objects of this package's classes, with their attributes that are plain values.
        module_names: what the code sets in modules that are not entered: by the id of the module's dict and the name,
            the module, the name and the former value.
        hooks: global hooks of modules and optimizers: the globals of PyTorch's module, the name in them, and the dict.
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
        self.firstloss_objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.cached: list[types.FunctionType] = []
        self.module_names: dict[tuple[int, str], tuple[types.ModuleType, str, Any]] = {}
        self.seen: dict[int, Any] = {}
        self.environment = mutable_state.environment()
        self.filters = mutable_state.filters()
        self._mentioned: set[tuple[int, str]] = set()
        self._beyond: set[int] = set()  # the ids of the items of large containers
        self.roots = list(roots)
        self.hooks = list(_hook_tables())
        self._walk([*self.roots, *functions, *(table for _, _, table in self.hooks)])

    def add_root(self, root: Any) -> None:
        """Also walk what is reachable from one more root."""
        self._walk([root])

    def weights(self) -> list[torch.Tensor]:
        """The tensors that gradients are or were computed for: a frozen weight may still have one."""
        with DisableTorchDispatch():
            tensors = [t for t in self.tensors.values() if t.is_leaf or t.retains_grad]
            return [t for t in tensors if t.is_leaf and t.requires_grad or t.grad is not None]

    def holds(self, obj: Any) -> bool:
        """Whether an object existed before the step."""
        return id(obj) in self.seen or id(obj) in self._beyond

    def shares_memory(self, tensor: torch.Tensor, edited: bool = False) -> bool:
        """Whether a real tensor shares memory with an array that existed before the step; with `edited`, with one whose
        contents have changed."""
        arrays = [entry for entry in self.opaque.values() if isinstance(entry[0], (np.ndarray, bytearray, array.array))]
        held = [content for content, read, before in arrays if not edited or not same(before, read())]
        if not held or tensor.layout != torch.strided or owned_by_torch(tensor):
            return False
        with DisableTorchDispatch(), torch.no_grad():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()  # for any dtype
        return any(np.may_share_memory(memory, np.asarray(memoryview(content))) for content in held if len(content))

    # -- the walk --

    def _walk(self, stack: list[Any]) -> None:
        while stack and len(self.seen) < _MAX_OBJECTS:
            self._visit(stack.pop(), stack)

    def _visit(self, obj: Any, stack: list[Any]) -> None:
        kind = kind_of(type(obj))
        if kind is ObjectKind.LEAF:
            return
        if id(obj) in self.seen:
            return
        self.seen[id(obj)] = obj
        if kind is ObjectKind.TENSOR:
            self.tensors[id(obj)] = obj
            self._tensor(obj, stack)
            return
        if kind in (ObjectKind.DICT, ObjectKind.LIST, ObjectKind.SET, ObjectKind.DEQUE) and len(obj) > _MAX_ITEMS:
            read = mutable_state.reader(obj)
            assert read is not None
            self.opaque[id(obj)] = (obj, read, read())
        if kind is ObjectKind.DICT:
            self._table(obj, None, "items", stack)
            if isinstance(obj, collections.defaultdict):
                stack.append(obj.default_factory)
        elif kind in (ObjectKind.LIST, ObjectKind.SET, ObjectKind.DEQUE, ObjectKind.TUPLE):
            items = items_of(obj)
            if kind is not ObjectKind.TUPLE:
                self.sequences[id(obj)] = (obj, items)
            if len(items) <= _MAX_ITEMS:
                stack += items
            else:
                self._beyond.update(map(id, items))
        elif kind is ObjectKind.FUNCTION:
            self._function(obj, stack)
            return
        elif kind is ObjectKind.CELL:
            content = cell_content(obj)
            self.cells[id(obj)] = (obj, content)
            if content is not MISSING:
                stack.append(content)
            return
        elif kind is ObjectKind.BINDING:
            stack.extend(referents(obj))
            if isinstance(obj, lru_cache_wrapper) and isinstance(obj.__wrapped__, types.FunctionType):
                self.cached.append(obj.__wrapped__)
                if not is_installed(obj.__wrapped__.__module__):
                    stack += lru_caches.results(obj)
            if isinstance(obj, types.MappingProxyType):
                self.opaque[id(obj)] = (obj, read := _proxy_reader(obj), read())
        elif kind is ObjectKind.CLASS:
            self._class(obj, stack)
            return
        elif kind is ObjectKind.MODULE:
            self._module(obj, stack)
            return
        elif kind is ObjectKind.OPAQUE:
            read = mutable_state.reader(obj)
            if read is not None:
                self.opaque[id(obj)] = (obj, read, read())
            stack.extend(mutable_state.inside(obj))
        elif kind is ObjectKind.UNKNOWN:
            self.unknown[id(obj)] = obj
            return
        elif kind is ObjectKind.OURS:
            plain = {k: v for k, v in vars(obj).items() if kind_of(type(v)) is ObjectKind.LEAF}
            self.firstloss_objects[id(obj)] = (obj, plain)
            return
        self._instance(obj, stack)

    def _instance(self, obj: Any, stack: list[Any]) -> None:
        """The attributes of an object."""
        cls = type(obj)
        if issubclass(cls, ModuleProxy):
            stack.append(module_of(obj))
            return
        table = own_attributes(obj)
        if isinstance(obj, torch.optim.Optimizer):  # `optimizers.py` handles its state and groups
            self.optimizers.append(obj)
            self.groups[id(obj)] = [{**group, "params": list(group["params"])} for group in obj.param_groups]
            state = obj.state.items()
            self.states[id(obj)] = {p: dict(held) if isinstance(held, dict) else held for p, held in state}
            assert table is not None
            before = table_of(table)
            self.tables[id(table)] = DictSnapshot(table, before, obj, "attributes")
            self.seen[id(table)] = table
            stack += [v for k, v in before.items() if not is_guarded_elsewhere(k)]
            stack += [p for group in obj.param_groups for p in group["params"]]
            stack += schedules_of(obj)
            for entries in self.states[id(obj)].values():
                if isinstance(entries, dict):
                    stack += [entry for entry in entries.values() if not isinstance(entry, torch.Tensor)]
        elif table is not None:
            self._table(table, obj, "attributes", stack)
        names = slots(cls)
        if names:
            values = tuple(slot_value(obj, name) for name in names)
            self.slotted[id(obj)] = SlotsSnapshot(obj, names, values)
            stack += [value for value in values if value is not MISSING]
        if is_python_class(cls):
            self.types.append((obj, cls))
            if cls not in self.classes:
                self.classes.add(cls)
                stack += [base for base in cls.__mro__ if not is_closed_class(base)]
            if isinstance(obj, torch.nn.Module):
                self.modules.append(obj)

    def _table(self, table: dict, owner: Any, kind: str, stack: list[Any]) -> None:
        before = table_of(table) if table else {}
        self.tables[id(table)] = DictSnapshot(table, before, owner, kind)
        if kind == "attributes":
            self.seen[id(table)] = table
        if kind == "attributes":
            stack += before.values()
        elif len(before) <= _MAX_ITEMS:
            stack += before
            stack += before.values()
        else:
            self._beyond.update(map(id, before), map(id, before.values()))

    def _tensor(self, obj: torch.Tensor, stack: list[Any]) -> None:
        if (obj.is_leaf or obj.retains_grad) and obj.grad is not None:
            stack.append(obj.grad)
        for hooks in (backward_hooks(obj), post_accumulate_grad_hooks(obj)) if obj.requires_grad else ():
            stack += (hooks or {}).values()
        table = obj.__dict__
        if table and not table.keys() <= _OUR_ATTRIBUTES:
            self._table(table, obj, "attributes", stack)

    def _function(self, obj: types.FunctionType, stack: list[Any]) -> None:
        code = obj.__code__
        module_name = own_module(obj)
        if is_ours(module_name) or module_name is not None and is_closed(module_name):
            if obj.__closure__ and not is_ours(module_name):  # a library's decorator around a user's function
                stack += [content for cell in obj.__closure__ if callable(content := cell_content(cell))]
            return
        if obj.__dict__ or not is_installed(module_name):
            self._table(obj.__dict__, obj, "attributes", stack)
        self.functions.setdefault(code, []).append(obj)
        self.definitions[id(obj)] = (obj, definition(obj))
        self._globals(obj.__globals__, set(names_in(code)), is_installed(module_name), stack)
        if not is_installed(module_name):  # users seldom change what a package imports
            self._set_in_modules(obj)
            imported = {name for inner in with_inner(code) for name in imports(inner, obj.__globals__)}
            stack += [module for name in imported if type(module := sys.modules.get(name)) is types.ModuleType]
        stack.extend(obj.__closure__ or ())
        stack.extend(obj.__defaults__ or ())
        stack.extend((obj.__kwdefaults__ or {}).values())

    def _set_in_modules(self, function: types.FunctionType) -> None:
        """Record what a function sets in modules, as in `torch.nn.functional.gelu = ...`."""
        for first, *path, name in {path for code in with_inner(function.__code__) for path in attributes_set(code)}:
            module = function.__globals__.get(first)
            for part in path:
                module = vars(module).get(part) if isinstance(module, types.ModuleType) else None
            if isinstance(module, types.ModuleType) and is_closed(module.__name__):
                self.module_names.setdefault((id(vars(module)), name), (module, name, vars(module).get(name, MISSING)))

    def _globals(self, table: dict, names: set[str], installed: bool, stack: list[Any]) -> None:
        if id(table) not in self.tables:
            self.tables[id(table)] = DictSnapshot(table, table.copy(), table.get("__name__", "?"), "globals")
        for name in names & table.keys():
            binding = (id(table), name)
            if binding not in self._mentioned:
                self._mentioned.add(binding)
                # Definitions of installed packages would lead to all of the package; their instances may be mutated.
                if not installed or kind_of(type(table[name])) is ObjectKind.INSTANCE:
                    stack.append(table[name])

    def _class(self, obj: type, stack: list[Any]) -> None:
        if is_closed_class(obj):
            return
        table = class_table(obj)
        self.tables[id(table)] = DictSnapshot(table, table.copy(), obj, "attributes")
        skipped = _IMPLICIT_ATTRIBUTES if is_installed(module_of_class(obj)) else _IMPLICIT_ATTRIBUTES - OF_FIELDS
        stack += [value for name, value in table.items() if name not in skipped]
        stack += [base for base in (type(obj), *obj.__mro__[1:]) if not is_closed_class(base)]

    def _module(self, obj: types.ModuleType, stack: list[Any]) -> None:
        if obj is sys:
            stack += [getattr(sys, name) for name in SETTINGS_OF_SYS]
        if is_closed(obj.__name__) or is_installed(obj.__name__):
            return
        table = vars(obj)
        self.tables[id(table)] = DictSnapshot(table, table.copy(), obj.__name__, "globals")
        stack += [v for v in table.values() if kind_of(type(v)) is not ObjectKind.MODULE]


def _hook_tables() -> Iterator[tuple[dict, str, dict]]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    for namespace in (vars(module), vars(optimizer)):
        for name, table in namespace.items():
            if name.startswith("_global_") and isinstance(table, dict):
                yield namespace, name, table


SETTINGS_OF_SYS = ("argv", "path")  # lists that any code may change
_OUR_ATTRIBUTES = {"_storage", PARAMETER_FLAG}
OF_FIELDS = {"__annotations__", "__dataclass_fields__"}
_IMPLICIT_ATTRIBUTES = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
                  "_abc_impl", "__dataclass_fields__"}  # fmt: skip


def is_guarded_elsewhere(name: str) -> bool:
    """Whether an attribute of optimizers is guarded by `optimizers.py`, or only used for checkpoints."""
    return name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_") and "state_dict" in name


def _proxy_reader(proxy: types.MappingProxyType) -> Callable[[], tuple]:
    """A function that returns the content of a read-only view of a dict, or of a class's attributes."""
    return lambda: (*proxy.keys(), *proxy.values())
