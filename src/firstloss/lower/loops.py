"""What differs from step to step of a loop as operands, so that its steps are equal.

A loop over time reads one part of a sequence after another, such as `x[:, t]`, or writes it; so does a recurrent layer
that PyTorch unrolls. The steps are the same but for the offset of that view, and for numbers such as the time itself.
If these are operands instead of parts of the code, the steps become one function (`segments.py`): a GRU over 100 steps
compiled for 36 seconds without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.ops import aten

from ..program.graph import Value
from ..program.nested import mapped
from .program import ArrayParameter, LoweredCall, NumberArgument, Template, View

# Calls that differ only in an offset or a number are steps of a loop if there are so many.
_MANY = 8
# Operations whose second operand may be a number or an array.
_OF_NUMBERS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
_WIDER = {torch.float32: torch.float32, torch.float64: torch.float64} | dict.fromkeys(
    (torch.bfloat16, torch.float16), torch.float32
)


def as_operands(calls: Sequence[LoweredCall]) -> list[LoweredCall]:
    """The calls, in which the offsets and numbers that differ from step to step are operands."""
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        alike[_without_parts(call)].append(i)
    changed = list(calls)
    for group in alike.values():
        if len(group) < _MANY:
            continue
        contents = zip(*([_content(part) for part in _parts(calls[i])] for i in group), strict=True)
        varies = [len(set(found)) >= _MANY for found in contents]
        for i in group if any(varies) else ():
            changed[i] = _changed(calls[i], varies)
    return changed


def _content(part: View | NumberArgument) -> Any:
    return part.offset if isinstance(part, View) else part.value


def _parts(call: LoweredCall) -> list[View | NumberArgument]:
    """The views that a call reads or writes, and the numbers that may be operands, in order."""
    found: list[View | NumberArgument] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part

    _with_parts(call, note)
    return found


def _with_parts(call: LoweredCall, change: Callable[[Any], Any]) -> Template | View:
    """The kind of `call`, with each of its parts changed. Empty views, which have no first element, are none."""
    kind = call.kind
    if not isinstance(kind, Template):
        return kind

    def view(part: View | None) -> View | None:
        return part if part is None or 0 in part.size else change(part)

    args = mapped(lambda a: a._replace(view=view(a.view)) if type(a) is ArrayParameter else a, kind.args, tuple)
    if len(args) == 2 and type(args[1]) is NumberArgument and args[1].kind is float and _number_dtype(call) is not None:
        args = (args[0], change(args[1]))
    return kind._replace(args=args, writes=tuple((number, view(part)) for number, part in kind.writes))


def _number_dtype(call: LoweredCall) -> torch.dtype | None:
    """The dtype in which a call computes with a number; None if the number has to be known."""
    kind = call.kind
    if not isinstance(kind, Template) or kind.op not in _OF_NUMBERS or type(kind.args[0]) is not ArrayParameter:
        return None
    return _WIDER.get(call.inputs[kind.args[0].number].dtype)


def _without_parts(call: LoweredCall) -> Hashable:
    def without(part: View | NumberArgument) -> Any:
        return part._replace(offset=0) if isinstance(part, View) else part._replace(value=0.0)

    return _with_parts(call, without), tuple((value.shape, value.dtype) for value in call.inputs)


def _changed(call: LoweredCall, varies: Sequence[bool]) -> LoweredCall:
    """`call` with its parts that vary in one or two more inputs, first the offsets."""
    parts = [part for part, changes in zip(_parts(call), varies, strict=True) if changes]
    offsets = [part.offset for part in parts if isinstance(part, View)]
    values = [part.value for part in parts if not isinstance(part, View)]
    of_offsets, of_values = len(call.inputs), len(call.inputs) + bool(offsets)
    rest, offset_index = iter(varies), iter(range(len(offsets)))

    def change(part: View | NumberArgument) -> Any:
        if not next(rest):
            return part
        if isinstance(part, View):
            return part._replace(offset=0, start=(of_offsets, next(offset_index)))
        return ArrayParameter(of_values, View((2,), (1,), dtype, (), (), 0, dtype))

    dtype = _number_dtype(call) or torch.float64
    kind = _with_parts(call, change)
    more = [_operand(offsets, torch.int64)] if offsets else []
    more += [_operand(values, dtype)] if values else []
    return call._replace(kind=kind, inputs=(*call.inputs, *more))


def _operand(numbers: Sequence[Any], dtype: torch.dtype) -> Value:
    """A known Value of at least two numbers: a single one would be part of the code."""
    operand = Value((len(numbers) + 1,), (1,), dtype, torch.device("cpu"))
    operand.real = torch.tensor([*numbers, 0], dtype=dtype)
    return operand
