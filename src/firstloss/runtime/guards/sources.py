"""Guard sources: what a step has read, collected after its trace from the code that ran and the recorded reads.

This includes attributes that were read while the step was traced, globals and closure variables that the code
mentions, the contents of containers that these hold, hooks, and the functions themselves. A name that did not exist is
guarded as missing.

Names that the step sets are guarded by `stored_names.py`.
"""

from __future__ import annotations

import builtins
import functools
import logging
import operator
import os
import sys
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch

from ...capture.python_generators import STATES
from . import bytecode, process_state
from .access import MISSING, cell_content, items_of, own_attributes, slot_value
from .bytecode import Use
from .external_state import PROCESS_STATE, ExternalCall, state_of
from .guard_set import GuardSet
from .guards import CellGuard, ListGuard, describe_attribute, describe_global, namespaces, undisguised, with_article
from .kind import kind_of
from .packages import is_closed, is_installed, is_runtime, module_of_class
from .places import Varying
from .recording import Executed, Recording, Site, is_closed_code
from .set_tables import SetTable
from .snapshot import Snapshot, is_guarded_elsewhere, size_of_state
from .states import CellContent, Slots
from .stored_names import guard_stored_names, stores_under_its_name
from .value_guards import Values


class GuardSources:
    """What a step has read, from which its guards are made.

    Attributes:
        additions: collections that the step only adds to.
        unknown: the code of functions that ran but are not in the snapshot, so that what they read is not guarded.
        ran: code that is known to have run, libraries included.
        generators: PyTorch generators whose states the step reads or sets, with their former states.
        sets_filters: user code may set the warning filters.
    """

    def __init__(self, snapshot: Snapshot, recording: Recording) -> None:
        self._snapshot = snapshot
        self._executed = Executed(snapshot, recording)
        self._values = Values(snapshot, self._executed, recording.passed)
        self.additions = self._values.additions
        self.unknown: list[types.CodeType] = []
        self.ran = {code for code, _ in (recording.codes or {}).values()}
        recording.outside.ran(self.ran)
        self.external_calls = list(recording.outside.calls.values())
        if recording.outside.handling and self._executed.reads_handled_exception():
            self.external_calls.append(ExternalCall("sys.exception", None))
        self.generators = list(recording.outside.generators.values())
        for generator, state in recording.outside.generators.values():
            self._values.read(
                id(generator), functools.partial(state_of, generator), state, "the state of a generator", "Generator"
            )
        if recording.outside.initial_seed:
            self._values.read(
                "seed", torch.initial_seed, snapshot.seed, "the seed of PyTorch's generator", "initial_seed"
            )
        self._functions(recording)
        self._attributes(recording)
        guard_stored_names(snapshot, recording, self._executed, self._values)
        for table in snapshot.tables("attributes"):
            if isinstance(table.owner, threading.local):  # its attributes differ between threads
                read = functools.partial(_held_attributes, table.owner)
                description = f"the attributes of {with_article(type(table.owner).__qualname__)} in this thread"
                self._values.read((id(table.owner), "__dict__"), read, (table.held,), description, "")
        for function in self._executed.cached:
            self._reads_of(function)
        for root in snapshot.roots:
            if kind_of(type(root)).refers:  # a method, perhaps of a class
                self._values.value(root, "the step or its arguments", "")
        for cls, names in list(self._values.classes.items()):  # attributes of classes, methods among them
            self._values.of_class(cls, names)

    def _functions(self, recording: Recording) -> None:
        snapshot = self._snapshot
        snapshot_codes = {inner for code in snapshot.functions for inner in bytecode.with_inner(code)}
        globals_: dict[tuple[int, str], tuple[dict[Any, Any], list[Use]]] = {}
        cells: dict[int, tuple[types.CellType, str, types.FunctionType, list[Use]]] = {}
        for code, table in self._executed.code:
            if (
                code not in snapshot_codes
                and not _is_generated(code, table)
                and not is_installed(table.get("__name__"))
            ):
                self.unknown.append(code)
            for name in bytecode.global_names(code):
                globals_.setdefault((id(table), name), (table, []))[1].extend(bytecode.uses_of(code, name))
            if not is_installed(table.get("__name__")):
                for module in bytecode.imports(code, table):
                    self._imported(module, code)
            for function in snapshot.functions.get(code, ()):
                self._values.definition(function)
                for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                    uses = [use for inner in bytecode.with_inner(code) for use in bytecode.uses_of(inner, name)]
                    cells.setdefault(id(cell), (cell, name, function, []))[3].extend(uses)
        for (_, name), (table, uses) in globals_.items():
            self._global(table, name, uses)
        for code, table in (recording.codes or {}).values():
            if table.get("__name__") in sys.stdlib_module_names:
                expected = self._values.table(table, describe_global(table), None).expected
                for name in bytecode.global_names(code):
                    if name in table:
                        expected.setdefault(name, undisguised(table[name]))
        for cell, name, function, uses in cells.values():
            self._cell(cell, name, function, uses)
        for table in recording.whole:
            if is_runtime(table.get("__name__")) or is_installed(table.get("__name__")):
                continue
            self._values.table(table, describe_global(table), None)
            for name, value in self._values.before(table).items():
                if not name.startswith("__"):
                    self._values.name(table, name, value, describe_global(table))
        if not _PRINTS_ARRAYS.isdisjoint(self._executed.modules):
            self._values.read("numpy prints", _numpy_print_options, _numpy_print_options(), "NumPy's print options", "")
        if not _READS_ENVIRONMENT.isdisjoint(self.ran) or {"environ", "getenv"} & self._executed.mentioned:
            self._values.read(
                "environ",
                process_state.environment,
                snapshot.environment.before,
                "the content of os.environ",
                "environ",
            )
        self.sets_filters: bool = not _SETS_FILTERS.isdisjoint(self._executed.mentioned)
        if self.sets_filters or not _READS_FILTERS.isdisjoint(self.ran):
            self._values.read(
                "filters", process_state.filters, snapshot.filters.before, "the warning filters", "filters"
            )
        elif recording.outside.warns or {"np", "numpy"} & self._executed.mentioned:
            description, before = "which warnings are errors", process_state.raising(snapshot.filters.before)
            self._values.read(
                "filters", lambda: process_state.raising(process_state.filters()), before, description, "filters"
            )
        for module in sorted(recording.outside.process_state):
            self._values.read(
                module, PROCESS_STATE[module], PROCESS_STATE[module](), f"the state of {module.strip('_')}", ""
            )

    def _reads_of(self, function: types.FunctionType) -> None:
        """Guard what a function that did not run may read of objects."""
        names = [name for code in bytecode.with_inner(function.__code__) for name in bytecode.global_names(code)]
        held = [self._values.before(function.__globals__).get(name) for name in names]
        held += [cell_content(cell) for cell in function.__closure__ or ()]
        for value in held:
            table = own_attributes(value) if kind_of(type(value)).has_only_attributes else None
            if table is not None:
                self._values.mentioned_in(table, describe_attribute(value))

    def _global(self, table: dict[Any, Any], name: str, uses: list[Use]) -> None:
        before = self._values.before(table).get(name, MISSING)
        if is_installed(table.get("__name__")) and not isinstance(before, (types.FunctionType, type)):
            self._values.table(table, describe_global(table), None).expected[name] = before
            return
        self._values.name(table, name, before, describe_global(table), uses)
        if before is MISSING:
            builtin_names = vars(builtins)
            self._values.name(builtin_names, name, builtin_names.get(name, MISSING), describe_global(builtin_names))

    def _cell(self, cell: types.CellType, name: str, function: types.FunctionType, uses: list[Use]) -> None:
        state = self._snapshot.state(CellContent, cell)
        before = MISSING if state is None else state.before
        description = f"the variable {name} that {function.__qualname__} uses"
        self._values.cells[id(cell)] = CellGuard(cell, before, description, name)
        if before is not MISSING:
            self._values.value_in_use(before, uses, description, name)

    def _attributes(self, recording: Recording) -> None:
        snapshot = self._snapshot
        for (_, name), (owner, sites, stored) in list(recording.reads.items()):
            if id(owner) not in snapshot.seen or (id(owner), name) in recording.shown:  # not what was there before
                continue
            if isinstance(owner, (logging.Handler, logging.Formatter)) and all(map(_is_of_logging, sites)):
                continue  # affects only what is logged
            self._values.of_object(owner)
            if isinstance(owner, torch.optim.Optimizer) and is_guarded_elsewhere(name):
                if any(not _is_closed_file(code) or code.co_name in _READ_STATE for code, _ in sites):
                    self._of_optimizer(owner, name)
                continue
            names = self._values.classes.get(type(owner))
            if names is None:
                names = self._values.classes[type(owner)] = set()
            names.add(name)
            table = own_attributes(owner)
            describe = describe_attribute(owner)
            if name == "__dict__":
                if table is not None:
                    self._values.all_of(table, describe)
                continue
            if type(owner) in recording.computed or name in _READ_ALL_ATTRIBUTES:
                self._any_attribute(owner)
            # Then it does not matter what it was.
            is_set_first = stored and stores_under_its_name(type(owner)) and (id(owner), name) not in recording.deletes
            slots = snapshot.slots_before(owner)
            if name in slots:
                before = slots[name]
                if not (is_set_first and slot_value(owner, name) is not before):
                    self._values.slot(owner, name, before, self._uses(sites, before))
                continue
            if table is None:
                continue
            before = self._values.before(table).get(name, MISSING)
            if not (is_set_first and table.get(name, before) is not before):
                self._values.name(table, name, before, describe, self._uses(sites, before) or [None])

        if self._executed.reads_past_classes:  # these reads are not recorded
            for attributes in snapshot.tables("attributes"):
                if not is_installed(module_of_class(type(attributes.owner))):
                    self._any_attribute(attributes.owner)
            for slotted in list(snapshot.states[Slots].values()):
                self._any_attribute(slotted.held)

    def _uses(self, sites: dict[Site, int], before: Any) -> list[Use]:
        """How the instructions at `sites` use an attribute; empty if it can only be read, which saves decoding their
        code.

        Args:
            sites: the instructions that look it up, and how often each has.
            before: the attribute's former value.
        """
        if not self.additions.may_include(before):
            return []
        return [bytecode.use_at(*site) for site, count in sites.items() for _ in range(min(count, 2))]

    def _any_attribute(self, owner: Any) -> None:
        """All attributes of an object, since any of them may have been read."""
        describe = describe_attribute(owner)
        for name, before in self._snapshot.slots_before(owner).items():
            self._values.slot(owner, name, before)
        table = own_attributes(owner)
        if table is not None and not isinstance(owner, (torch.optim.Optimizer, type)):
            self._values.all_of(table, describe)

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Guard what user code reads of an optimizer that `optimizers.py` otherwise handles."""
        kind = with_article(type(optimizer).__qualname__)
        if name == "defaults":
            self._values.value(optimizer.defaults, f"the defaults of {kind}", name)
        elif name == "param_groups":
            groups = self._snapshot.groups[id(optimizer)]
            self.parameter_groups(optimizer, [(group, self._values.before(group)) for group in groups])
        elif name == "state":
            size, read = self._snapshot.state_sizes[id(optimizer)], functools.partial(size_of_state, optimizer)
            self._values.read((id(optimizer), "size"), read, size, f"how much state {kind} has", name)
            self.optimizer_state(optimizer)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Guard the state of an optimizer."""
        kind = with_article(type(optimizer).__qualname__)
        state = optimizer.state
        description = f"the state of {kind}"
        self._values.read((id(optimizer), "state"), lambda: (optimizer.state,), (state,), description, "state")
        before = self._values.before(state)
        for table in (state, *(held for held in before.values() if isinstance(held, dict))):
            guard = self._values.table(table, lambda key: f"state[...][{key!r}] of {kind}", None)
            guard.whole = True
            guard.expected = dict(self._values.before(table))
            for value in guard.expected.values():
                if not isinstance(value, torch.Tensor) and self._snapshot.table(value) is None:
                    self._values.value(value, description, "state")

    def parameter_groups(self, optimizer: torch.optim.Optimizer, expected: list[tuple[dict[Any, Any], Any]]) -> None:
        """Guard the parameter groups of an optimizer, and what each is expected to hold when the step begins."""
        kind = with_article(type(optimizer).__qualname__)
        read, before = functools.partial(_param_groups, optimizer), tuple(self._snapshot.groups[id(optimizer)])
        self._values.read((id(optimizer), "param_groups"), read, before, f"the param_groups of {kind}", "param_groups")
        self._values.of_object(optimizer)
        for group, entries in expected:
            guard = self._values.table(group, lambda key: f"{key!r} in a parameter group of {kind}", None)
            guard.whole = True
            for key, value in entries.items():
                if key not in guard.expected:
                    guard.expected[key] = value
                    if key != "params" and value is self._values.before(group).get(key):
                        self._values.value(value, f"{key!r} in a parameter group of {kind}", key)

    def _imported(self, name: str, code: types.CodeType) -> None:
        """Guard a module that code imports whenever it runs."""
        if is_closed(name) or is_runtime(name) or is_installed(name):
            return
        module = sys.modules.get(name, MISSING)
        guard = self._values.table(sys.modules, lambda key: f"the module {key}", None)
        guard.expected[name] = module
        if module is not MISSING and id(module) not in self._snapshot.seen:  # imported by the step for the first time
            self.unknown.append(code)
        else:
            self._values.value(module, f"the module {name}", name)

    # -- found by effects --

    def guard_content(self, container: Any) -> None:
        """Guard a container that the step has changed although no read of it was recorded."""
        self._values.looked_at.discard(id(container))
        self._values.value(container, f"{with_article(type(container).__qualname__)} that the step changes", "")

    def guard_order(self, container: set[Any], before: SetTable) -> None:
        """Guard the order of a set's items, and which of them `pop` takes."""
        description = f"the order of the items of {with_article(type(container).__qualname__)} that the step changes"
        self._values.read(
            (id(container), "order"), lambda: SetTable(container).order(), before.order(), description, ""
        )

    def guard_collection(self, container: Any, before: list[Any]) -> None:
        """Guard a container that is only added to: an item that a set already holds is not added, and a deque may be
        full."""
        kind = with_article(type(container).__qualname__)
        if isinstance(container, set):
            held = set(before)
            description = f"the items of {kind} that the step adds to"
            self._values.read((id(container), "members"), lambda: held <= set(container), True, description, "")
        elif getattr(container, "maxlen", None) is not None and len(before) == container.maxlen:
            if all(map(operator.is_, items_of(container), before)):
                self.guard_content(container)

    # -- the result --

    def guards(self, state_of_generators: list[Any], weights: set[int], varying: Varying | None = None) -> GuardSet:
        """The guards to check at each call, once everything is collected.

        Args:
            state_of_generators: the result of `python_generators.states()` before what the step did to them; PyTorch's
                generators are part of the Program.
            weights: the ids of tensors whose layouts are guarded elsewhere.
            varying: the numbers that are inputs of the step.
        """
        mentioned = {
            name for name, words in _GENERATOR_METHODS.items() if not words.isdisjoint(self._executed.mentioned)
        }
        for (name, (read, _)), before in zip(STATES.items(), state_of_generators, strict=True):
            if read() != before or name in mentioned:
                self._values.read(name, read, before, f"the state of {name}'s random generator", name)
        for namespace_of_hooks, name, table in self._snapshot.hooks:
            self._values.name(namespace_of_hooks, name, table, "PyTorch's {}".format)
        for namespace in namespaces():
            if id(namespace.table) in self._values.tables:
                self._values.tables[id(namespace.table)].expected |= namespace.expected
            else:
                self._values.table(namespace.table, namespace.describe, None).expected = namespace.expected
        for state in self._snapshot.names_in_modules():  # the former values
            guard = self._values.tables.get(id(vars(state.held)))
            if guard is not None and state.name in guard.expected:
                guard.expected = {**guard.expected, state.name: state.before}  # a copy: guard sets share namespaces
        for (container, key), any_number in (varying.expected() if varying is not None else {}).items():
            for guards in (self._values.tables, self._values.lists, self._values.deques, self._values.cells):
                of_container = guards.get(container)
                if isinstance(of_container, ListGuard):
                    items = enumerate(of_container.expected)
                    of_container.expected = [any_number if i == key else item for i, item in items]
                elif of_container is not None and key in of_container.expected:
                    of_container.expected = {**of_container.expected, key: any_number}
            slot = self._values.reads.get((container, key))
            if slot is not None:
                self._values.reads[container, key] = slot._replace(expected=any_number)
        return GuardSet(self._values, self._executed.lines, self.unknown, self.external_calls, weights)


