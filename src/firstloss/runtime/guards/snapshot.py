"""A snapshot of everything that the Python code of a step can reach, before the step runs.

Built without running or tracing anything, by walking from the step to its arguments, globals and closure variables, to
their functions, classes and objects, and to the contents of those. Modules of PyTorch, JAX, NumPy and the standard
library are not entered; of other installed packages, only what the code mentions is.
"""

from __future__ import annotations

import array
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ...capture.constants import owned_by_torch
from ...compat.torch_names import DisableTorchDispatch
from .access import definition, items_of, table_of
from .bytecode import attributes_set, with_inner
from .effects import Effects
from .guards import with_article
from .kind import State, kind_of
from .packages import is_closed, is_installed, own_module
from .process_state import Environment, Filters
from .reconstruct import NothingAgain, Reconstructor
from .states import Content, Definition, NameInModule, Sequence, Slots, Table

# Containers with more items are treated as data: copied, but their items are not walked.
LARGEST = 1024
# The walk stops here. What is beyond is not known, and the step is traced at each call.
_MAX_OBJECTS = 2_000_000


class Snapshot:
    """Everything reachable from `roots`, as of the creation of the snapshot.

    Attributes:
        states: the objects' states by their class, and by the object's id.
        functions: by code object, the functions that may run.
        modules: the `nn.Module`s.
        optimizers: the optimizers.
        classes: the Python classes of the objects.
        tensors: by id.
        cached: functions behind an `lru_cache`, which may not run though the step calls them.
        groups: by the optimizer's id, its parameter groups.
        state_sizes: by id, how much was in the optimizers' state.
        firstloss_objects: by id, the plain attributes of objects of this package.
        seed: the initial seed of PyTorch's default generator.
        environment, filters: the state of the variables in `os.environ`, and of the warning filters.
        seen: the objects, by id.
        hooks: global hooks of modules and optimizers: the globals of PyTorch's module, the name in them, and the dict.
    """

    def __init__(self, roots: Iterable[Any], functions: Iterable[types.FunctionType] = ()) -> None:
        self.states: dict[type[State], dict[Any, State]] = defaultdict(dict)
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.classes: set[type] = set()
        self.tensors: dict[int, torch.Tensor] = {}
        self.groups: dict[int, list[dict[str, Any]]] = {}
        self.state_sizes: dict[int, int] = {}
        self.firstloss_objects: dict[int, dict[str, Any]] = {}
        self.seed: int = torch.initial_seed()
        self.cached: list[types.FunctionType] = []
        self.seen: dict[int, Any] = {}
        self.environment: Environment = Environment()
        self.filters: Filters = Filters()
        self.keep(self.environment)
        self.keep(self.filters)
        self._mentioned: set[tuple[int, str]] = set()
        self._beyond: set[int] = set()  # the ids of the items of large containers
        self.roots: list[Any] = list(roots)
        self.hooks: list[tuple[dict[Any, Any], str, dict[Any, Any]]] = list(_hook_tables())
        self._walk([*self.roots, *functions, *(table for _, _, table in self.hooks)])

    def add_root(self, root: Any) -> None:
        """Also walk what is reachable from one more root."""
        self._walk([root])

    def functions_of_users(self) -> int:
        """The number of functions that may run and do not belong to installed packages."""
        return sum(not is_installed(own_module(f)) for functions in self.functions.values() for f in functions)

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
        contents: Iterable[Any] = self.states[Content].values()
        arrays = [state for state in contents if isinstance(state.held, (np.ndarray, bytearray, array.array))]
        held = [state.held for state in arrays if not edited or not state.is_unchanged()]
        if not held or tensor.layout != torch.strided or owned_by_torch(tensor):
            return False
        with DisableTorchDispatch(), torch.no_grad():
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()  # for any dtype
        return any(np.may_share_memory(memory, np.asarray(memoryview(content))) for content in held if len(content))

    # -- the states --

    def state(self, kind: type[State], held: Any) -> Any:
        """The state of one kind that was kept of an object, or None."""
        return self.states[kind].get(id(held))

    def table(self, table: dict[Any, Any]) -> Table | None:
        """The state of a dict, or None."""
        state: Table | None = self.states[Table].get(id(table))  # type: ignore[assignment]
        return state

    def tables(self, kind: str) -> list[Table]:
        """The states of dicts of a kind."""
        return [state for state in self.states[Table].values() if isinstance(state, Table) and state.kind == kind]

    def items_before(self, container: Any) -> list[Any]:
        """The former items of a list, set, deque or tuple."""
        state = self.state(Sequence, container)
        return items_of(container) if state is None else state.before

    def parameters_before(self, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        """The former parameters of an optimizer."""
        groups = [self.states[Table][id(group)].before for group in self.groups[id(optimizer)]]
        return tuple([p for group in groups for p in self.items_before(group["params"])])

    def definition_before(self, function: types.FunctionType) -> tuple[Any, ...]:
        """The former `definition` of a function."""
        state = self.state(Definition, function)
        return definition(function) if state is None else state.before

    def slots_before(self, owner: Any) -> dict[str, Any]:
        """The former values of an object's slots by name."""
        state = self.state(Slots, owner)
        return {} if state is None else state.before

    def names_in_modules(self) -> list[NameInModule]:
        """The names that the step may set in modules that are not entered."""
        return [state for state in self.states[NameInModule].values() if isinstance(state, NameInModule)]

    def content(self, held: Any) -> Content | None:
        """The content of an object that only its kind can read, or None."""
        state: Content | None = self.states[Content].get(id(held))  # type: ignore[assignment]
        return state

    def compare(self, reads: Any, reconstructor: Reconstructor) -> Effects:
        """Compare all states with the present ones; see `Effects`."""
        effects = Effects(reads, reconstructor)
        for kind in sorted(self.states, key=operator.attrgetter("order")):
            for state in list(self.states[kind].values()):
                state.compare(effects)
        effects.reads = None  # which refers to all of the snapshot
        return effects

    def undo(self) -> None:
        """Undo all changes, but for those of contents."""
        self.compare(None, NothingAgain()).undo()

    def restore_contents(self) -> bool:
        """Restore arrays, buffers and the like. Returns whether nothing else has changed that cannot be restored, such
        as the position of an iterator."""
        restored = [state.restore() for state in self.states[Content].values() if isinstance(state, Content)]
        return all(restored)

    def consumed(self) -> str | None:
        """What has changed and cannot be restored, such as the position of an iterator, in words; None if nothing."""
        for state in self.states[Content].values():
            if isinstance(state, Content) and not state.is_unchanged() and not state.can_be_restored():
                return with_article(type(state.held).__qualname__)
        return None

    # -- the walk --

    def _walk(self, stack: list[Any]) -> None:
        while stack and len(self.seen) < _MAX_OBJECTS:
            obj = stack.pop()
            kind = kind_of(type(obj))
            if not kind.is_leaf and id(obj) not in self.seen:
                self.seen[id(obj)] = obj
                kind.visit(obj, self, stack)

    # -- for kinds --

    def keep(self, state: State) -> None:
        """Keep the state of an object."""
        self.states[state.group][id(state.held)] = state

    def keep_groups(self, optimizer: torch.optim.Optimizer, behind: Callable[[Any], Any] = lambda value: value) -> None:
        """Keep what is in the parameter groups of an optimizer; `behind` returns what another value stands for."""
        self.groups.setdefault(id(optimizer), list(optimizer.param_groups))
        for group in optimizer.param_groups:
            kept = self.table(group)
            if kept is None or kept.kind != "group":
                self.keep(Table(group, {key: behind(value) for key, value in group.items()}, None, "group"))

    def keep_state(self, optimizer: torch.optim.Optimizer, behind: Callable[[Any], Any] = lambda value: value) -> None:
        """Likewise, what is in its state; of what is kept already, what has been added."""
        for table in state_tables(optimizer):
            kept = self.table(table)
            if kept is None:
                kept = Table(table, {}, None, "state")
                self.keep(kept)
                self.seen[id(table)] = table
            kept.before |= {key: behind(value) for key, value in table.items() if key not in kept.before}

    def items(self, items: list[Any], stack: list[Any]) -> None:
        """Walk the items of a container, if they are few."""
        if len(items) <= LARGEST:
            stack += items
        else:
            self._beyond.update(map(id, items))

    def attributes(self, table: dict[Any, Any], owner: Any, stack: list[Any]) -> None:
        """Keep the attributes of an object, and walk them."""
        before = table_of(table) if table else {}
        self.keep(Table(table, before, owner, "attributes"))
        self.seen[id(table)] = table
        stack += before.values()

    def globals(self, table: dict[Any, Any], names: set[str], installed: bool, stack: list[Any]) -> None:
        """Keep the globals of a function, and walk those that it mentions."""
        if self.table(table) is None:
            self.keep(Table(table, table.copy(), table.get("__name__", "?"), "globals"))
        for name in names & table.keys():
            binding = (id(table), name)
            if binding not in self._mentioned:
                self._mentioned.add(binding)
                # Definitions of installed packages would lead to all of the package; their instances may be mutated.
                if not installed or kind_of(type(table[name])).has_only_attributes:
                    stack.append(table[name])

    def set_in_modules(self, function: types.FunctionType) -> None:
        """Keep what a function sets in modules that are not entered, as in `torch.nn.functional.gelu = ...`."""
        for first, *path, name in {path for code in with_inner(function.__code__) for path in attributes_set(code)}:
            module = function.__globals__.get(first)
            for part in path:
                module = vars(module).get(part) if isinstance(module, types.ModuleType) else None
            if isinstance(module, types.ModuleType) and is_closed(module.__name__):
                self.states[NameInModule].setdefault((id(vars(module)), name), NameInModule(module, name))


def _hook_tables() -> Iterator[tuple[dict[Any, Any], str, dict[Any, Any]]]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    for namespace in (vars(module), vars(optimizer)):
        for name, table in namespace.items():
            if name.startswith("_global_") and isinstance(table, dict):
                yield namespace, name, table


SETTINGS_OF_SYS = ("argv", "path")  # lists that any code may change
# Names that Python itself looks up in every module.
IMPLICIT_NAMES = {"__builtins__", "__loader__", "__spec__", "__dict__", "__weakref__"}
OF_FIELDS = {"__annotations__", "__dataclass_fields__"}


def state_tables(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    """The state of an optimizer, and the dicts of the weights in it."""
    return [optimizer.state, *(held for held in optimizer.state.values() if isinstance(held, dict))]


def size_of_state(optimizer: torch.optim.Optimizer) -> int:
    """How many entries the state of an optimizer has."""
    return sum(map(len, state_tables(optimizer)))


def is_guarded_elsewhere(name: str) -> bool:
    """Whether an attribute of optimizers is guarded by `optimizers.py`, or only used for checkpoints."""
    return name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_") and "state_dict" in name
