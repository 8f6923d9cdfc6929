"""What a segment gathers of its weights, to be gathered together.

Where a weight and the batch are cut over the same axes of the mesh (FSDP), their product takes a whole weight. XLA's
partitioner gathers each by itself, where it is used; on virtual devices of a CPU, which meet for each collective, it is
these meetings that a step's time goes to. Which weights they are is found here, from the shardings and the operations'
sharding rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..program.graph import Value
from .program import Call
from .segments import Segment
from .sharding import Axes, Placed, Spec, rule_of_call, within


class Gather(NamedTuple):
    """An array that is gathered.

    Attributes:
        spec: how it is cut.
        dim: the dimension that is whole afterwards.
    """

    value: Value
    spec: Spec
    dim: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which it is gathered."""
        return self.spec[self.dim]


class Gathers(NamedTuple):
    """What a segment gathers.

    Attributes:
        before: its calls that nothing of the batch and no random number goes into, in their order: they can be run
            first. What is gathered is an input or made by these.
        gathers: in the order of use.
        after: the other calls, each with those of its operands that are to be the gathered ones.
    """

    before: tuple[Call, ...]
    gathers: tuple[Gather, ...]
    after: tuple[tuple[Call, frozenset[Value]], ...]


def gathers_of(segment: Segment, known: Mapping[Value, Placed], axes: Axes) -> Gathers:
    """What a segment gathers, given the shardings of its inputs and outputs."""
    placed = within(segment, known, axes)
    before: list[Call] = []
    after: list[tuple[Call, frozenset[Value]]] = []
    later: set[Value] = {value for value in segment.inputs if isinstance(value, Value) and placed[value].of_batch}
    found: dict[Value, Gather] = {}
    for call in segment.calls:
        if call.draw is None and later.isdisjoint(call.inputs):
            before.append(call)
            continue
        later.update(call.outputs)
        # Whoever wants it whole along another dimension, or more of them, is left to XLA.
        own = [gather for gather in _of_call(call, placed) if gather.value not in later]
        own = [gather for gather in own if found.setdefault(gather.value, gather) == gather]
        after.append((call, frozenset(gather.value for gather in own)))
    return Gathers(tuple(before), tuple(found.values()), tuple(after))


def _of_call(call: Call, placed: Mapping[Value, Placed]) -> list[Gather]:
    """The operands that are not of the batch, and are cut over axes that cut another dimension of what is of the batch
    and has this dimension, too: the weights of products, but not a table that is looked up."""
    rule = rule_of_call(call)
    operands = [(v, dims, placed[v]) for v, dims in zip(call.inputs, rule.operands, strict=True) if v in placed]
    batch = [(dims, where) for _, dims, where in operands if where.of_batch]
    cut_by: dict[str, set[int]] = {}  # by axis, the factors of the batch's dimensions that it cuts
    for dims, where in batch:
        for factor, cut in zip(dims, where.spec, strict=True):
            for axis in cut:
                cut_by.setdefault(axis, set()).add(factor)
    arrays = [set(dims) for dims in (*(dims for dims, _ in batch), *rule.results)]

    def differs(factor: int, axis: str) -> bool:
        others = cut_by.get(axis, set()) - {factor}
        return any(factor in factors and not others.isdisjoint(factors) for factors in arrays)

    return [
        Gather(value, where.spec, dim)
        for value, dims, where in operands
        if not where.of_batch
        for dim, (factor, cut) in enumerate(zip(dims, where.spec, strict=True))
        if cut and all(differs(factor, axis) for axis in cut)
    ]
