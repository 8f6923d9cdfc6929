"""Rows drawn straight into columns: each number goes from a core's nearest cache to the part that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..program.graph import Ref, is_contiguous
from ..rng import draws
from .slices import Slicer, _dtype_name, _name, _position


def cut_dimension(size: Sequence[int], begins: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> int | None:
    """The one dimension after the first along which boxes, in this order, make up the rows of a tensor of `size`.

    None if there is none: they are cut along several, or do not fill the rows. The first dimension is left out of
    account.
    """
    cut = {d for part in sizes for d in range(1, len(size)) if part[d] != size[d]}
    if len(cut) != 1:
        return None
    dim = cut.pop()
    at = 0
    for begin, part in zip(begins, sizes, strict=True):
        if begin[dim] != at:
            return None
        at += part[dim]
    return dim if at == size[dim] else None


def draw_columns(slicer: Slicer, ref: Ref, dim: int, rows: tuple[int, int], parts: Sequence[torch.Tensor]) -> bool:
    """Make rows [first, last) of what `ref`, row-major, shows, cut along `dim` into `parts`, each row-major.

    Returns:
        Whether that was done. It is for a recipe that is one fill by a native kernel; else nothing has happened.
    """
    plan = slicer._plan(ref.value, True)
    step = plan.steps[0] if len(plan.steps) == 1 else None
    origin = None if step is None else step.node.draw
    if step is None or origin is None or origin.rejection is not None:
        return False
    target = step.target
    row, count = math.prod(ref.size[1:]), math.prod(target.size)
    first, last = (ref.offset + number * row - target.offset for number in rows)
    if not is_contiguous(target.size, target.stride) or not 0 <= first < last <= count:
        return False
    # A kernel makes so many normals together, and the last of a ragged fill anew.
    group = draws.MIN_PIECE
    if first % group or last % group or (count % group and last > count - group):
        return False
    name, dtype = _name(step.op), _dtype_name(target.dtype)
    slicer._pen.move(origin.stream, _position(origin.position, name, dtype, first))
    stretches = (rows[1] - rows[0]) * math.prod(ref.size[1:dim])
    if not slicer._pen.draw_columns(step.op, stretches, parts, step.args, step.kwargs):
        return False
    slicer._pen.at = (origin.stream, _position(origin.position, name, dtype, last))
    return True
