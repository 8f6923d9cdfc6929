"""Guards of what a step sets or deletes without changing it, as if it were read.

An example is `model.train()` for a model that is in training mode already: later calls need not repeat it, as long as
the state is the same when they begin. Changes are repeated at each call (`effects.py`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from ...compat.torch_names import MODULE_TABLES
from . import bytecode
from .access import MISSING, cell_content, own_attributes, slot_value
from .guards import CellGuard, describe_attribute, describe_global
from .packages import is_closed
from .recording import Executed, Recording, can_be_instrumented
from .snapshot import Snapshot, is_guarded_elsewhere
from .states import CellContent, NameInModule, Slots
from .value_guards import Values


def guard_stored_names(snapshot: Snapshot, recording: Recording, executed: Executed, values: Values) -> None:
    """Guard what the step has stored without a change. Call it before the step's effects are undone."""
    stores = _Stores(snapshot, values)
    for code, table in executed.code:
        names, variables = bytecode.stored_names(code)
        for name in names:
            stores.name(table, name, describe_global(table))
        for function in snapshot.functions.get(code, ()) if variables else ():
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                if name in variables:
                    stores.variable(cell, name, function)
    for in_module in snapshot.names_in_modules():
        stores.name(vars(in_module.held), in_module.name, describe_global(vars(in_module.held)))
    for (_, attribute), (owner, _, _) in (*recording.stores.items(), *recording.deletes.items()):
        if id(owner) in snapshot.seen:  # else created in the step
            stores.attribute(owner, attribute if stores_under_its_name(type(owner)) else None)
    for (_, attribute), (owner, _, was_set) in recording.deletes.items():
        deleted = own_attributes(owner)
        if id(owner) in snapshot.seen and deleted is not None and not was_set:
            key, describe = (id(owner), "has", attribute), describe_attribute(owner)
            is_there = functools.partial(deleted.__contains__, attribute)
            values.read(key, is_there, attribute in values.before(deleted), describe(attribute), attribute)
    # These stores are not recorded, at least where the class is not instrumented.
    attributes = snapshot.tables("attributes")
    if executed.stores_past_classes or recording.outside.sets_by_string:
        for state in attributes:
            if executed.stores_past_classes or not _stores_are_recorded(type(state.owner)):
                stores.table(state.held, state.owner)
        for slotted in list(snapshot.states[Slots].values()) if executed.stores_past_classes else ():
            stores.attribute(slotted.held, None)
    stored = {name for code, _ in executed.code for name in bytecode.stored_attributes(code)}
    for state in attributes if stored else ():
        for name in stored & state.held.keys() if type(state.owner) is types.SimpleNamespace else ():
            stores.name(state.held, name, describe_attribute(state.owner))


def stores_under_its_name(cls: type) -> bool:
    """Whether what is set as an attribute of its instances is stored under that name, for all that is known."""
    method = cls.__setattr__
    return not isinstance(method, types.FunctionType) or is_closed(method.__module__)


def _stores_are_recorded(cls: type) -> bool:
    """Whether all attribute stores of its instances are recorded."""
    return can_be_instrumented(cls) and cls is not types.SimpleNamespace


class _Stores:
    def __init__(self, snapshot: Snapshot, values: Values) -> None:
        self._snapshot = snapshot
        self._values = values

    def name(self, table: dict[Any, Any], name: str, describe: Callable[[Any], str]) -> None:
        """Guard a name in a dict."""
        state = self._snapshot.states[NameInModule].get((id(table), name))
        before = state.before if state is not None else self._values.before(table).get(name, MISSING)
        if table.get(name, MISSING) is before:
            self._values.table(table, describe, None).expected.setdefault(name, before)

    def table(self, table: dict[Any, Any], owner: Any) -> None:
        """Guard all names of an object or a class."""
        describe = describe_attribute(owner)
        for name in list(table):
            if isinstance(name, str) and not name.startswith("__"):
                if not (isinstance(owner, torch.optim.Optimizer) and is_guarded_elsewhere(name)):
                    self.name(table, name, describe)

    def variable(self, cell: types.CellType, name: str, function: types.FunctionType) -> None:
        """Guard a variable of an enclosing function."""
        state = self._snapshot.state(CellContent, cell)
        if state is not None and state.before is cell_content(cell):
            description = f"the variable {name} that {function.__qualname__} sets"
            self._values.cells.setdefault(id(cell), CellGuard(cell, state.before, description, name))

    def attribute(self, owner: Any, name: str | None) -> None:
        """Guard an attribute of an object; all of them if `name` is None."""
        describe = describe_attribute(owner)
        for slot, before in self._snapshot.slots_before(owner).items():
            if name in (slot, None) and slot_value(owner, slot) is before:
                read, description = functools.partial(slot_value, owner, slot), describe(slot)
                self._values.read((id(owner), slot), read, before, description, slot, owner)
        table = own_attributes(owner)
        if table is None:
            return
        if name is None:
            self.table(table, owner)
            return
        if isinstance(owner, torch.nn.Module) and any(name in table.get(part, ()) for part in MODULE_TABLES):
            self._values.of_object(owner)
        if not (isinstance(owner, torch.optim.Optimizer) and is_guarded_elsewhere(name)):
            self.name(table, name, describe)
