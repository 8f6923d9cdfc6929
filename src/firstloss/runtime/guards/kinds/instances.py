"""Objects with attributes, and those without anything in them."""

from __future__ import annotations

import contextvars
import datetime
import decimal
import enum
import logging
import operator
import re
import struct
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ....compat.python_names import is_python_class
from ....compat.torch_names import PARAMETER_FLAG, backward_hooks, post_accumulate_grad_hooks
from ....optim.schedule import schedules_of
from ..access import MISSING, ModuleProxy, module_of, own_attributes, slot_value, slots, table_of
from ..equality import same
from ..guards import describe_attribute
from ..kind import Kind, kind_of, of
from ..packages import is_closed_class
from ..reconstruct import CallFrame, Make, Reconstructor, constant
from ..recording import can_be_instrumented
from ..snapshot import Snapshot, is_guarded_elsewhere, size_of_state, state_tables
from ..states import ClassOf, Slots, Table
from ..value_guards import Values


# Immutable, and refer to no other objects. Listed one by one, since the `__module__` of a C class is not reliable.
@of(
    int, float, bool, str, bytes, complex, type(None), type(...), type(NotImplemented), range, types.CodeType,
    types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias,
    types.UnionType, operator.attrgetter, re.Pattern, re.Match, struct.Struct, decimal.Decimal, contextvars.Token,
    datetime.date, datetime.time, datetime.timedelta, datetime.timezone,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator, torch.Stream,
    type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor), np.dtype, np.generic, np.ufunc,
    logging.Manager,
)  # fmt: skip
class Leaf(Kind):
    """Immutable, with nothing in it."""

    is_leaf = True

    def of_class(self, cls: type) -> Kind:
        return INSTANCE if has_attributes(cls) and not is_closed_class(cls) else self

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        return constant(obj)


LEAF = Leaf()


@of(enum.Enum)
class Member(Kind):
    """A member of an enumeration: an object with attributes, unless these are known to be immutable."""

    def of_class(self, cls: Any) -> Kind:
        return LEAF if is_closed_class(cls) and not _changes(cls) else INSTANCE


def _changes(cls: type[enum.Enum]) -> bool:
    """Whether the values of an enumeration's members are mutable."""
    immutable = (tuple, frozenset, types.FunctionType)
    return any(not isinstance(value, immutable) and not kind_of(type(value)).is_leaf for value in _values(cls))


def _values(cls: type[enum.Enum]) -> Iterator[Any]:
    """The values of an enumeration's members."""
    for member in cls:
        yield from member.value if type(member.value) is tuple else (member.value,)


