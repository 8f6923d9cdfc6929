"""The guards of one traced step: checked at each call, with an explanation of what has changed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...capture.autograd_boundary import is_returned
from ...capture.gradient_nodes import HeldNodes
from ...capture.input_numbers import Expression, InputNumbers
from ...capture.recorder import DeferredTensor
from ...compat.torch_names import HOOK_TABLES, PARAMETER_FLAG, DisableTorchFunctionSubclass, is_parameter
from .access import MISSING, size, table_of
from .equality import same
from .external_state import ExternalCall
from .guards import Change, ClassGuard, Guard, ListGuard, ReadGuard, is_shared
from .native import native
from .recording import CodeLines
from .value_guards import Values


class GuardSet:
    """The guards of one traced step.

    Attributes:
        too_large: containers that are too large to be compared at each call, by name, with a description.
        unguardable: objects whose changes cannot be detected, by id, each with a description.
        unknown: the code of functions that ran but are not in the snapshot, so that what they read is not guarded.
        external_calls: calls whose results cannot be guarded.
        lines: the lines where the code that ran reads and writes names.
        weak: the step reads an object by a weak reference.
        numbers: its input numbers, which are set once the trace has ended.
    """

    def __init__(
        self,
        values: Values,
        lines: CodeLines,
        unknown: list[types.CodeType],
        external_calls: list[ExternalCall],
        weights: set[int],
    ) -> None:
        """`weights` are the ids of tensors whose layouts are guarded elsewhere."""
        self.external_calls = external_calls
        self.numbers: InputNumbers = InputNumbers()
        self.weak: bool = values.weak
        self.too_large: list[tuple[str, str]] = values.too_large
        self.unguardable: dict[int, tuple[Any, str]] = values.unguardable
        self.unknown = unknown
        self.lines = lines
        tables = list(values.tables.values())
        # Those of changes that the watch detects, in an order that branch prediction likes.
        self._guards: list[Guard] = [*tables, *values.lists.values(), *values.cells.values()]
        holders = [g for g in (*self._guards, *values.deques.values()) if not is_shared(g.expected)]
        self._guards += values.functions.values()
        self._count = len(self._guards)
        self._guards += map(ClassGuard, values.objects.values())
        self._watched = len(self._guards)
        self._guards += values.deques.values()  # whose changes the watch does not detect
        # The version of an OrderedDict is the same when an item is moved.
        ordered = [g for g in tables if g.whole and size(g.held) > 1 and type(g.held) is not dict]
        orders = [(g.change(MISSING, None, None), functools.partial(_keys, g.held)) for g in ordered]
        self._reads = [*values.reads.values()]
        self._reads += [ReadGuard(read, read(), c.description, c.name, c.container_id) for c, read in orders]
        self._tensors = list(values.tensors.values())
        self._laid_out = [t for t in self._tensors if id(t) not in weights]
        self._watch: Any = None  # created once all guards pass: the step itself may have changed what it reads
        self._holders: dict[int, list[tuple[Guard, Any]]] = {}  # by a tensor's id, the guards and keys that hold it
        for guard in holders:
            entries = enumerate(guard.expected) if isinstance(guard, ListGuard) else guard.expected.items()
            for key, value in entries:
                for held in (key, value):  # a key cannot be replaced by another tensor
                    if isinstance(held, torch.Tensor):
                        self._holders.setdefault(id(held), []).append((guard, key))

    def begin(self, numbers: InputNumbers, inputs: Iterable[torch.Tensor]) -> None:
        """Begin to guard; to be called once the trace's effects have been undone, so that tensors are as they were when
        the step began: with the gradients, hooks and `requires_grad` that its Python has found.

        Args:
            numbers: the step's input numbers.
            inputs: the weights that are inputs, however its Python has reached them.
        """
        self.numbers = numbers
        self._weights = [t for t in self._tensors if t.requires_grad]
        self._nodes = HeldNodes()
        self._hooked = self._hooks()
        self._tensors = list({id(t): t for t in (*self._tensors, *inputs)}.values())
        self._leaves = [t for t in self._tensors if t.is_leaf]  # of others the gradient cannot be asked for
        self._require = _require_gradients(self._tensors)
        self._have = _have_gradients(self._leaves)
        self._layouts = _layouts(self._laid_out)

    def release(self) -> None:
        """Stop checking, and release everything that is guarded."""
        for collection in (
            self._guards, self._reads, self._tensors, self._weights, self._hooked, self._leaves,
            self._require, self._have, self._laid_out, self._layouts,
        ):  # fmt: skip
            collection.clear()
        self._holders.clear()
        self._watch = None

    def changes(
        self,
        move: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], bool],
        arguments: Sequence[Any],
        known: dict[Expression, Any],
    ) -> list[Change]:
        """What the step reads and has changed since it was traced, besides `changes_of_gradients`; mostly nothing.

        Args:
            arguments: the leaves of the call's arguments.
            known: numbers of this call that were computed already.
            move: called with pairs of replaced tensors and their replacements; returns whether the compiled step
                accepts the replacements.
        """
        changed = self._watch.changed() or () if self._watch is not None else range(len(self._guards[: self._watched]))
        numbers = [*changed, *range(self._watched, len(self._guards))]
        differences = self._differences(numbers, move) if numbers else []
        for guard in self._reads:
            now = guard.read()
            if now is not guard.expected and not same(guard.expected, now):
                differences.append(guard.change(now))
        if self._hooks() != self._hooked:
            differences.append(Change("the hooks of a tensor", "register_hook", None, None))
        if self._laid_out and (layouts := _layouts(self._laid_out)) != self._layouts:
            differences += _changed(_LAYOUTS, self._laid_out, self._layouts, layouts)
        if not differences:
            differences = self._changed_numbers(arguments, known)
        if not differences and self._watch is None and native is not None and _versions_work():
            held = [guard.held for guard in self._guards[: self._watched]]
            self._watch = native.Watch(held[: self._count], held[self._count :])
        return differences

    def changes_of_gradients(self) -> list[Change]:
        """Tensors that require a gradient now, or have one, or do not any more."""
        if (require := _require_gradients(self._tensors)) != self._require:
            changes = _changed(_REQUIRE_GRADIENTS, self._tensors, self._require, require)
        elif (have := _have_gradients(self._leaves)) != self._have:  # still leaves, since they require what they did
            changes = _changed(_HAVE_GRADIENTS, self._leaves, self._have, have)
        else:
            return []
        return [change._replace(of_gradients=True) for change in changes]

    def _hooks(self) -> list[Any]:
        """All hooks of weights that autograd calls."""
        with DisableTorchFunctionSubclass():
            return _hooks(self._weights) + self._nodes.hooks(self._weights)

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
            if expression.is_read:
                continue
            try:
                expression.value(arguments, known)
            except Exception as error:  # which the step may catch
                differences.append(_change_of(expression, "a value", error))
                break
        return differences

    def _differences(self, numbers: Iterable[int], move: Any) -> list[Change]:
        """The changes that the guards with these `numbers` find, except replaced tensors with which the step can go
        on."""
        changes = [(self._guards[n], change) for n in numbers for change in self._guards[n].changes()]
        replaced = [(guard, change) for guard, change in changes if _is_replacement(*change)]
        if replaced and self._moved(replaced, move):
            changes = [(guard, change) for guard, change in changes if not _is_replacement(*change)]
        for n in numbers if self._watch is not None and not changes else ():
            if n < self._watched:
                self._watch.accept(n)  # they do not matter
        return [guard.change(*change) for guard, change in changes]

    def _moved(self, changes: list[tuple[Guard, tuple[Any, ...]]], move: Any) -> bool:
        """Whether the compiled step can go on with the tensors that have replaced its own."""
        new_of: dict[int, torch.Tensor] = {}
        old_of: dict[int, torch.Tensor] = {}
        count: dict[int, int] = {}
        for _, (_key, old, new) in changes:
            if new_of.setdefault(id(old), new) is not new:
                return False
            old_of[id(old)] = old
            count[id(old)] = count.get(id(old), 0) + 1
        if any(len(self._holders[i]) != n for i, n in count.items()):
            return False  # the old tensor is still held elsewhere
        now = [id(new_of[i]) if i in new_of else i for i in self._holders]
        if len(set(now)) != len(now):
            return False  # one tensor has replaced two
        if not move([(old_of[i], new) for i, new in new_of.items()]):
            return False
        moved = {i: self._holders.pop(i) for i in new_of}
        for i, holders in moved.items():
            self._holders[id(new_of[i])] = holders
            for guard, key in holders:
                guard.expected[key] = new_of[i]
        for tensors, properties, read in (
            (self._tensors, self._require, _require_gradients),
            (self._leaves, self._have, _have_gradients),
            (self._laid_out, self._layouts, _layouts),
        ):
            for n, tensor in enumerate(tensors):
                if id(tensor) in new_of:
                    tensors[n] = new_of[id(tensor)]
                    properties[n] = read(tensors[n : n + 1])[0]
        return True


def _keys(table: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(table_of(table))


def _change_of(expression: Expression, old: Any, new: Any) -> Change:
    source = next(iter(expression.sources()))
    return Change(source.description, source.name, old, new)


def _hooks(tensors: list[torch.Tensor]) -> list[Any]:
    hooks: list[Any] = []
    for tensor in _with_any(tensors, HOOK_TABLES):
        tables = (getattr(tensor, name) for name in HOOK_TABLES)
        hooks.append((id(tensor), *(tuple(table.values()) for table in tables if table)))
    return hooks


def _some_attribute(objects: list[Any], names: tuple[str, ...]) -> list[Any]:
    return [obj for obj in objects if any(getattr(obj, name) for name in names)]


_with_any = getattr(native, "with_any", _some_attribute)


# The properties of tensors, beside their contents, that a step may depend on: as code mentions them, and described.
_REQUIRE_GRADIENTS = {"requires_grad": "requires_grad"}
_HAVE_GRADIENTS = {"grad": "presence of a gradient"}
_LAYOUTS = {"shape": "shape", "dtype": "dtype", "stride": "memory layout"}


# A subclass's `__torch_function__` is not looked up, which takes longer than all else.
def _require_gradients(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    with DisableTorchFunctionSubclass():
        return [(t.requires_grad,) for t in tensors]


def _have_gradients(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    with DisableTorchFunctionSubclass():
        return [(t.grad is not None,) for t in tensors]


def _layouts(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    with DisableTorchFunctionSubclass():
        return [(t.shape, t.dtype, _layout(t)) for t in tensors]


def _changed(
    properties: dict[str, str],
    tensors: list[torch.Tensor],
    before: list[tuple[Any, ...]],
    now: list[tuple[Any, ...]],
) -> list[Change]:
    """For each tensor, the first of its properties that has changed."""
    changes = []
    for tensor, old, new in zip(tensors, before, now, strict=True):
        for (name, description), one, other in zip(properties.items(), old, new, strict=True):
            if one != other:
                of = f"the {description} of a tensor of shape {list(tensor.shape)}"
                changes.append(Change(of, name, one, other))
                break
    return changes


def _layout(tensor: torch.Tensor) -> Any:
    strided = tensor.layout is torch.strided
    return (tensor.stride(), tensor.storage_offset()) if strided else tensor.layout


def _own_class(tensor: torch.Tensor) -> type:
    """The class of a tensor as user code sees it, whatever class the backend has given it."""
    return torch.Tensor if type(tensor) is DeferredTensor else type(tensor)


def _is_replacement(key: Any, old: Any, new: Any) -> bool:
    """Whether a change is that of a tensor to another one that can replace it as an input."""
    if key is MISSING or not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    if isinstance(new, torch.nn.Parameter) or old.retains_grad or new.retains_grad or old.is_leaf != new.is_leaf:
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

    def seen(change: Callable[[], None], table: dict[Any, Any]) -> bool:
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
