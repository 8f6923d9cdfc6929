"""Compare two Programs: whether they compute the same, and where they first differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..compat.torch_names import DisableTorchDispatch
from .graph import Node, Ref, Value
from .program import Program


class Parting(NamedTuple):
    """The first place where two Programs differ: `old` and `new` are its nodes, None where one has ended."""

    old: Node | None
    new: Node | None

    def __str__(self) -> str:
        if self.old is None and self.new is None:
            return "the same operations, but another result is returned or kept"
        return f"{_told(self.old)} before, {_told(self.new)} now"


def _told(node: Node | None) -> str:
    if node is None:
        return "no further operation"
    numbers = [str(a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, (bool, int, float))]
    return f"{node.op}{' with ' if numbers else ''}{', '.join(numbers)} at {node.source}"


def parting(old: Program, new: Program) -> Parting | None:
    """Where `new` first differs from `old`; None if they are the same program.

    The same: the same operations in the same order on the same values, with the same constants, from inputs of the
    same names, shapes and dtypes to outputs of the same names. Places in the source do not count.
    """
    same = _Matching()
    for (name, value), (other, counterpart) in zip(old.inputs.items(), new.inputs.items(), strict=False):
        if name != other or not same.bind(value, counterpart):
            break  # the first node that uses it tells more
    for a, b in zip(old.nodes, new.nodes, strict=False):
        if not same.nodes(a, b):
            return Parting(a, b)
    if len(old) != len(new):
        shorter = min(len(old), len(new))
        return Parting(next(iter(old.nodes[shorter:]), None), next(iter(new.nodes[shorter:]), None))
    if list(old.outputs) != list(new.outputs) or not same.all(old.outputs.values(), new.outputs.values()):
        return Parting(None, None)
    return None


# Python turns `real > traced` round, to `traced < real`, and leaves it when the real tensor lives on the backend, too.
_TURNED = {torch.ops.aten.gt.Tensor: torch.ops.aten.lt.Tensor, torch.ops.aten.ge.Tensor: torch.ops.aten.le.Tensor}


def _form(node: Node) -> tuple[Any, tuple]:
    """A node's operation and arguments, comparisons from the smaller to the larger."""
    turned = _TURNED.get(node.op)
    return (node.op, node.args) if turned is None else (turned, node.args[::-1])


class _Matching:
    """Which Value of one Program is which of the other."""

    def __init__(self) -> None:
        self._known: dict[Value, Value] = {}

    def bind(self, a: Value, b: Value) -> bool:
        if (a.shape, a.stride, a.dtype) != (b.shape, b.stride, b.dtype):
            return False
        self._known[a] = b
        return True

    def nodes(self, a: Node, b: Node) -> bool:
        (op, args), (other, counterparts) = _form(a), _form(b)
        if op is not other or len(a.outputs) != len(b.outputs) or list(a.kwargs) != list(b.kwargs):
            return False
        if a.overwrites != b.overwrites:
            return False
        if a.overwrites and a.writes[0].value not in self._known:  # its old content is not read: only its form counts
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
        if type(a) is not type(b):
            return False
        if type(a) is Ref:
            return a[1:] == b[1:] and self.values(a.value, b.value)
        if type(a) in (list, tuple):
            return self.all(a, b)
        return bool(a == b) or (a != a and b != b)  # nan is the same as nan

    def values(self, a: Value, b: Value) -> bool:
        known = self._known.get(a)
        if known is not None:
            return known is b
        if (a.node is None) != (b.node is None) or (a.real is None) != (b.real is None) or not self.bind(a, b):
            return False
        if a.real is None or b.real is None:
            return a.node is None  # memory that was never written
        return a.real is b.real or same_bytes(a.real, b.real)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    with DisableTorchDispatch():
        return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
