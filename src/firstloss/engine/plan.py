"""Plans: how to compute any range of a Value's elements without computing the rest.

Most recipes are a random fill followed by a few edits. Such a recipe can be run on any range of its elements, drawing
only their words, at their stream positions. A plan is the list of its steps. Recipes without a plan (because an element
of some operation's result depends on other elements, or on its SIMD lane) are run whole, node by node (`replay.py`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..program.graph import Node, Ref, Value, dense_count, dtype_name, is_contiguous
from ..program.node_kinds import Copy, Fill, Pointwise, is_unwritten, kind_of
from ..rng import words_drawn

_MAX_STEPS = 64  # recipes with more are made whole
_MAX_DEPTH = 8
_MIN_ROW = 1 << 10  # elements that are consecutive in a tensor that is joined with others


class RangeStep(NamedTuple):
    """One operation of a plan.

    Attributes:
        edits: in-place operations with scalars that follow on the same elements, applied piece by piece.
        partial: whether it can be run on a range of the storage.
    """

    kind: Fill | Copy | Pointwise
    node: Node
    edits: tuple[Pointwise, ...]
    partial: bool


class RangePlan(NamedTuple):
    """`steps`, applied in order to `base`: a Value that is known or made whole, or None if they overwrite all of it."""

    base: Value | None
    steps: tuple[RangeStep, ...]


class RangePlanner:
    """Makes and caches plans. Thread-safe."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Value, bool], RangePlan] = {}
        self._runnable: dict[tuple[Value, bool], bool] = {}

    def plan(self, value: Value, partial: bool) -> RangePlan:
        """The plan for a part of `value`, or for all of it."""
        plan = self._plans.get((value, partial))
        if plan is None and partial:
            plan = self.plan(value, False)
            if not all(step.partial for step in plan.steps):
                plan = _find(value, True, _MAX_DEPTH)
            self._plans[value, True] = plan
        elif plan is None:
            plan = self._plans[value, False] = _find(value, False, _MAX_DEPTH)
        return plan

    def can_run(self, value: Value, partial: bool) -> bool:
        """Whether there is a plan for a part of `value`, or for all of it; otherwise it is made node by node."""
        runnable = self._runnable.get((value, partial))
        if runnable is None:
            runnable = is_dense(value) and _can_run(self.plan(value, partial), value)
            self._runnable[value, partial] = runnable
        return runnable

    def first_draw(self, value: Value) -> int:
        """The index of the first node of the recipe that draws: a proxy for its order in the stream."""
        for _ in range(_MAX_DEPTH):
            if value.known or not self.can_run(value, False):
                break
            steps = self.plan(value, False).steps
            draw = next((step.node for step in steps if step.node.draw is not None), None)
            if draw is not None:
                return draw.index
            copied = [step.kind.sources[0] for step in steps if isinstance(step.kind, Copy)]
            if not copied:
                break
            value = copied[0].value
        return value.node.index if value.node is not None else 0


def is_dense(value: Value) -> bool:
    """Whether the layout of `value` has no gaps."""
    return dense_count(value.shape, value.stride) == value.numel


def is_empty(value: Value) -> bool:
    """Whether `value` is uninitialized memory."""
    return not value.known and is_unwritten(value.node)


def _can_run(plan: RangePlan, value: Value) -> bool:
    """Whether the plan does not itself need `value` made whole."""
    return plan.base is not value or value.known or is_empty(value)


def _find(value: Value, partial: bool, depth: int) -> RangePlan:
    steps: list[RangeStep] = []
    overwritten: list[tuple[int, int]] = []  # ranges, such as those of the second fill of a padded shard
    current = value
    base: Value | None = None
    while True:
        node = current.node
        if current.known or node is None or is_unwritten(node):
            base = current
            break
        if _is_within(node, overwritten):
            current = node.writes[0].value
            continue
        step = _step(current, node, depth)
        if step is None or (partial and not step.partial) or len(steps) == _MAX_STEPS:
            base = current
            break
        steps.append(step)
        if not step.node.writes or step.node.overwrites:
            break
        if not isinstance(step.kind, Pointwise) and (span := _span(step.kind.target)) is not None:
            overwritten.append(span)
        current = step.kind.target.value
    return RangePlan(base, _fused(steps[::-1]))


