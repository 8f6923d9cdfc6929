"""Recognize recipes that are a fill, or a slice of one, with elementwise edits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.ops import aten

from ..program.graph import Draw, Ref, Value, is_contiguous
from ..program.node_kinds import Copy, Fill, Pointwise, kind_of

# In-place operations with scalars that give the same bits on a GPU and a CPU. (A GPU divides by multiplying with the
# reciprocal.)
_SAME_BITS = {aten.mul_, aten.add_, aten.sub_, aten.neg_, aten.abs_, aten.clamp_, aten.clamp_min_, aten.clamp_max_}
_MAX_DEPTH = 16


class Slice(NamedTuple):
    """Elements [low, high) of a fill; if `row` is not 0, only columns [column, column + width) of rows that long."""

    low: int
    high: int
    row: int = 0
    column: int = 0
    width: int = 0

    @property
    def numel(self) -> int:
        return (self.high - self.low) // self.row * self.width if self.row else self.high - self.low


class FillRecipe(NamedTuple):
    """A weight, or a shard of one, that is a part of one fill.

    Attributes:
        fill: "uniform", "normal" or "constant".
        numel: of the whole fill, of which the weight is the slice `wanted`.
        edits: in-place operations on it, with their arguments.
        device: the fill's; a copy may be on another device.
    """

    fill: Fill
    numel: int
    wanted: Slice
    dtype: torch.dtype
    draw: Draw | None
    edits: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    device: torch.device


def recipe_of(value: Value) -> FillRecipe | None:
    """`value` as a slice of a fill; None if its recipe is anything else."""
    return _of_ref(Ref.of(value), _MAX_DEPTH)


def _of_ref(ref: Ref, depth: int) -> FillRecipe | None:
    value, node = ref.value, ref.value.node
    if not depth or value.known or node is None or ref.dtype != value.dtype or not value.numel:
        return None
    does = kind_of(node)
    if isinstance(does, Pointwise) and does.in_place:
        numbers = all(isinstance(a, (int, float, type(None))) for a in (*does.args[1:], *does.kwargs.values()))
        if does.op.overloadpacket not in _SAME_BITS or not numbers or does.kwargs.get("alpha", 1) != 1:
            return None
        if not _is_all(does.target):
            return None
        inner = _of_ref(ref._replace(value=does.target.value), depth - 1)
        edit = (does.op, does.args[1:], dict(does.kwargs))
        return inner and inner._replace(edits=(*inner.edits, edit))
    if isinstance(does, Copy) and does.dim is None and _is_all(does.target):
        source = does.sources[0]
        inside = _within(source, ref)
        return None if source.dtype != ref.dtype or inside is None else _of_ref(inside, depth - 1)
    if not isinstance(does, Fill) or does.name not in ("uniform", "normal", "constant") or not _is_all(does.target):
        return None
    if node.draw is not None and node.draw.rejection is not None or (node.draw is None) != (does.name == "constant"):
        return None
    wanted = _slice(ref)
    return wanted and FillRecipe(does, value.numel, wanted, value.dtype, node.draw, (), value.device)


def _is_all(target: Ref) -> bool:
    """Whether a target is its whole storage, contiguous."""
    value = target.value
    plain = is_contiguous(target.size, target.stride) and target.offset == 0 and target.dtype == value.dtype
    return plain and math.prod(target.size) == value.numel


def _within(source: Ref, ref: Ref) -> Ref | None:
    """`ref` of a copy of `source`, as a Ref of the Value that `source` is a view of."""
    if not is_contiguous(ref.value.shape, ref.value.stride):
        return None
    if _is_all(ref):
        return source
    if is_contiguous(source.size, source.stride):
        return Ref(source.value, ref.size, ref.stride, source.offset + ref.offset, ref.dtype)
    return None


def _slice(ref: Ref) -> Slice | None:
    if is_contiguous(ref.size, ref.stride):
        return Slice(ref.offset, ref.offset + math.prod(ref.size))
    # Strided rows of contiguous elements.
    split = next((d for d in range(1, len(ref.size)) if is_contiguous(ref.size[d:], ref.stride[d:])), None)
    if split is None:
        return None
    width, row = math.prod(ref.size[split:]), ref.stride[split - 1]
    outer = [stride // row if stride % row == 0 else -1 for stride in ref.stride[:split]]
    if not is_contiguous(ref.size[:split], outer) or row < width:
        return None
    top, column = divmod(ref.offset, row)
    if column + width > row:
        return None
    return Slice(top * row, (top + math.prod(ref.size[:split])) * row, row, column, width)
