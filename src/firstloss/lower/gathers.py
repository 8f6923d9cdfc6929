"""The all-gathers of a segment's weights, to be combined.

If a weight and the batch are sharded over the same mesh axes (FSDP), their product needs the whole weight. XLA's
partitioner gathers each weight separately, where it is used; on virtual CPU devices, which synchronize for each
collective, this synchronization dominates a step. The weights are found here, from the shardings and the operations'
sharding rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..program.graph import Value
from .program import LoweredCall
from .segments import Segment
from .sharding import ArraySharding, Axes, Spec, rule_of_call, within


class Gather(NamedTuple):
    """An array that is gathered.

    Attributes:
        spec: its sharding.
        dim: the dimension that is no longer sharded afterwards.
    """

    value: Value
    spec: Spec
    dim: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which it is gathered."""
        return self.spec[self.dim]


class Gathers(NamedTuple):
    """The gathers of a segment.

    Attributes:
        before: the calls that depend neither on the batch nor on random numbers, in order, which can run first.
            Gathered arrays are inputs or results of these.
        gathers: in the order of use.
        after: the other calls, each with those of its operands that must be gathered.
    """

    before: tuple[LoweredCall, ...]
    gathers: tuple[Gather, ...]
    after: tuple[tuple[LoweredCall, frozenset[Value]], ...]


def gathers_of(segment: Segment, boundary: Mapping[Value, ArraySharding], axes: Axes) -> Gathers:
    """The gathers of a segment, given the shardings of its inputs and outputs."""
    placed = within(segment, boundary, axes)
    before: list[LoweredCall] = []
    after: list[tuple[LoweredCall, frozenset[Value]]] = []
    later: set[Value] = {value for value in segment.inputs if isinstance(value, Value) and placed[value].of_batch}
    gathers: dict[Value, Gather] = {}
    for call in segment.calls:
        if call.draw is None and later.isdisjoint(call.inputs):
            before.append(call)
            continue
        later.update(call.outputs)
        # Arrays that are also gathered along other dimensions are left to XLA.
        of_call = [gather for gather in _of_call(call, placed) if gather.value not in later]
        of_call = [gather for gather in of_call if gathers.setdefault(gather.value, gather) == gather]
        after.append((call, frozenset(gather.value for gather in of_call)))
    return Gathers(tuple(before), tuple(gathers.values()), tuple(after))


def _of_call(call: LoweredCall, placed: Mapping[Value, ArraySharding]) -> list[Gather]:
    """The operands that do not depend on the batch, and whose sharded dimension is shared with a batch operand that
    uses the same axes for another dimension: the weights of products, but not a lookup table."""
    rule = rule_of_call(call)
    operands = [(v, dims, placed[v]) for v, dims in zip(call.inputs, rule.operands, strict=True) if v in placed]
    batch = [(dims, sharding) for _, dims, sharding in operands if sharding.of_batch]
    cut_by: dict[str, set[int]] = {}  # for each axis, the factors of the batch's dimensions that it shards
    for dims, sharding in batch:
        for factor, cut in zip(dims, sharding.spec, strict=True):
            for axis in cut:
                cut_by.setdefault(axis, set()).add(factor)
    arrays = [set(dims) for dims in (*(dims for dims, _ in batch), *rule.results)]

    def differs(factor: int, axis: str) -> bool:
        others = cut_by.get(axis, set()) - {factor}
        return any(factor in factors and not others.isdisjoint(factors) for factors in arrays)

    return [
        Gather(value, sharding.spec, dim)
        for value, dims, sharding in operands
        if not sharding.of_batch
        for dim, (factor, cut) in enumerate(zip(dims, sharding.spec, strict=True))
        if cut and all(differs(factor, axis) for axis in cut)
    ]