def _fused(steps: list[RangeStep]) -> tuple[RangeStep, ...]:
    """Merge in-place operations with scalars into the fill before them, if they cover the same elements."""
    out: list[RangeStep] = []
    for step in steps:
        if out and _is_edit(step.kind, out[-1]):
            out[-1] = out[-1]._replace(edits=(*out[-1].edits, step.kind))  # type: ignore[arg-type]
        else:
            out.append(step)
    return tuple(out)


def _is_edit(edit: Fill | Copy | Pointwise, filled: RangeStep) -> bool:
    if not isinstance(edit, Pointwise) or not isinstance(filled.kind, Fill) or not edit.in_place:
        return False
    draw, target = filled.node.draw, filled.kind.target
    if draw is not None and draw.rejection is not None:  # the first round is not the result
        return False
    same = edit.target[1:] == target[1:] and is_contiguous(target.size, target.stride)
    return same and all(isinstance(a, (int, float, type(None))) for a in (*edit.args[1:], *edit.kwargs.values()))


def _step(value: Value, node: Node, depth: int) -> RangeStep | None:
    """The operation that made `value`, if it can be run on a range of the storage."""
    kind = kind_of(node)
    if not isinstance(kind, (Fill, Copy, Pointwise)) or not is_dense(value) or value.device.type != "cpu":
        return None
    target = kind.target
    if target.dtype != value.dtype:
        return None
    partial = is_contiguous(target.size, target.stride)
    if isinstance(kind, Fill):
        if kind.name in ("uniform", "normal"):
            if node.draw is None or words_drawn.granule(kind.name, dtype_name(value.dtype)) is None:
                return None
            partial = partial and math.prod(target.size) >= words_drawn.MIN_PIECE
        elif kind.name != "constant":
            return None
        return RangeStep(kind, node, (), partial)
    if isinstance(kind, Copy) and kind.dim is not None:
        if depth == 0 or any(ref.dtype != value.dtype for ref in kind.sources):
            return None
        partial = partial and all(
            math.prod(ref.size[kind.dim :]) >= _MIN_ROW and _is_flat(ref) and _is_shallow(ref.value, depth - 1)
            for ref in kind.sources
            if math.prod(ref.size)
        )
        return RangeStep(kind, node, (), partial)
    if isinstance(kind, Copy):
        operands: tuple[Any, ...] = kind.sources
    else:
        operands = kind.args[1:] if kind.in_place else kind.args
        if not kind.exact or any(type(a) is Ref for a in kind.kwargs.values()):
            return None
    if depth == 0 or any(type(a) in (list, tuple) for a in operands):
        return None
    for ref in operands:
        if type(ref) is not Ref or math.prod(ref.size) == 1:
            continue
        if ref.size != target.size:
            return None
        # Not partial if it reads the storage that it writes, or a source that is expensive to start in.
        partial = partial and _is_flat(ref) and _is_shallow(ref.value, depth - 1)
    return RangeStep(kind, node, (), partial)


def _is_flat(ref: Ref) -> bool:
    """Whether a read is of consecutive elements, in memory order."""
    return is_contiguous(ref.size, ref.stride) and ref.dtype == ref.value.dtype and is_dense(ref.value)


def _is_shallow(value: Value, depth: int) -> bool:
    """Whether parts of `value` can be made with a chain of at most `depth` further sources."""
    return depth >= 0 and _can_run(_find(value, True, depth), value)


def _span(target: Ref) -> tuple[int, int] | None:
    """The range of elements of a contiguous target; None for any other."""
    if target.dtype != target.value.dtype or not is_contiguous(target.size, target.stride):
        return None
    return target.offset, target.offset + math.prod(target.size)


def _is_within(node: Node, overwritten: list[tuple[int, int]]) -> bool:
    """Whether all that `node` writes is overwritten later, before it is read."""
    if len(node.outputs) != 1 or len(node.writes) != 1 or (span := _span(node.writes[0])) is None:
        return False
    return any(begin <= span[0] and span[1] <= end for begin, end in overwritten)
