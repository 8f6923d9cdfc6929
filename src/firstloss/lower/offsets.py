"""Offsets of views as operands, so that the steps of a loop over time are equal.

A loop reads one part of a sequence after another, such as `x[:, t]`; so does a recurrent layer that PyTorch unrolls.
Its steps are the same but for the offset of the view. If the offset is an operand instead of a part of the code, equal
steps become one function (`segments.py`): a GRU over 100 steps compiled for 36 seconds without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..program.graph import Value
from ..program.nested import mapped
from .program import ArrayParameter, LoweredCall, Template, View

# Views of one Value that differ only in their offset are read by a loop if there are so many.
_MANY = 8


def as_operands(calls: Sequence[LoweredCall]) -> list[LoweredCall]:
    """The calls, in which the offsets of views that loops read are operands."""
    offsets: defaultdict[tuple[Value, View], set[int]] = defaultdict(set)
    for call in calls:
        for parameter in _read(call):
            offsets[_without_offset(call, parameter)].add(parameter.view.offset)
    many = {view for view, found in offsets.items() if len(found) >= _MANY}
    return [_changed(call, many) if many else call for call in calls]


def _read(call: LoweredCall) -> Iterator[Any]:
    """The parameters of a call that are views, and only read."""
    if isinstance(call.kind, Template):
        found: list[ArrayParameter] = []
        mapped(lambda arg: found.append(arg) if type(arg) is ArrayParameter else None, call.kind.args, tuple)
        written = {number for number, _ in call.kind.writes}
        yield from (p for p in found if p.view is not None and 0 not in p.view.size and p.number not in written)


def _without_offset(call: LoweredCall, parameter: Any) -> tuple[Value, View]:
    return call.inputs[parameter.number], parameter.view._replace(offset=0)


def _changed(call: LoweredCall, many: set[tuple[Value, View]]) -> LoweredCall:
    """`call` with one more input: the offsets of its views that are among `many`."""
    chosen = {p for p in _read(call) if _without_offset(call, p) in many}
    if not chosen or not isinstance(call.kind, Template):
        return call
    offsets: list[int] = []

    def moved(arg: Any) -> Any:
        if type(arg) is not ArrayParameter or arg.view is None or arg not in chosen:
            return arg
        offsets.append(arg.view.offset)
        return arg._replace(view=arg.view._replace(offset=0), start=(len(call.inputs), len(offsets) - 1))

    args = mapped(moved, call.kind.args, tuple)
    # At least two numbers: a single one would be part of the code.
    operand = Value((len(offsets) + 1,), (1,), torch.int64, torch.device("cpu"))
    operand.real = torch.tensor([*offsets, 0])
    return call._replace(kind=call.kind._replace(args=args), inputs=(*call.inputs, operand))
