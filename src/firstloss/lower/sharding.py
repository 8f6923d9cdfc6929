"""Propagate shardings through a Program, from those of its inputs.

XLA's partitioner finds shardings for all of a function at once. Where a Program is cut into segments, those of the
arrays that cross a cut have to be said before; they are found here, operation by operation: a result's dimension is
sharded as the operands' dimensions from which it comes. Which these are is read from the operation's jaxpr. What is
found decides what is sent between devices, never what is computed: inside a segment XLA does as it likes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Sharding

from ..program.graph import Value
from .jaxprs import jaxpr_on
from .program import LoweredCall, Template, View
from .segments import Segment
from .sharding_rules import ShardingRule, rule_of

Axes = Mapping[str, int]  # sizes of a mesh's axes
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that cut it


class ArraySharding(NamedTuple):
    """How an array is sharded, and whether the batch is among what it is computed from.

    Where a weight and an activation are both cut over one axis (FSDP), their product is sharded as the activation is,
    and the weight is gathered.
    """

    spec: Spec
    of_batch: bool = False


def propagate(
    segments: Sequence[Segment], given: Mapping[Value, ArraySharding], wanted: Mapping[Value, Spec], axes: Axes
) -> dict[Value, ArraySharding]:
    """How to cut each array that crosses from one of `segments` to another, or leaves them.

    Forward, from the inputs to what is computed of them; then back from what is `wanted` and from the other operands
    of those that read it: so a gradient, a sum over the batch, is sharded as its weight is. All of it twice. Segments
    that are alike and whose arrays are sharded alike are looked at once.

    Args:
        given: the inputs.
        wanted: what the results are to be; they will be.
    """
    like = {segment.function: segment for segment in reversed(segments)}
    look = functools.cache(lambda number, ins, outs, back: _propagate_through(like[number], ins, outs, back, axes))
    found: dict[Value, ArraySharding] = {**given, **{value: ArraySharding(spec) for value, spec in wanted.items()}}
    for back in (False, True, False, True):
        for segment in reversed(segments) if back else segments:
            ins = tuple(_known(found, value) for value in segment.inputs)
            outs = tuple(_known(found, value) for value in segment.outputs)
            crossing = (*segment.inputs, *segment.outputs)
            for value, placed in zip(crossing, look(segment.function, ins, outs, back), strict=True):
                if isinstance(value, Value) and value not in given:
                    found[value] = ArraySharding(wanted[value], placed.of_batch) if value in wanted else placed
    return found


def within(segment: Segment, known: Mapping[Value, ArraySharding], axes: Axes) -> dict[Value, ArraySharding]:
    """The shardings of all that a segment's calls read and make, given those of its inputs and outputs."""
    found = dict(known)
    for call in segment.calls:
        _forward(call, found, axes)
    for call in reversed(segment.calls):
        _back(call, found, axes)
    return {**found, **known}


def _known(found: Mapping[Value, ArraySharding], value: Value | int) -> ArraySharding:
    if isinstance(value, int):  # the number of a draw
        return ArraySharding(())
    return found.get(value) or ArraySharding(((),) * len(value.shape))


def _propagate_through(
    segment: Segment, ins: Sequence[ArraySharding], outs: Sequence[ArraySharding], back: bool, axes: Axes
) -> tuple[ArraySharding, ...]:
    """The shardings of a segment's inputs and outputs: cut further than now, if what is inside says so."""
    crossing = (*segment.inputs, *segment.outputs)
    found = {v: placed for v, placed in zip(crossing, (*ins, *outs), strict=True) if isinstance(v, Value)}
    for call in segment.calls:
        _forward(call, found, axes)
    for call in reversed(segment.calls) if back else ():
        _back(call, found, axes)
    return tuple(_known(found, value) for value in crossing)


def _forward(call: LoweredCall, found: dict[Value, ArraySharding], axes: Axes) -> None:
    operands = [_known(found, value) for value in call.inputs]
    rule = rule_of_call(call)
    # What is of the batch is asked first, then what is larger.
    order = sorted(range(len(operands)), key=lambda i: (not operands[i].of_batch, -call.inputs[i].numel))
    asked = [(n, cut) for i in order for n, cut in zip(rule.operands[i], operands[i].spec, strict=True) if cut]
    of_batch = any(operand.of_batch for operand in operands)
    for value, dims in zip(call.outputs, rule.results, strict=True):
        spec = _known(found, value).spec
        for number, cut in asked:
            if number in dims:
                spec = _cut(spec, dims.index(number), cut, value.shape, axes)
        found[value] = ArraySharding(spec, of_batch)


def _back(call: LoweredCall, found: dict[Value, ArraySharding], axes: Axes) -> None:
    rule = rule_of_call(call)
    asked: dict[int, tuple[str, ...]] = {}
    known = (*zip(call.outputs, rule.results, strict=True), *zip(call.inputs, rule.operands, strict=True))
    for value, dims in known:
        for number, cut in zip(dims, _known(found, value).spec, strict=True):
            if cut:
                asked.setdefault(number, cut)
    for value, dims in zip(call.inputs, rule.operands, strict=True):
        placed = _known(found, value)
        spec = placed.spec
        for dim, number in enumerate(dims):
            if number in asked:
                spec = _cut(spec, dim, asked[number], value.shape, axes)
        found[value] = placed._replace(spec=spec)


def _cut(spec: Spec, dim: int, cut: tuple[str, ...], shape: Sequence[int], axes: Axes) -> Spec:
    """`spec` with dimension `dim` cut over `cut`, if nothing cuts it yet, as far as that divides it and nothing else is
    cut over the same axes."""
    if spec[dim]:
        return spec
    used = {axis for other in spec for axis in other}
    left: tuple[str, ...] = ()
    for axis in cut:
        if axis not in used and shape[dim] and shape[dim] % math.prod(axes[a] for a in (*left, axis)) == 0:
            left += (axis,)
    return (*spec[:dim], left, *spec[dim + 1 :])


_rules: dict[tuple[Template | View, tuple], ShardingRule] = {}
_MOST = 8192


def read_rules(segments: Sequence[Segment], where: Sharding) -> None:
    """Read the sharding rules of what `segments` call, as it will be lowered on the mesh of `where`: to find these JAX
    has to trace the calls, and does not again when they are lowered."""
    like = {segment.function: segment for segment in reversed(segments)}
    for segment in like.values():
        for call in segment.calls:
            rule_of_call(call, where)


def rule_of_call(call: LoweredCall, where: Sharding | None = None) -> ShardingRule:
    """The sharding rule of a call's operands and results; `where` as in `jaxprs.jaxpr_on`."""
    shapes = tuple((tuple(value.shape), value.dtype) for value in call.inputs)
    found = _rules.get((call.kind, shapes))
    if found is None:
        rule = rule_of(jaxpr_on(call, where))
        found = _rules[call.kind, shapes] = ShardingRule(rule.operands[: len(call.inputs)], rule.results)
        if len(_rules) > _MOST:
            del _rules[next(iter(_rules))]
    return found
