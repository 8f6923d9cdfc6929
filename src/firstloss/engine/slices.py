"""Slices: make a part of a Value without making the rest.

A shard of a weight, or the piece of a file that is written next, is a part of what a recipe makes. Most recipes are a
random fill with a few edits on top, and such a recipe can be run on any range of its elements: only the words that
those elements take are drawn, in whole granules, at their place in the stream. What cannot be cut so (an operation
whose result at one element depends on others, or on where it lies in a vector register) is made whole, by the
engine, and read.

All ranges are flat: elements of a storage, in the order in which they lie in memory.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..program.graph import Node, Ref, Value, dense_count, is_contiguous
from ..rng import draws
from ..rng.stream import Position
from .cuts import cover, row_blocks
from .sampler import Pen, is_native

aten = torch.ops.aten

# Bytes of a source that are made at a time where its reader takes only some of them, as a column block takes of a
# weight's rows.
_BLOCK_BYTES = 8 << 20
# Elements drawn at a time: they stay in a core's L2 cache, which PyTorch's normal kernel goes over twice.
_PIECE = 1 << 16
# The native kernels keep to the cache by themselves.
_NATIVE_PIECE = 1 << 22
# A fill this short is drawn whole: nothing is saved by cutting it.
_SHORT = 1 << 10
# Recipes are followed through so many edits and copies; beyond, they are made whole.
_MAX_STEPS = 64
_MAX_DEPTH = 8

# In-place fills that draw nothing, and the random ones whose kernels may be cut (see `rng.draws.granule`).
_CONSTANT_FILLS = {aten.zero_.default, aten.fill_.Scalar}
_RANDOM_FILLS = {aten.uniform_.default, aten.normal_.default}
_REPLACING = {op.overloadpacket for op in (*_CONSTANT_FILLS, *_RANDOM_FILLS, aten.copy_.default)}
# Factories, and the in-place operation that makes the same: (operation, its further arguments).
_FACTORIES: dict[Any, Callable[[Node], tuple[Any, tuple]]] = {
    aten.zeros.default: lambda node: (aten.zero_.default, ()),
    aten.ones.default: lambda node: (aten.fill_.Scalar, (1,)),
    aten.full.default: lambda node: (aten.fill_.Scalar, (node.args[1],)),
    aten.rand.default: lambda node: (aten.uniform_.default, (0.0, 1.0)),
    aten.randn.default: lambda node: (aten.normal_.default, (0.0, 1.0)),
}
UNWRITTEN = {aten.empty.memory_format, aten.empty_strided.default}
# Element by element, and rounded exactly: vector code and scalar code give the same bits, so a kernel may begin
# anywhere. Exponentials, sines and the like are not among them: vectorised they may differ in the last bit. (erfinv_ is
# not exact, but has one kernel for vectors and their ends: see `chains`.)
_EXACT = {
    getattr(aten, name)
    for name in (
        "copy_ clone _to_copy add add_ sub sub_ mul mul_ div div_ neg neg_ abs abs_ clamp clamp_ clamp_min "
        "clamp_min_ clamp_max clamp_max_ sqrt sqrt_ where masked_fill masked_fill_ erfinv_"
    ).split()
}


class _Step(NamedTuple):
    """One operation on the way to a Value: it writes `target`, a Ref of the storage that is being made."""

    op: Any
    args: tuple  # without the target, for an operation in place
    kwargs: dict[str, Any]
    target: Ref
    node: Node
    made: bool  # the operation returns a new tensor rather than writing in place
    partial: bool  # it can be run on a range


class _Plan(NamedTuple):
    base: Value | None  # what the steps edit: known or made whole; None where they overwrite it all
    steps: list[_Step]  # first to last


class Slicer:
    """Makes parts of Values. Holds one pen, so that consecutive parts need one jump: use one per thread."""

    def __init__(self, whole: Callable[[Value], torch.Tensor]) -> None:
        """`whole` gives the buffer of a Value that has to be made whole; what it returns is only read."""
        self._whole = whole
        self._pen = Pen()
        self._plans: dict[tuple[Value, bool], _Plan] = {}

    def read(self, ref: Ref, out: torch.Tensor) -> None:
        """Write what `ref` shows into `out`, a tensor of its size, converting where the dtypes differ."""
        value = ref.value
        count = math.prod(ref.size)
        if not count:
            return
        partial = count < value.numel or not is_contiguous(ref.size, ref.stride)
        if ref.dtype != value.dtype or not _dense(value) or not _can_run(self._plan(value, partial), value):
            out.copy_(ref.view(self._buffer_of(value)))
            return
        if is_contiguous(ref.size, ref.stride) and out.is_contiguous() and out.dtype == ref.dtype:
            self.window(value, ref.offset, ref.offset + count, out.view(-1))
            return
        memory: torch.Tensor | None = None
        limit = max(_BLOCK_BYTES // value.dtype.itemsize, 1)
        for block in row_blocks(ref.size, ref.stride, limit):
            if memory is None or memory.numel() < block.span:
                memory = torch.empty(block.span, dtype=value.dtype, device=value.device)
            begin = ref.offset + sum(b * s for b, s in zip(block.begin, ref.stride, strict=True))
            self.window(value, begin, begin + block.span, memory[: block.span])
            part = out
            for dim, (first, length) in enumerate(zip(block.begin, block.size, strict=True)):
                if length != ref.size[dim]:
                    part = part.narrow(dim, first, length)
            part.copy_(memory.as_strided(block.size, ref.stride, 0))

    def window(self, value: Value, begin: int, end: int, out: torch.Tensor) -> None:
        """Make elements [begin, end) of `value` in `out`: one-dimensional, contiguous, of the Value's dtype.

        The Value's layout must have no gaps.
        """
        plan = self._plan(value, not (begin == 0 and end == value.numel))
        base = plan.base
        if base is not None:
            if base.known or not _unwritten(base):
                out.copy_(_flat(self._buffer_of(base), base)[begin:end])
        for step in plan.steps:
            self._run(step, value, begin, end, out)

    def make(self, value: Value, out: torch.Tensor) -> None:
        """Make all of `value` in `out`, a tensor laid out as it is; of what it copies, only what it copies is made."""
        if not value.numel:
            return
        if _dense(value) and _can_run(self._plan(value, False), value):
            self.window(value, 0, value.numel, _flat(out, value))
        else:
            out.copy_(self._buffer_of(value))

    def cuttable(self, value: Value) -> bool:
        """Whether parts of `value` can be made without making all of it."""
        return _dense(value) and _can_run(self._plan(value, True), value)

    # -- what to run -------------------------------------------------------------------------------------------------

    def _plan(self, value: Value, partial: bool) -> _Plan:
        key = (value, partial)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._find_plan(value, partial, _MAX_DEPTH)
        return plan

    def _find_plan(self, value: Value, partial: bool, depth: int) -> _Plan:
        steps: list[_Step] = []
        replaced: list[
            tuple[int, int]
        ] = []  # ranges that a later step writes anew, as the second fill of a padded shard
        at = value
        while not at.known and at.node is not None and at.node.op not in UNWRITTEN:
            if _is_within(at.node, replaced):
                at = at.node.writes[0].value
                continue
            step = self._step(at, depth)
            if step is None or (partial and not step.partial) or len(steps) == _MAX_STEPS:
                break
            steps.append(step)
            if step.made or step.node.overwrites:
                return _Plan(None, steps[::-1])
            if step.op.overloadpacket in _REPLACING and (span := _span(step.target)) is not None:
                replaced.append(span)
            at = step.target.value
        return _Plan(at, steps[::-1])

    def _step(self, value: Value, depth: int) -> _Step | None:
        """The operation that made `value`, if it can be run on the bare storage."""
        node = value.node
        assert node is not None
        if not _dense(value) or value.device.type != "cpu" or len(node.outputs) != 1 or len(node.writes) > 1:
            return None
        op: Any = node.op
        kwargs = node.kwargs
        if node.writes:
            target, args, made = node.writes[0], node.args[1:], False
            if not node.args or node.args[0] is not target or target.dtype != value.dtype:
                return None
        else:
            target = Ref.of(value)
            made = True
            factory = _FACTORIES.get(op)
            if factory is not None:
                op, args = factory(node)
                kwargs = {}
            else:
                args = node.args
        partial = is_contiguous(target.size, target.stride)
        if (
            node.draw is not None and node.draw.rejection is not None
        ):  # trunc_normal_: a normal's first round, corrected afterwards
            op, args = aten.normal_.default, node.args[1:3]
        if op in _CONSTANT_FILLS or (op in _RANDOM_FILLS and node.draw is not None):
            if op in _RANDOM_FILLS:
                name, dtype = _name(op), _dtype_name(value.dtype)
                if draws.granule(name, dtype) is None or _has_options(kwargs):
                    return None
                partial = partial and math.prod(target.size) >= draws.MIN_PIECE
            return _Step(op, args, {}, target, node, made, partial)
        if op is aten.cat.default and all(ref.dtype == value.dtype for ref in args[0]):
            return _Step(op, args, {}, target, node, made, False)
        if op.overloadpacket not in _EXACT or depth == 0 or kwargs.get("alpha", 1) != 1:
            return None
        if any(type(a) in (list, tuple) for a in args):
            return None
        for ref in (a for a in args if type(a) is Ref):
            if math.prod(ref.size) == 1:
                continue
            if ref.size != target.size:
                return None
            source = ref.value
            alike = is_contiguous(ref.size, ref.stride) and ref.dtype == source.dtype and _dense(source)
            # Its own storage read while it is written, or a source that is expensive to enter: at once or not at all.
            partial = partial and alike and self._shallow(source, depth - 1)
        return _Step(op, args, kwargs, target, node, made, partial)

    def _shallow(self, value: Value, depth: int) -> bool:
        """Whether parts of `value` can be made through at most `depth` further sources."""
        return depth >= 0 and _can_run(self._find_plan(value, True, depth), value)

    # -- running it --------------------------------------------------------------------------------------------------

    def _run(self, step: _Step, value: Value, begin: int, end: int, out: torch.Tensor) -> None:
        target = step.target
        count = math.prod(target.size)
        if is_contiguous(target.size, target.stride):
            first, last = max(begin - target.offset, 0), min(end - target.offset, count)  # of the target's elements
            if first >= last:
                return
            into = out[target.offset + first - begin : target.offset + last - begin]
            if last - first == count:
                into = into.view(target.size)
        else:
            if not count:
                return
            first, last = 0, count
            into = out.as_strided(target.size, target.stride, target.offset + out.storage_offset())
        if step.op in _RANDOM_FILLS:
            self._draw(step, first, last, count, into)
        elif step.op in _CONSTANT_FILLS:
            step.op(into, *step.args)
        elif step.op is aten.cat.default:
            self._concatenate(step.args[0], step.args[1] if len(step.args) > 1 else 0, into.view(target.size))
        elif step.op.overloadpacket is aten.copy_:
            self._copy(step.args[0], first, last, count, into)
        else:
            args = [self._argument(a, first, last, count) if type(a) is Ref else a for a in step.args]
            if not step.made:
                step.op(into, *args, **step.kwargs)
            elif step.op.overloadpacket in (aten.clone, aten._to_copy):
                into.copy_(args[0].view(into.shape))
            else:
                into.copy_(step.op(*args, **step.kwargs).view(into.shape))

    def _copy(self, source: Ref, first: int, last: int, count: int, into: torch.Tensor) -> None:
        if last - first == count and math.prod(source.size) == count:
            self.read(source, into.view(source.size))
        else:
            into.copy_(self._argument(source, first, last, count))

    def _concatenate(self, sources: tuple[Ref, ...], dim: int, into: torch.Tensor) -> None:
        at = 0
        for source in sources:
            if source.size != (0,):  # which may stand beside tensors of any shape
                self.read(source, into.narrow(dim, at, source.size[dim]))
                at += source.size[dim]

    def _argument(self, ref: Ref, first: int, last: int, count: int) -> torch.Tensor:
        """Elements [first, last) of an argument that has `count` elements; one of one element as it is."""
        if math.prod(ref.size) == 1 != count or last - first == count:
            made = torch.empty(ref.size, dtype=ref.dtype)
            self.read(ref, made)
            # Whether it has dimensions matters to type promotion; how many does not.
            return made.reshape(-1) if made.numel() == 1 != count and made.dim() else made
        part = torch.empty(last - first, dtype=ref.dtype)
        self.window(ref.value, ref.offset + first, ref.offset + last, part)
        return part

    def _draw(self, step: _Step, first: int, last: int, count: int, into: torch.Tensor) -> None:
        """Draw elements [first, last) of a fill of `count` elements."""
        node = step.node
        origin = node.draw
        assert origin is not None
        name, dtype = _name(step.op), _dtype_name(into.dtype)
        unit = draws.granule(name, dtype)
        assert unit is not None
        if last - first == count and (not into.is_contiguous() or count < _SHORT):
            self._pen.move(origin.stream, origin.position)
            self._pen.draw(step.op, into, step.args, {})
            self._pen.at = (origin.stream, origin.after)
            if origin.rejection is not None:
                origin.rejection.correct(into)
            return
        into = into.view(-1)
        piece = _NATIVE_PIECE if is_native(step.op, into, step.args, {}) else _PIECE
        for begin, end in cover(first, last, count, unit, piece) if count >= _SHORT else [(0, count)]:
            self._pen.move(origin.stream, _position(origin.position, name, dtype, begin))
            inside = first <= begin and end <= last
            part = into[begin - first : end - first] if inside else torch.empty(end - begin, dtype=into.dtype)
            self._pen.draw(step.op, part, step.args, {})
            after = origin.after if end == count else _position(origin.position, name, dtype, end)
            self._pen.at = (origin.stream, after)
            if not inside:
                low, high = max(begin, first), min(end, last)
                into[low - first : high - first] = part[low - begin : high - begin]
        if origin.rejection is not None:
            origin.rejection.correct(into, first)

    def _buffer_of(self, value: Value) -> torch.Tensor:
        return value.content() if value.known else self._whole(value)


class Wholes:
    """Values that had to be made whole, remembered for the next reader: the last `keep` of them. Thread-safe."""

    def __init__(self, make: Callable[[Value], torch.Tensor], keep: int = 2) -> None:
        self._make = make
        self._keep = keep
        self._lock = threading.Lock()
        self._made: OrderedDict[Value, torch.Tensor] = OrderedDict()

    def __call__(self, value: Value) -> torch.Tensor:
        with self._lock:  # one at a time: it is memory that is short
            buffer = self._made.pop(value, None)
            if buffer is None:
                while len(self._made) >= self._keep:
                    self._made.popitem(last=False)
                buffer = self._make(value)
            self._made[value] = buffer
            return buffer


def _span(target: Ref) -> tuple[int, int] | None:
    """The elements of its storage that a target without gaps shows."""
    if target.dtype != target.value.dtype or not is_contiguous(target.size, target.stride):
        return None
    return target.offset, target.offset + math.prod(target.size)


def _is_within(node: Node, replaced: list[tuple[int, int]]) -> bool:
    """Whether all that `node` writes is written anew later, by whom nothing is read of it."""
    if len(node.outputs) != 1 or len(node.writes) != 1 or (span := _span(node.writes[0])) is None:
        return False
    return any(begin <= span[0] and span[1] <= end for begin, end in replaced)


def _has_options(kwargs: dict[str, Any]) -> bool:
    """Whether a draw has keyword arguments beyond its generator."""
    return any(v is not None for k, v in kwargs.items() if k != "generator")


def _can_run(plan: _Plan, value: Value) -> bool:
    """Whether the plan begins with something else than `value` made whole."""
    return plan.base is not value or value.known or _unwritten(value)


def _unwritten(value: Value) -> bool:
    return not value.known and (value.node is None or value.node.op in UNWRITTEN)


def _dense(value: Value) -> bool:
    return dense_count(value.shape, value.stride) == value.numel


def _flat(buffer: torch.Tensor, value: Value) -> torch.Tensor:
    """A buffer laid out as `value` as its elements lie in memory."""
    return buffer.as_strided((value.numel,), (1,), buffer.storage_offset())


def _position(origin: Position, name: str, dtype: str, element: int) -> Position:
    return Position(origin.words + draws.words_before(name, dtype, element), origin.spare)


def _name(op: Any) -> str:
    return op._schema.name.split("::")[1].rstrip("_")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
