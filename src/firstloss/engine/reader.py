"""Readers: materialize a Ref, or any box of it, in existing memory.

In-place operations with scalars after a fill are fused with it, piece by piece (`Epilogue`). timm's `trunc_normal_` is
`uniform_`, `erfinv_`, `mul_`, `add_`, `clamp_`, each over the whole weight. Done piece by piece, in the cache, the
weight passes through memory once instead of five times, and all cores take part.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.ops import aten

from ..compat.locks import fork_safe_lock
from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import Draw, Ref, Value, dtype_name, is_contiguous
from ..program.node_kinds import Copy, Fill, Pointwise
from ..rng import native, words_drawn
from ..rng.stream import Position
from .plan import RangePlanner, RangeStep, is_empty
from .replay import materialize_whole
from .sampler import StreamSampler, has_erfinv, is_native
from .splits import Box, cover, row_blocks


class Epilogue(NamedTuple):
    """The trailing operations that have a native kernel: multiply, add, clamp; each is optional."""

    factor: float = 1.0
    term: float = -0.0  # the identity of addition, even for -0.0
    low: float = -math.inf
    high: float = math.inf

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write the result for `source` to `target`: both float32, contiguous, and of the same length."""
        native.mul_add_clamp(target.data_ptr(), source.data_ptr(), source.numel(), *self)


def split_epilogue(edits: Sequence[Pointwise]) -> tuple[list[Pointwise], Epilogue | None]:
    """Split the edits into those before an Epilogue and the Epilogue; None if they do not end in one."""
    epilogue = Epilogue()
    rest = list(edits)
    for ops, read in _LAST_TO_FIRST:
        if rest and rest[-1].op in ops:
            numbers = read(rest[-1])
            if numbers is not None:
                epilogue, _ = epilogue._replace(**numbers), rest.pop()
    return rest, epilogue if len(rest) < len(edits) else None


def _number(name: str) -> Callable[[Pointwise], dict[str, float] | None]:
    def read(edit: Pointwise) -> dict[str, float] | None:
        number = edit.args[1] if len(edit.args) == 2 and not edit.kwargs else None
        return {name: number} if isinstance(number, (int, float)) and math.isfinite(number) else None

    return read


def _bounds(edit: Pointwise) -> dict[str, float] | None:
    arguments = dict(zip(("min", "max"), edit.args[1:], strict=False)) | edit.kwargs
    numbers = {
        field: arguments[name] for field, name in (("low", "min"), ("high", "max")) if arguments.get(name) is not None
    }
    return numbers if all(math.isfinite(number) for number in numbers.values()) else None


_LAST_TO_FIRST: tuple[tuple[set[Any], Callable[[Pointwise], dict[str, float] | None]], ...] = (
    ({aten.clamp_.default}, _bounds),
    ({aten.add_.Tensor, aten.add_.Scalar}, _number("term")),
    ({aten.mul_.Tensor, aten.mul_.Scalar}, _number("factor")),
)


def apply(edits: Sequence[Pointwise], piece: torch.Tensor) -> None:
    """Apply the edits to a piece of a fill."""
    for edit in edits:
        edit.op(piece, *edit.args[1:], **edit.kwargs)


# Bytes of a source that are made at a time if only some of them are used, such as columns.
_BLOCK_BYTES = 8 << 20
# Elements drawn at a time: they fit in a core's L2 cache; PyTorch's kernel for normals makes two passes (measured:
# 300 M values/s in pieces of 256 KiB, 200 M/s for the whole).
_PIECE = 1 << 16
# The native kernels make one pass; a piece takes some milliseconds, for reports of progress.
_NATIVE_PIECE = 1 << 22
# A piece with edits should stay in the cache, but threads contend for the GIL at each edit: pieces of 1 MiB take 30%
# less time than 256 KiB (measured).
_EDITED_PIECE = 1 << 18
_SHORT = 1 << 10  # shorter fills are drawn whole


