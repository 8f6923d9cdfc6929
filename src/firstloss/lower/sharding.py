"""Propagation of shardings through a Program, from those of its inputs.

XLA's partitioner finds shardings within one function. If a Program is cut into segments, the shardings of arrays that
cross a cut must be given; they are found here, operation by operation: a result's dimension is sharded like the
operands' dimensions from which it comes, by the operation's jaxpr. These shardings determine communication, never
results; inside a segment XLA is free to choose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Sharding

from ..program.graph import Value
from .jaxprs import jaxpr_of
from .program import LoweredCall, Template, View
from .segments import Segment
from .sharding_rules import ShardingRule, rule_of

Axes = Mapping[str, int]  # sizes of a mesh's axes
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that shard it


class ArraySharding(NamedTuple):
    """How an array is sharded, and whether it depends on the batch.

    If a weight and an activation are sharded over the same axis (FSDP), their product is sharded like the activation,
    and the weight is gathered.
    """

    spec: Spec
    of_batch: bool = False


def propagate(
    segments: Sequence[Segment], given: Mapping[Value, ArraySharding], wanted: Mapping[Value, Spec], axes: Axes
) -> dict[Value, ArraySharding]:
    """Find a sharding for each array that is passed between `segments`, or is an output.

    Forward, from the inputs to the results; then backward, from the `wanted` outputs and the other operands of each
    reader: so a gradient, a sum over the batch, is sharded like its weight. Both are done twice. Equal segments with
    equally sharded arrays are visited once.

    Args:
        given: the shardings of inputs.
        wanted: the required shardings of outputs.
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
    """The shardings of everything that a segment's calls read and compute, given those of its inputs and outputs."""
    found = dict(known)
    for call in segment.calls:
        _forward(call, found, axes)
    for call in reversed(segment.calls):
        _back(call, found, axes)
    return {**found, **known}


def _known(found: Mapping[Value, ArraySharding], value: Value | int) -> ArraySharding:
    if isinstance(value, int):  # the index of a random draw
        return ArraySharding(())
    return found.get(value) or ArraySharding(((),) * len(value.shape))


def _propagate_through(
    segment: Segment, ins: Sequence[ArraySharding], outs: Sequence[ArraySharding], back: bool, axes: Axes
) -> tuple[ArraySharding, ...]:
    """The shardings of a segment's inputs and outputs, refined by its calls."""
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
    # Operands that depend on the batch take precedence, then larger ones.
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
    """`spec` with dimension `dim` sharded over `cut`, if it is not sharded yet, as far as that divides its size and the
    axes are not in use."""
    if spec[dim]:
        return spec
    used = {axis for other in spec for axis in other}
    fitting: tuple[str, ...] = ()
    for axis in cut:
        if axis not in used and shape[dim] and shape[dim] % math.prod(axes[a] for a in (*fitting, axis)) == 0:
            fitting += (axis,)
    return (*spec[:dim], fitting, *spec[dim + 1 :])


_rules: dict[tuple[Template | View, tuple], ShardingRule] = {}
_MOST = 8192


def read_rules(segments: Sequence[Segment], where: Sharding) -> None:
    """Read the sharding rules of the calls in `segments`, as lowered on the mesh of `where`: JAX has to trace the calls
    for this, and does not trace them again when they are lowered."""
    like = {segment.function: segment for segment in reversed(segments)}
    for segment in like.values():
        for call in segment.calls:
            rule_of_call(call, where)


def rule_of_call(call: LoweredCall, where: Sharding | None = None) -> ShardingRule:
    """The sharding rule of a call's operands and results; `where` as in `jaxprs.jaxpr_of`."""
    shapes = tuple((tuple(value.shape), value.dtype) for value in call.inputs)
    found = _rules.get((call.kind, shapes))
    if found is None:
        rule = rule_of(jaxpr_of(call, where))
        found = _rules[call.kind, shapes] = ShardingRule(rule.operands[: len(call.inputs)], rule.results)
        if len(_rules) > _MOST:
            del _rules[next(iter(_rules))]
    return found
