"""The guards of one traced step: checked at each call, with an explanation of what has changed."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture.autograd_boundary import is_returned
from ...capture.input_numbers import Expression, InputNumbers
from ...capture.recorder import DeferredTensor
from ...compat.torch_names import HOOK_TABLES, PARAMETER_FLAG, is_parameter
from .external_state import ExternalCall
from .guards import Change, ListGuard, is_shared, same, with_article
from .native import native
from .object_kinds import MISSING
from .recording import CodeLines
from .value_guards import Values


class GuardSet:
    """The guards of one traced step.

    Attributes:
        unwatched: containers that are too large to be compared at each call, by name, with a description.
        unwatchable: objects whose changes cannot be detected, by id, each with a description.
        unknown: the code of functions that ran but are not in the snapshot, so that what they read is not guarded.
        lines: the lines where the code that ran reads and writes names.
        weak: the step reads an object by a weak reference.
    """

    def __init__(
        self,
        values: Values,
        lines: CodeLines,
        unknown: list[types.CodeType],
        external_calls: list[ExternalCall],
        weights: set[int],
    ) -> None:
        """
        Args:
            unknown: see the attribute.
            external_calls: those calls whose results cannot be guarded.
            weights: the ids of tensors whose gradients are guarded elsewhere.
        """
        self.external_calls = external_calls
        self.numbers = InputNumbers()  # set once the trace has ended
        self.weak = values.weak
        self.unwatched = values.unwatched
        self.unwatchable = values.unwatchable
        self.unknown = unknown
        self.lines = lines
        self.tables = list(values.tables.values())
        self.lists = list(values.lists.values())
        self.cells = list(values.cells.values())
        self._classes_of = [(owner, type(owner)) for owner in values.objects.values()]
        self._functions = list(values.functions.values())
        self._reads = list(values.reads.values())
        self._optimizers = values.optimizers
        self._global_hooks = values.hooks
        self._orders = [
            (g, tuple(g.table)) for g in self.tables if g.whole and len(g.table) > 1 and type(g.table) is not dict
        ]
        leaves = list(values.leaves.values())
        self._weights = [t for t in leaves if t.requires_grad]
        self._hooked = _hooks(self._weights)
        self._with_facts = [t for t in leaves if id(t) not in weights]
        self._facts = _facts(self._with_facts)
        self._watch: Any = None  # created once all guards pass: the step itself may have changed what it reads
        self.tensors: dict[int, list[tuple[Any, Any]]] = {}  # by id, the guards and keys that hold a tensor
        guard: Any
        for guard in (*self.tables, *self.lists, *self.cells):
            if is_shared(guard.expected):
                continue
            entries = enumerate(guard.expected) if isinstance(guard, ListGuard) else guard.expected.items()
            for key, value in entries:
                if isinstance(value, torch.Tensor):
                    self.tensors.setdefault(id(value), []).append((guard, key))
                if isinstance(key, torch.Tensor):  # a key cannot be replaced by another tensor
                    self.tensors.setdefault(id(key), []).append((guard, key))

    def release(self) -> None:
        """Stop checking, and release everything that is guarded."""
        collections: list[Any] = [self.tables, self.lists, self.cells, self._classes_of, self._functions, self._reads]
        collections += [self._optimizers, self._global_hooks]
        for collection in (
            *collections,
            self._orders,
            self._weights,
            self._hooked,
            self._with_facts,
            self._facts,
            self.tensors,
        ):
            collection.clear()
        self._watch = None

    def _start_watch(self) -> None:
        """All guards pass: from here on watch for changes of the present state."""
        if self._watch is None and native is not None and _versions_work():
            self._watch = native.Watch(
                [guard.table for guard in self.tables],
                [guard.held for guard in self.lists],
                [(guard.held, guard.expected[None]) for guard in self.cells],
                self._classes_of,
                [guard.held for guard in self._functions],
            )

    def changes(
        self,
        move: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], bool],
        arguments: Sequence[Any],
        known: dict[Expression, Any],
    ) -> list[Change]:
        """What the step reads and has changed since it was traced; mostly nothing.

        Args:
            arguments: the leaves of the call's arguments.
            known: numbers of this call that were computed already.
            move: called with pairs of replaced tensors and their replacements; returns whether the compiled step
                accepts the replacements.
        """
        watch = self._watch
        if watch is None:
            hits: Any = [
                *(("d", i) for i in range(len(self.tables))),
                *(("l", i) for i in range(len(self.lists))),
                *(("c", i) for i in range(len(self.cells))),
                *(("f", i) for i in range(len(self._functions))),
                *(("o", i) for i, (owner, cls) in enumerate(self._classes_of) if type(owner) is not cls),
            ]
        else:
            hits = watch.changed()
        differences: list[Change] = []
        if hits is not None:
            differences = self._differing(hits, move)
        for guard in self._reads:
            now = guard.read()
            if now is not guard.expected and not same(guard.expected, now):
                differences.append(Change(guard.description, guard.name, guard.expected, now, guard.container_id))
        for optimizer, before in self._optimizers:
            now = [p for group in optimizer.param_groups for p in group["params"]]
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                description = f"the parameters of {with_article(type(optimizer).__qualname__)}"
                differences.append(Change(description, "param_groups", before, now, id(optimizer)))
        for namespace, name, hooks in self._global_hooks:
            if (namespace[name] or hooks) and not same(hooks, tuple(namespace[name].items())):
                differences.append(Change(f"PyTorch's {name}", name, hooks, tuple(namespace[name].items())))
        for table, order in self._orders:
            if not same(order, tuple(table.table)):
                differences.append(table.change(MISSING, order, tuple(table.table)))
        if _hooks(self._weights) != self._hooked:
            differences.append(Change("the hooks of a tensor", "register_hook", None, None))
        if self._with_facts and _facts(self._with_facts) != self._facts:
            differences.append(Change("the shape, dtype, gradient or memory of a tensor", "", None, None))
        if not differences:
            differences = self._changed_numbers(arguments, known)
        if not differences:
            self._start_watch()
        return differences

    def _changed_numbers(self, arguments: Sequence[Any], known: dict[Expression, Any]) -> list[Change]:
        """Input numbers of another type, those whose values the step has branched on, and those from which it cannot
        compute what it did."""
        differences = []
        self.numbers.read_all(arguments, known)
        for expression in self.numbers.sources:
            source = expression.source
            assert source is not None
            now = expression.value(arguments, known)
            if type(now) is not source.kind:
                differences.append(Change(source.description, source.name, source.kind, now))
        for expression, expected in self.numbers.guards.items() if not differences else ():
            try:
                now = expression.value(arguments, known)
            except Exception:  # a division by zero, for example
                now = MISSING
            if now is not expected and not same(expected, now):
                differences.append(_change_of(expression, expected, now))
        for expression in self.numbers.expressions() if not differences else ():
            try:
                expression.value(arguments, known)
            except Exception as error:  # which the step may catch
                differences.append(_change_of(expression, "a value", error))
                break
        return differences

    def _differing(self, hits: list[tuple[str, int]], move: Any) -> list[Change]:
        changes: list[tuple[Any, tuple]] = []
        for kind, n in hits:
            if kind == "o":
                owner, cls = self._classes_of[n]
                changes.append((None, (f"the class of {with_article(cls.__qualname__)}", cls, type(owner))))
                continue
            guard = self._guard(kind, n)
            changes += [(guard, change) for change in guard.changes()]
        if changes and not self._moved(changes, move):
            return [
                guard.change(*change) if guard is not None else Change(change[0], "__class__", *change[1:])
                for guard, change in changes
            ]
        if self._watch is not None:
            for kind, n in hits:
                if kind != "o":
                    self._watch.settle(kind, n)
        return []

    def _guard(self, kind: str, n: int) -> Any:
        kinds: dict[str, list[Any]] = {"d": self.tables, "l": self.lists, "c": self.cells, "f": self._functions}
        return kinds[kind][n]

    def _moved(self, changes: list[tuple[Any, tuple]], move: Any) -> bool:
        """Whether the only change is that the compiled step's tensors were replaced by equivalent ones."""
        new_of: dict[int, torch.Tensor] = {}
        old_of: dict[int, torch.Tensor] = {}
        count: dict[int, int] = {}
        for guard, (key, old, new) in changes:
            if guard is None or key is MISSING or not _interchangeable(old, new):
                return False
            if new_of.setdefault(id(old), new) is not new:
                return False
            old_of[id(old)] = old
            count[id(old)] = count.get(id(old), 0) + 1
        if any(len(self.tensors[i]) != n for i, n in count.items()):
            return False  # the old tensor is still held elsewhere
        now = [id(new_of[i]) if i in new_of else i for i in self.tensors]
        if len(set(now)) != len(now):
            return False  # one tensor has replaced two
        if not move([(old_of[i], new) for i, new in new_of.items()]):
            return False
        moved = {i: self.tensors.pop(i) for i in new_of}
        for i, holders in moved.items():
            self.tensors[id(new_of[i])] = holders
            for guard, key in holders:
                guard.expected[key] = new_of[i]
        self._with_facts = [new_of.get(id(t), t) for t in self._with_facts]
        self._facts = _facts(self._with_facts)
        return True