class WholeValueCache:
    """An LRU cache of `keep` Values that had to be made whole. Thread-safe."""

    def __init__(self, make: Callable[[Value], torch.Tensor] = materialize_whole, keep: int = 2) -> None:
        self._make = make
        self._keep = keep
        self._lock = fork_safe_lock()
        self._made: OrderedDict[Value, torch.Tensor] = OrderedDict()

    def __call__(self, value: Value) -> torch.Tensor:
        """The content of `value`; must not be modified."""
        with self._lock:  # make one at a time, to save memory
            buffer = self._made.pop(value, None)
            if buffer is None:
                while len(self._made) >= self._keep:
                    self._made.popitem(last=False)
                buffer = self._make(value)
            self._made[value] = buffer
            return buffer


class Reader:
    """Materializes Values and parts of them. Keeps its stream position between calls; not thread-safe."""

    def __init__(
        self, whole: Callable[[Value], torch.Tensor] | None = None, planner: RangePlanner | None = None
    ) -> None:
        """
        Args:
            whole: returns the content of a Value that has to be made whole; the result is not modified.
        """
        self.planner: RangePlanner = planner or RangePlanner()
        self._whole = whole or WholeValueCache()
        self._sampler = StreamSampler()

    def materialize(self, ref: Ref, box: Box | None, out: torch.Tensor) -> None:
        """Write `ref`, or the part of it in `box`, into `out`, a tensor of that size; converts to its dtype."""
        if box is not None:
            offset = ref.offset + sum(b * s for b, s in zip(box.begin, ref.stride, strict=True))
            ref = ref._replace(size=box.size, offset=offset)
        value = ref.value
        count = math.prod(ref.size)
        if not count:
            return
        partial = count < value.numel or not is_contiguous(ref.size, ref.stride)
        if ref.dtype != value.dtype or not self.planner.can_run(value, partial):
            out.copy_(ref.view(self.content(value)))
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

    def materialize_whole(self, value: Value, out: torch.Tensor) -> None:
        """Make all of `value` in `out`, a tensor with its layout; makes only the parts of its sources that it reads."""
        if not value.numel:
            return
        if self.planner.can_run(value, False):
            self.window(value, 0, value.numel, flat(out, value))
        else:
            out.copy_(self.content(value))

    def window(self, value: Value, begin: int, end: int, out: torch.Tensor) -> None:
        """Make elements [begin, end) of `value`, in memory order, in `out`: one-dimensional, with its dtype."""
        plan = self.planner.plan(value, not (begin == 0 and end == value.numel))
        if plan.base is not None and not is_empty(plan.base):
            if plan.base.known:
                plan.base.read_into(begin, out)
            else:
                out.copy_(flat(self.content(plan.base), plan.base)[begin:end])
        for step in plan.steps:
            self._run(step, begin, end, out)

    def content(self, value: Value) -> torch.Tensor:
        """All of `value`, known or made whole; must not be modified."""
        return value.content() if value.known else self._whole(value)

    def fill_columns(self, ref: Ref, dim: int, rows: tuple[int, int], parts: Sequence[torch.Tensor]) -> bool:
        """Make rows [first, last) of the row-major `ref`, split along `dim` into `parts`, each row-major.

        Returns:
            Whether that was done: only for a recipe that is a single fill by a native kernel.
        """
        plan = self.planner.plan(ref.value, True)
        step = plan.steps[0] if len(plan.steps) == 1 else None
        if step is None or not isinstance(step.kind, Fill) or step.edits or step.node.draw is None:
            return False
        fill, draw = step.kind, step.node.draw
        if draw.rejection is not None:
            return False
        row, count = math.prod(ref.size[1:]), math.prod(fill.target.size)
        first, last = (ref.offset + number * row - fill.target.offset for number in rows)
        if not is_contiguous(fill.target.size, fill.target.stride) or not 0 <= first < last <= count:
            return False
        # A kernel computes this many normals together, and redraws the last ones of a ragged fill.
        group = words_drawn.MIN_PIECE
        if first % group or last % group or (count % group and last > count - group):
            return False
        self._seek(draw, _position(draw, fill, first))
        split_rows = (rows[1] - rows[0]) * math.prod(ref.size[1:dim])
        if not self._sampler.fill_columns(fill.name, split_rows, parts, *fill.pair):
            return False
        self._sampler.at = draw.stream.absolute(_position(draw, fill, last))
        return True

    # -- the steps of a plan -----------------------------------------------------------------------------------------

    def _run(self, step: RangeStep, begin: int, end: int, out: torch.Tensor) -> None:
        """Run one step on elements [begin, end) of the storage, in `out`."""
        kind = step.kind
        target = kind.target
        count = math.prod(target.size)
        if is_contiguous(target.size, target.stride):
            first, last = max(begin - target.offset, 0), min(end - target.offset, count)  # of the target's elements
            if first >= last:
                return
            into = out[target.offset + first - begin : target.offset + last - begin]
        else:
            if not count:
                return
            first, last = 0, count
            into = out.as_strided(target.size, target.stride, target.offset + out.storage_offset())
        if isinstance(kind, Fill):
            self._fill(step, kind, first, last, count, into)
        elif isinstance(kind, Copy):
            self._copy(kind, first, last, count, into)
        else:
            self._edit(kind, first, last, count, into)

    def _copy(self, copy: Copy, first: int, last: int, count: int, into: torch.Tensor) -> None:
        if copy.dim is not None and last - first < count:
            self._copy_joined(copy, copy.dim, first, last, into)
            return
        if copy.dim is not None:
            into, at = into.view(copy.target.size), 0
            for source in copy.sources:
                if source.size != (0,):  # `cat` ignores empty 1-D tensors
                    self.materialize(source, None, into.narrow(copy.dim, at, source.size[copy.dim]))
                    at += source.size[copy.dim]
            return
        (source,) = copy.sources
        if math.prod(source.size) != count:
            into.copy_(self._operand(source, first, last, count))
        elif last - first == count:
            self.materialize(source, None, into.view(source.size))
        elif source.dtype == into.dtype:
            self.window(source.value, source.offset + first, source.offset + last, into)
        else:
            into.copy_(self._operand(source, first, last, count))

    def _copy_joined(self, copy: Copy, dim: int, first: int, last: int, into: torch.Tensor) -> None:
        """Elements [first, last) of several sources that are joined along `dim`: rows of each by turns."""
        sources = [(source, math.prod(source.size[dim:])) for source in copy.sources if math.prod(source.size)]
        row = math.prod(copy.target.size[dim:])
        for number in range(first // row, (last - 1) // row + 1):
            at = number * row
            for source, length in sources:
                low, high = max(first, at), min(last, at + length)
                if low < high:
                    begin = source.offset + number * length + low - at
                    self.window(source.value, begin, begin + high - low, into[low - first : high - first])
                at += length

    def _edit(self, edit: Pointwise, first: int, last: int, count: int, into: torch.Tensor) -> None:
        if last - first == count:
            into = into.view(edit.target.size)
        operands = edit.args[1:] if edit.in_place else edit.args
        args = [self._operand(a, first, last, count) if type(a) is Ref else a for a in operands]
        if edit.in_place:
            edit.op(into, *args, **edit.kwargs)
        else:
            into.copy_(edit.op(*args, **edit.kwargs).view(into.shape))

    def _operand(self, ref: Ref, first: int, last: int, count: int) -> torch.Tensor:
        """Elements [first, last) of an operand of `count` elements; all of an operand of one element."""
        if math.prod(ref.size) == 1 != count or last - first == count:
            operand = torch.empty(ref.size, dtype=ref.dtype)
            self.materialize(ref, None, operand)
            # Type promotion depends on whether it has zero dimensions.
            return operand.reshape(-1) if operand.numel() == 1 != count and operand.dim() else operand
        part = torch.empty(last - first, dtype=ref.dtype)
        self.window(ref.value, ref.offset + first, ref.offset + last, part)
        return part

    def _fill(self, step: RangeStep, fill: Fill, first: int, last: int, count: int, into: torch.Tensor) -> None:
        """Elements [first, last) of a fill of `count` elements, with its edits."""
        draw = step.node.draw
        if draw is None:
            into.fill_(fill.value)
            apply(step.edits, into)
            return
        if last - first == count and (not into.is_contiguous() or count < _SHORT):
            self._seek(draw, draw.position)
            self._sampler.fill(fill.name, into.view(fill.target.size), *fill.pair)
            self._sampler.at = draw.stream.absolute(draw.after)
            if draw.rejection is not None:
                draw.rejection.correct(into)
            apply(step.edits, into)
            return
        self._draw(step, fill, draw, first, last, count, into.view(-1))
        if draw.rejection is not None:
            draw.rejection.correct(into, first)

    def _draw(
        self, step: RangeStep, fill: Fill, draw: Draw, first: int, last: int, count: int, into: torch.Tensor
    ) -> None:
        """Draw piece by piece, and apply the edits to each."""
        native = is_native(fill.name, into, *fill.pair)
        has_epilogue = native and step.edits and into.dtype == torch.float32  # the epilogue kernel's only dtype
        edits, epilogue = split_epilogue(step.edits) if has_epilogue else (list(step.edits), None)
        by_erfinv = [edit.op for edit in edits] == [aten.erfinv_.default]
        by_erfinv = by_erfinv and has_erfinv(draw.stream, fill.name, into, *fill.pair)
        unit = words_drawn.granule(fill.name, dtype_name(fill.target.dtype))
        assert unit is not None
        piece = _PIECE if not native else _EDITED_PIECE if step.edits and not by_erfinv else _NATIVE_PIECE
        pieces = cover(first, last, count, unit, piece) if count >= _SHORT else [(0, count)]
        scratch: torch.Tensor | None = None  # stays in the cache
        for begin, end in pieces:
            inside = first <= begin and end <= last
            part = into[begin - first : end - first] if inside else torch.empty(end - begin, dtype=into.dtype)
            self._seek(draw, _position(draw, fill, begin))
            if by_erfinv:
                self._sampler.fill_erfinv(part, *fill.pair, epilogue or Epilogue())
            elif epilogue is None:
                self._sampler.fill(fill.name, part, *fill.pair)
                if edits:
                    apply(edits, part)
            else:
                if scratch is None or scratch.numel() < end - begin:
                    scratch = torch.empty(end - begin, dtype=into.dtype)
                drawn = scratch[: end - begin]
                self._sampler.fill(fill.name, drawn, *fill.pair)
                apply(edits, drawn)
                epilogue.write(part, drawn)
            after = draw.after if end == count else _position(draw, fill, end)
            self._sampler.at = draw.stream.absolute(after)
            if not inside:
                low, high = max(begin, first), min(end, last)
                into[low - first : high - first] = part[low - begin : high - begin]

    def _seek(self, draw: Draw, position: Position) -> None:
        self._sampler.seek(*draw.stream.absolute(position))


def materialize(ref: Ref, box: Box | None, out: torch.Tensor) -> None:
    """Write `ref`, or the part of it in `box`, into `out`, in this thread; `cpu_engine.py` uses all cores."""
    with torch.no_grad(), DisableTorchDispatch():
        Reader().materialize(ref, box, out)


def flat(buffer: torch.Tensor, value: Value) -> torch.Tensor:
    """A one-dimensional view, in memory order, of a buffer with the layout of `value`."""
    return buffer.as_strided((value.numel,), (1,), buffer.storage_offset())


def _position(draw: Draw, fill: Fill, element: int) -> Position:
    """The stream position of the first element of a piece of a fill."""
    words = words_drawn.words_before(fill.name, dtype_name(fill.target.dtype), element)
    return Position(draw.position.words + words, draw.position.spare)
