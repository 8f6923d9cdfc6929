"""Offsets of views as operands, so that the steps of a loop over time are equal.

A loop reads one part of a sequence after another, such as `x[:, t]`, or writes it; so does a recurrent layer that
PyTorch unrolls. Its steps are the same but for the offset of the view. If the offset is an operand instead of a part of
the code, equal steps become one function (`segments.py`): a GRU over 100 steps compiled for 36 seconds without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..program.graph import Value
from ..program.nested import mapped
from .program import ArrayParameter, LoweredCall, Template, View

# Calls that differ only in an offset are steps of a loop if there are so many.
_MANY = 8


def as_operands(calls: Sequence[LoweredCall]) -> list[LoweredCall]:
    """The calls, in which the offsets that differ from step to step are operands."""
    offsets: defaultdict[Hashable, list[set[int]]] = defaultdict(list)
    for call in calls:
        found = _views(call.kind)
        sets = offsets[_without_offsets(call)]
        sets.extend(set() for _ in range(len(found) - len(sets)))
        for seen, view in zip(sets, found, strict=True):
            seen.add(view.offset)
    return [_changed(call, [len(seen) >= _MANY for seen in offsets[_without_offsets(call)]]) for call in calls]


def _views(kind: Template | View) -> list[View]:
    """The views that a call reads or writes, in order."""
    found: list[View] = []

    def note(view: View) -> View:
        found.append(view)
        return view

    if isinstance(kind, Template):
        _with_views(kind, note)
    return found


def _with_views(kind: Template, change: Callable[[View], View]) -> Template:
    """`kind` with each of its views changed. Empty ones, which have no first element, are left out."""

    def in_argument(arg: Any) -> Any:
        return arg._replace(view=one(arg.view)) if type(arg) is ArrayParameter else arg

    def one(view: View | None) -> View | None:
        return view if view is None or 0 in view.size else change(view)

    args = mapped(in_argument, kind.args, tuple)
    return kind._replace(args=args, writes=tuple((number, one(view)) for number, view in kind.writes))


def _without_offsets(call: LoweredCall) -> Hashable:
    if not isinstance(call.kind, Template):
        return call.kind
    return _with_views(call.kind, lambda view: view._replace(offset=0)), len(call.inputs)


def _changed(call: LoweredCall, varies: Sequence[bool]) -> LoweredCall:
    """`call` with one more input: the offsets of its views that vary."""
    if not any(varies) or not isinstance(call.kind, Template):
        return call
    offsets: list[int] = []
    rest = iter(varies)

    def change(view: View) -> View:
        if not next(rest):
            return view
        offsets.append(view.offset)
        return view._replace(offset=0, start=(len(call.inputs), len(offsets) - 1))

    kind = _with_views(call.kind, change)
    # At least two numbers: a single one would be part of the code.
    operand = Value((len(offsets) + 1,), (1,), torch.int64, torch.device("cpu"))
    operand.real = torch.tensor([*offsets, 0])
    return call._replace(kind=kind, inputs=(*call.inputs, operand))