def _change_of(expression: Expression, old: Any, new: Any) -> Change:
    source = next(iter(expression.sources()))
    return Change(source.description, source.name, old, new)


def _hooks(tensors: list[torch.Tensor]) -> list[Any]:
    hooks: list[Any] = []
    for tensor in _with_any(tensors, HOOK_TABLES):
        tables = (getattr(tensor, name) for name in HOOK_TABLES)
        hooks.append((id(tensor), *(tuple(table.values()) for table in tables if table)))
    return hooks


def _some_attribute(objects: list, names: tuple[str, ...]) -> list:
    return [obj for obj in objects if any(getattr(obj, name) for name in names)]


_with_any = getattr(native, "with_any", _some_attribute)


def _facts(tensors: list[torch.Tensor]) -> list[tuple]:
    """The properties of tensors, beside their contents, that a step may depend on."""
    return [
        (t.requires_grad, t.requires_grad and t.is_leaf and t.grad is not None, t.shape, t.dtype, _layout(t))
        for t in tensors
    ]


def _layout(tensor: torch.Tensor) -> Any:
    strided = tensor.layout is torch.strided
    return (tensor.stride(), tensor.storage_offset()) if strided else tensor.layout


def _own_class(tensor: torch.Tensor) -> type:
    """The class of a tensor as user code sees it, whatever class the backend has given it."""
    return torch.Tensor if type(tensor) is DeferredTensor else type(tensor)


