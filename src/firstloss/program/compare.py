"""Compare two Programs: whether they are equivalent, and where they first differ."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..compat.torch_names import DisableTorchDispatch
from .graph import Node, Ref, Value
from .nested import mapped
from .program import Program
from .source import Source


class Constant(NamedTuple):
    """A number that is an argument of an operation, at a line of the user's code."""

    op: Any
    source: Source
    position: int | str  # or its name


class Difference(NamedTuple):
    """The first difference between two Programs: the node of each, or None if it has no further node."""

    old: Node | None
    new: Node | None

    def __str__(self) -> str:
        if self.old is None and self.new is None:
            return "the same operations, but on other inputs, or with other results returned or kept"
        return f"{_describe(self.old)} before, {_describe(self.new)} now"


def _describe(node: Node | None) -> str:
    if node is None:
        return "no further operation"
    numbers = [str(a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, (bool, int, float))]
    return f"{node.op}{' with ' if numbers else ''}{', '.join(numbers)} at {node.source}"


def first_difference(
    old: Program,
    new: Program,
    numbers: Mapping[Value, Any] | None = None,
    constants: Mapping[Value, Any] | None = None,
) -> Difference | None:
    """The first difference between two Programs; None if they are equivalent.

    Equivalent Programs have the same operations in the same order on the same values, the same constants, inputs of the
    same shapes and dtypes in the same order, and outputs of the same names. Source lines are ignored.

    Args:
        numbers: inputs of `new` that are numbers or NumPy arrays, with their values (None: any). In `old`, numbers may
            be constants, and so may what `new` computes from them alone. The order of inputs is not compared then.
        constants: inputs of `old` that are constants, with their values; with `numbers` only.
    """
    return _difference(old, new, _Correspondence(numbers or {}, constants or {}))


def _difference(old: Program, new: Program, match: _Correspondence) -> Difference | None:
    rest = iter(old.nodes)
    a = next(rest, None)
    for b in new.nodes:
        if a is not None and match.nodes(a, b):
            a = next(rest, None)
        elif not match.fold(b):
            return Difference(a, b)
    if a is not None:
        return Difference(a, None)
    if list(old.outputs) != list(new.outputs) or not match.all(old.outputs.values(), new.outputs.values()):
        return Difference(None, None)
    # Last, since the first node that uses another input is more helpful to report.
    if not match.numbers and not match.same_order(old.inputs.values(), new.inputs.values()):
        return Difference(None, None)
    return None


def changed_constants(old: Program, new: Program) -> set[Constant]:
    """The numbers that are others in `new`; none if the Programs differ in anything else."""
    match = _UpToConstants()
    return match.changed if _difference(old, new, match) is None else set()


# Python reflects `real > traced` to `traced < real`, but not if the real tensor has moved to the backend.
_REFLECTED = {torch.ops.aten.gt.Tensor: torch.ops.aten.lt.Tensor, torch.ops.aten.ge.Tensor: torch.ops.aten.le.Tensor}


