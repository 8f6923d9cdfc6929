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
from typing import Any, NamedTuple

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
    segments: Sequence[Segment], inputs: Mapping[Value, ArraySharding], outputs: Mapping[Value, Spec], axes: Axes
) -> dict[Value, ArraySharding]:
    """Find a sharding for each array that is passed between `segments`, or is an output.

    Forward, from the inputs to the results; then backward, from the required outputs and the other operands of each
    reader: so a gradient, a sum over the batch, is sharded like its weight. Both are done twice. Equal segments with
    equally sharded arrays are visited once.

    Args:
        inputs: the shardings of inputs.
        outputs: the required shardings of outputs.
    """
    like = {segment.function: segment for segment in reversed(segments)}
    propagated = functools.cache(
        lambda number, ins, outs, backward: _propagate_through(like[number], ins, outs, backward, axes)
    )
    shardings: dict[Value, ArraySharding] = {
        **inputs,
        **{value: ArraySharding(spec) for value, spec in outputs.items()},
    }
    for backward in (False, True, False, True):
        for segment in reversed(segments) if backward else segments:
            ins = tuple(_sharding_of(shardings, value) for value in segment.inputs)
            outs = tuple(_sharding_of(shardings, value) for value in segment.outputs)
            crossing = (*segment.inputs, *segment.outputs)
            for value, sharding in zip(crossing, propagated(segment.function, ins, outs, backward), strict=True):
                if isinstance(value, Value) and value not in inputs:
                    shardings[value] = (
                        ArraySharding(outputs[value], sharding.of_batch) if value in outputs else sharding
                    )
    return shardings


def within(segment: Segment, boundary: Mapping[Value, ArraySharding], axes: Axes) -> dict[Value, ArraySharding]:
    """The shardings of everything that a segment's calls read and compute, given those of its inputs and outputs."""
    shardings = dict(boundary)
    for call in segment.calls:
        _forward(call, shardings, axes)
    for call in reversed(segment.calls):
        _back(call, shardings, axes)
    return {**shardings, **boundary}


def _sharding_of(shardings: Mapping[Value, ArraySharding], value: Value | int) -> ArraySharding:
    if isinstance(value, int):  # the index of a random draw
        return ArraySharding(())
    return shardings.get(value) or ArraySharding(((),) * len(value.shape))


def _propagate_through(
    segment: Segment, ins: Sequence[ArraySharding], outs: Sequence[ArraySharding], backward: bool, axes: Axes
) -> tuple[ArraySharding, ...]:
    """The shardings of a segment's inputs and outputs, refined by its calls."""
    crossing = (*segment.inputs, *segment.outputs)
    shardings = {v: sharding for v, sharding in zip(crossing, (*ins, *outs), strict=True) if isinstance(v, Value)}
    for call in segment.calls:
        _forward(call, shardings, axes)
    for call in reversed(segment.calls) if backward else ():
        _back(call, shardings, axes)
    return tuple(_sharding_of(shardings, value) for value in crossing)


def _forward(call: LoweredCall, shardings: dict[Value, ArraySharding], axes: Axes) -> None:
    operands = [_sharding_of(shardings, value) for value in call.inputs]
    rule = rule_of_call(call)
    # Operands that depend on the batch take precedence, then larger ones.
    order = sorted(range(len(operands)), key=lambda i: (not operands[i].of_batch, -call.inputs[i].numel))
    requests = [(n, cut) for i in order for n, cut in zip(rule.operands[i], operands[i].spec, strict=True) if cut]
    of_batch = any(operand.of_batch for operand in operands)
    for value, dims in zip(call.outputs, rule.results, strict=True):
        spec = _sharding_of(shardings, value).spec
        for number, cut in requests:
            if number in dims:
                spec = _cut(spec, dims.index(number), cut, value.shape, axes)
        shardings[value] = ArraySharding(spec, of_batch)


def _back(call: LoweredCall, shardings: dict[Value, ArraySharding], axes: Axes) -> None:
    rule = rule_of_call(call)
    by_factor: dict[int, tuple[str, ...]] = {}
    arrays = (*zip(call.outputs, rule.results, strict=True), *zip(call.inputs, rule.operands, strict=True))
    for value, dims in arrays:
        for number, cut in zip(dims, _sharding_of(shardings, value).spec, strict=True):
            if cut:
                by_factor.setdefault(number, cut)
    for value, dims in zip(call.inputs, rule.operands, strict=True):
        sharding = _sharding_of(shardings, value)
        spec = sharding.spec
        for dim, number in enumerate(dims):
            if number in by_factor:
                spec = _cut(spec, dim, by_factor[number], value.shape, axes)
        shardings[value] = sharding._replace(spec=spec)


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


_rules: dict[tuple[Template | View, tuple[Any, ...]], ShardingRule] = {}
_MOST = 8192


def read_rules(segments: Sequence[Segment], sharding: Sharding) -> None:
    """Read the sharding rules of the calls in `segments`, as lowered on the mesh of `sharding`: JAX has to trace the
    calls for this, and does not trace them again when they are lowered."""
    like = {segment.function: segment for segment in reversed(segments)}
    for segment in like.values():
        for call in segment.calls:
            rule_of_call(call, sharding)


def rule_of_call(call: LoweredCall, sharding: Sharding | None = None) -> ShardingRule:
    """The sharding rule of a call's operands and results; `sharding` as in `jaxprs.jaxpr_of`."""
    shapes = tuple((tuple(value.shape), value.dtype) for value in call.inputs)
    call_rule = _rules.get((call.kind, shapes))
    if call_rule is None:
        rule = rule_of(jaxpr_of(call, sharding))
        call_rule = _rules[call.kind, shapes] = ShardingRule(rule.operands[: len(call.inputs)], rule.results)
        if len(_rules) > _MOST:
            del _rules[next(iter(_rules))]
    return call_rule