def _interchangeable(old: Any, new: Any) -> bool:
    """Whether a tensor can replace another as an input."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    if isinstance(new, torch.nn.Parameter) or old.retains_grad or new.retains_grad:
        return False
    if (old.requires_grad or new.requires_grad) and not (is_returned(old) and is_returned(new)):
        return False
    if (old.shape, old.dtype, old.device, old.layout) != (new.shape, new.dtype, new.device, new.layout):
        return False
    if (old.is_conj(), old.is_neg()) != (new.is_conj(), new.is_neg()):
        return False
    if old.stride() != new.stride() or _own_class(old) is not _own_class(new):
        return False
    attributes = {*old.__dict__, *new.__dict__} - {"_storage", PARAMETER_FLAG}
    return not attributes and not is_parameter(new) and not is_parameter(old)


_works: list[bool] = []


def _versions_work() -> bool:
    """Whether version tags of dicts work in this Python. Tested, since they are private."""
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

    def count(instance: Any) -> None:
        instance.n += 1

    table: dict[str, Any] = {"a": 1, "b": 2}
    outcomes = [
        seen(lambda: table.update(a=3), table),
        seen(lambda: table.__setitem__("c", 3), table),
        seen(lambda: table.pop("b"), table),
        seen(lambda: table.clear(), table),
    ]
    instance: Any = Thing()
    instance.n = 0
    for _ in range(50):  # until the interpreter has specialized the bytecode
        count(instance)
    attributes = instance.__dict__
    outcomes += [seen(lambda: count(instance), attributes) for _ in range(50)]
    return all(outcomes)