class WithAttributes(Kind):
    """Has content, and its instances may have attributes besides."""

    def visit(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        self.visit_content(obj, snapshot, stack)
        table = own_attributes(obj)
        if table is not None:
            snapshot.attributes(table, obj, stack)
        visit_slots_and_class(obj, snapshot, stack)

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        """As `visit`, without attributes."""


def visit_slots_and_class(obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
    """The class of an object, and its `__slots__`."""
    cls = type(obj)
    names = slots(cls)
    if names:
        before = {name: slot_value(obj, name) for name in names}
        snapshot.keep(Slots(obj, before))
        stack += [value for value in before.values() if value is not MISSING]
    if is_python_class(cls):
        snapshot.keep(ClassOf(obj, cls))
        if cls not in snapshot.classes:
            snapshot.classes.add(cls)
            stack += [base for base in cls.__mro__ if not is_closed_class(base)]
        if isinstance(obj, torch.nn.Module):
            snapshot.modules.append(obj)


def guard_class(obj: Any, values: Values) -> None:
    """Guard an object's class, and the operators that it defines."""
    if is_python_class(type(obj)):
        if not isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):  # see `Values.of_object`
            values.objects.setdefault(id(obj), obj)
        values.classes.setdefault(type(obj), set())


# C classes whose content, or the memory that they refer to, cannot be watched.
@of(
    weakref.finalize,  # reads a registry of the standard library
    torch.jit.ScriptModule,  # its attributes are in C++
    torch.UntypedStorage, torch.TypedStorage, memoryview, types.FrameType, types.TracebackType, types.CoroutineType,
    types.AsyncGeneratorType, np.record,
)  # fmt: skip
class Unknown(WithAttributes):
    """A C object the changes of whose content cannot be detected."""

    hides_content = True

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        if not values.in_class:
            values.unguardable[id(obj)] = (obj, description)


UNKNOWN = Unknown()


def guard_attributes(obj: Any, values: Values) -> None:
    """Guard an object's attributes, unless each read of one is recorded."""
    table = None if _reads_are_recorded(type(obj)) else own_attributes(obj)
    if table is not None:
        values.mentioned_in(table, describe_attribute(obj), all_of_them=True)


class Instance(WithAttributes):
    """An object with attributes, and no other content."""

    has_only_attributes = True

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        guard_class(obj, values)
        if isinstance(obj, BaseException):
            fields: Any = type(obj)
            values.fields(obj, _fields_in_c(fields), description, name)
        guard_attributes(obj, values)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        attributes = reconstructor.attributes(obj)
        held = {name: slot_value(obj, name) for name in slots(type(obj))}
        slotted = {name: reconstructor.make(part) for name, part in held.items() if part is not MISSING}
        cls = type(obj)

        def fill(new: Any, env: CallFrame) -> None:
            attributes(new, env)
            for name, part in slotted.items():
                object.__setattr__(new, name, part(env))

        base: Any = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
        try:
            base.__new__(cls)
        except TypeError:
            return reconstructor.cannot(obj)
        return reconstructor.once(obj, lambda: base.__new__(cls), fill)


INSTANCE = Instance()


def _reads_are_recorded(cls: type) -> bool:
    """Whether all attribute reads of its instances are recorded. Those by which `SimpleNamespace` compares and prints
    are for the class itself, by the C part, and not for subclasses."""
    return can_be_instrumented(cls) and (cls is types.SimpleNamespace or not issubclass(cls, types.SimpleNamespace))


def has_attributes(cls: type) -> bool:
    """Whether its instances have attributes of their own."""
    return bool(cls.__dictoffset__ or slots(cls))


def _fields_in_c(cls: Any) -> tuple[str, ...]:
    """The names of the fields of exceptions of a class that are stored in C."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    bases = [base for base in cls.__mro__ if not is_python_class(base)]
    names = {name: None for base in bases for name, member in vars(base).items() if isinstance(member, kinds)}
    return tuple(name for name in names if name not in ("__dict__", "__traceback__"))


@of(ModuleProxy)
class Proxy(Instance):
    """A compiled model, which stands for its module."""

    def visit(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        stack.append(module_of(obj))


@of(torch.optim.Optimizer)
class OptimizerKind(Instance):
    """An optimizer. The tensors in its state are not watched for what they are, as its step does not depend on that."""

    def visit(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        snapshot.optimizers.append(obj)
        snapshot.keep_groups(obj)
        stack.append(obj.param_groups)
        for group in obj.param_groups:
            snapshot.seen[id(group)] = group
            stack += [*group.values(), *group["params"]]
        snapshot.keep_state(obj)
        snapshot.state_sizes[id(obj)] = size_of_state(obj)
        table = obj.__dict__
        before = table_of(table)
        snapshot.keep(Table(table, before, obj, "attributes"))
        snapshot.seen[id(table)] = table
        stack += [v for k, v in before.items() if not is_guarded_elsewhere(k)]
        stack += schedules_of(obj)
        for held in state_tables(obj):
            stack += [entry for entry in held.values() if not isinstance(entry, torch.Tensor)]
        visit_slots_and_class(obj, snapshot, stack)


class FirstlossObject(Kind):
    """An object of this package that users hold: schedules, metrics. Its plain attributes are watched."""

    def visit(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        plain = {k: v for k, v in vars(obj).items() if kind_of(type(v)).is_leaf}
        snapshot.firstloss_objects[id(obj)] = plain

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        """Its plain attributes, except those that the step changes."""
        before, table = values.snapshot.firstloss_objects.get(id(obj), {}), vars(obj)
        guard = values.table(table, describe_attribute(obj), None)
        guard.expected.update({k: v for k, v in before.items() if same(v, table.get(k, MISSING))})
        guard.expect_absent(values.executed.attributes - table.keys())


FIRSTLOSS_OBJECT = FirstlossObject()


@of(torch.Tensor)
class TensorKind(Kind):
    """A tensor: its content is an input of the step."""

    def visit(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        snapshot.tensors[id(obj)] = obj
        if (obj.is_leaf or obj.retains_grad) and obj.grad is not None:
            stack.append(obj.grad)
        for hooks in (backward_hooks(obj), post_accumulate_grad_hooks(obj)) if obj.requires_grad else ():
            stack += (hooks or {}).values()
        table = obj.__dict__
        if table and not table.keys() <= _SET_BY_RUNTIME:
            snapshot.attributes(table, obj, stack)

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        values.tensors[id(obj)] = obj
        if values.snapshot.table(obj.__dict__) is not None:
            values.mentioned_in(obj.__dict__, lambda key: f"the attribute {key} of a tensor")

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        return reconstructor.tensor(obj)


_SET_BY_RUNTIME = {"_storage", PARAMETER_FLAG}