def _canonical(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """A node's operation and arguments, with `>` and `>=` reflected."""
    reflected = _REFLECTED.get(node.op)
    return (node.op, node.args) if reflected is None else (reflected, node.args[::-1])


_UNKNOWN = torch.empty(0)


def _filled(argument: Any, known: Mapping[Value, Any]) -> Any:
    """An argument with tensors in place of Refs."""
    return mapped(lambda part: part.view(known[part.value]) if type(part) is Ref else part, argument)


class _Correspondence:
    """The correspondence between the Values of two Programs; its methods return whether the arguments match."""

    def __init__(self, numbers: Mapping[Value, Any], constants: Mapping[Value, Any]) -> None:
        """`numbers`, `constants`: see `first_difference`."""
        self._constants = constants
        self._counterparts: dict[Value, Value] = {}
        self.numbers = numbers
        # What may be constants in the first Program: numbers, and what is computed from them alone.
        self._known: dict[Value, torch.Tensor] = {}
        with DisableTorchDispatch():
            for value, number in numbers.items():
                self._known[value] = _UNKNOWN if number is None else torch.as_tensor(number, dtype=value.dtype)

    def fold(self, node: Node) -> bool:
        """Take what a node of the second Program computes for constants of the first; returns whether they may be."""
        values = [ref.value for ref in node.refs()]
        if node.draw is not None or node.writes or self._known.keys().isdisjoint(values):
            return False
        known = {value: self._known.get(value, value.real) for value in values}
        if any(content is None for content in known.values()):
            return False
        if any(content is _UNKNOWN for content in known.values()):
            self._known |= dict.fromkeys(node.outputs, _UNKNOWN)
            return True
        with DisableTorchDispatch(), torch.no_grad():
            options = {name: _filled(option, known) for name, option in node.kwargs.items()}
            results = node.op(*_filled(node.args, known), **options)
        outputs = results if isinstance(results, (list, tuple)) else (results,)
        self._known |= zip(node.outputs, outputs, strict=True)
        return True

    def bind(self, a: Value, b: Value) -> bool:
        if (a.shape, a.stride, a.dtype) != (b.shape, b.stride, b.dtype):
            return False
        self._counterparts[a] = b
        return True

    def same_order(self, a: Iterable[Value], b: Iterable[Value]) -> bool:
        """Whether inputs that are used are at the same positions."""
        positions, others = ({value: i for i, value in enumerate(inputs)} for inputs in (a, b))
        return all(positions.get(value) == others.get(other) for value, other in self._counterparts.items())

    def nodes(self, a: Node, b: Node) -> bool:
        (op, args), (other, counterparts) = _canonical(a), _canonical(b)
        if op is not other or len(a.outputs) != len(b.outputs) or list(a.kwargs) != list(b.kwargs):
            return False
        if a.overwrites != b.overwrites:
            return False
        if a.overwrites and a.writes[0].value not in self._counterparts:  # the old content is not read
            self.bind(a.writes[0].value, b.writes[0].value)
        if (a.draw is None) != (b.draw is None):
            return False
        if a.draw is not None and b.draw is not None and a.draw.position != b.draw.position:
            return False
        if not self.all(args, counterparts) or not self.all(a.kwargs.values(), b.kwargs.values()):
            return False
        return self.all(a.writes, b.writes) and all(map(self.bind, a.outputs, b.outputs))

    def all(self, a: Iterable[Any], b: Iterable[Any]) -> bool:
        a, b = list(a), list(b)
        return len(a) == len(b) and all(map(self.one, a, b))

    def one(self, a: Any, b: Any) -> bool:
        if type(a) is Ref and a.value in self._constants:
            a = self._constants[a.value]
        if type(b) is Ref and b.value in self._known and (type(a) is not Ref or a.value.real is not None):
            return self.constants(a, b)
        if type(a) is not type(b):
            return False
        if type(a) is Ref:
            return a[1:] == b[1:] and self.values(a.value, b.value)
        if type(a) in (list, tuple):
            return self.all(a, b)
        return bool(a == b) or (a != a and b != b)  # or both are NaN

    def constants(self, a: Any, b: Ref) -> bool:
        """Whether the constant `a`, a number or a Ref, is what is known of `b`."""
        content = self._known[b.value]
        if type(a) is not Ref and not isinstance(a, (int, float)):
            return False
        if content is _UNKNOWN:
            return True
        with DisableTorchDispatch():
            if type(a) is Ref:
                assert a.value.real is not None
                return a[1:] == b[1:] and same_bytes(a.view(a.value.real), b.view(content))
            if b.value not in self.numbers:  # computed, in the dtype in which the operation takes the number
                a, number = torch.as_tensor(a, dtype=content.dtype).item(), content.item()
            else:
                number = self.numbers[b.value]
        return bool(a == number or a != a and number != number)

    def values(self, a: Value, b: Value) -> bool:
        counterpart = self._counterparts.get(a)
        if counterpart is not None:
            return counterpart is b
        if (a.node is None) != (b.node is None) or not self.bind(a, b):
            return False
        if (a.real is None) != (b.real is None) and b not in self.numbers:
            return False
        if a.real is None or b.real is None:
            return a.node is None  # uninitialized memory
        return a.real is b.real or same_bytes(a.real, b.real)


def _arguments(node: Node) -> dict[int | str, Any]:
    """A node's arguments, by position or by name."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    return dict(arguments)


class _UpToConstants(_Correspondence):
    """A correspondence in which numbers may differ that are themselves arguments of operations.

    Attributes:
        changed: those that do.
    """

    changed: set[Constant]

    def __init__(self) -> None:
        super().__init__({}, {})
        self.changed = set()

    def nodes(self, a: Node, b: Node) -> bool:
        if a.op is b.op and len(a.args) == len(b.args) and list(a.kwargs) == list(b.kwargs):
            before, now = _arguments(a), _arguments(b)
            changed = [at for at, number in now.items() if self._is_another(before[at], number)]
            if changed:
                self.changed |= {Constant(b.op, b.source, at) for at in changed}
                a = copy.copy(a)
                a.args = tuple(now[at] if at in changed else arg for at, arg in enumerate(a.args))
                a.kwargs = {name: now[name] if name in changed else arg for name, arg in a.kwargs.items()}
        return super().nodes(a, b)

    @staticmethod
    def _is_another(before: Any, now: Any) -> bool:
        """Whether an argument is another number of the same type now."""
        return type(now) in (int, float) and type(before) is type(now) and before != now


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same shape and dtype hold the same bytes."""
    with DisableTorchDispatch():
        return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