def _held_attributes(owner: Any) -> tuple[Any, ...]:
    """The dict of an object's attributes, to be compared as an object."""
    return (own_attributes(owner),)


def _param_groups(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return tuple(optimizer.param_groups)


# Methods of PyTorch optimizers that return all of these.
_READ_STATE = {"__repr__", "state_dict", "__getstate__"}
# C methods that read all attributes: `copy` and `pickle` call them.
_READ_ALL_ATTRIBUTES = {"__reduce__", "__reduce_ex__", "__getstate__", "__replace__"}


# Methods that read the state, or set it.
_GENERATOR_METHODS = {"random": {"seed", "setstate", "getstate"}, "numpy": {"seed", "set_state", "get_state"}}


_PRINTS_ARRAYS = {"numpy._core.arrayprint", "numpy.core.arrayprint"}  # the latter is of NumPy 1


# Code that reads `os.environ`, and the warning filters.
_READS_ENVIRONMENT = {f.__code__ for f in vars(type(os.environ)).values() if isinstance(f, types.FunctionType)}
_READS_FILTERS = {warnings.catch_warnings.__enter__.__code__}
# In user code: filters that modules set on import are not part of the step.
_SETS_FILTERS = {"filters", "simplefilter", "filterwarnings", "resetwarnings"}


def _numpy_print_options() -> str:
    return repr(np.get_printoptions())


def _is_generated(code: types.CodeType, table: dict[Any, Any]) -> bool:
    """Whether it is a module's top-level code, or that of a named tuple."""
    return code.co_name == "<module>" or str(table.get("__name__")).startswith("namedtuple_")


def _is_of_logging(site: Site) -> bool:
    code, _ = site
    return code.co_filename.startswith(os.path.dirname(logging.__file__) + os.sep)


def _is_closed_file(code: types.CodeType) -> bool:
    """Whether code belongs to PyTorch or to the runtime."""
    return is_closed_code(code, {"__name__": None}) or f"{os.sep}torch{os.sep}" in code.co_filename
