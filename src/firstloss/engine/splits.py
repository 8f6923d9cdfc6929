"""Split fills into pieces, and strided reads into blocks: pure functions of ints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..program.graph import span
from ..rng.words_drawn import MIN_PIECE

# For more words than this between two rows, a jump is cheaper than drawing them.
_JUMP_WORTH = 1 << 20


def cover(first: int, last: int, count: int, unit: int, piece: int) -> list[tuple[int, int]]:
    """Split a fill of `count` >= 16 elements into pieces that cover its elements [first, last), and few others.

    Every piece begins at a multiple of `unit` (1, or a divisor of 16) and has at least 16 elements. The kernel computes
    the last 16 elements of a ragged fill differently, so a piece with one of them extends to the end. Pieces have about
    `piece` elements (a multiple of 16); those with elements outside [first, last) are short, because they have to be
    drawn into scratch memory.
    """
    if first >= last:
        return []
    tail = (count - MIN_PIECE) // MIN_PIECE * MIN_PIECE  # the last position at which a piece may begin
    begin = min(_down(first, unit), tail)
    if last > tail:
        end = count
    else:
        end = last if unit == 1 else _up(last, MIN_PIECE)
        end = max(end, begin + MIN_PIECE)
    boundaries = {_up(first, MIN_PIECE), _down(last, MIN_PIECE)}
    boundaries.update(range(_up(begin + 1, piece), end, piece))
    cuts = [begin]
    for cut in sorted(boundaries):
        if cut - cuts[-1] >= MIN_PIECE and cut <= (tail if end == count else end - MIN_PIECE):
            cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], end], strict=True))


class Box(NamedTuple):
    """A part of a tensor: indices [begin, begin + size) of each dimension."""

    begin: tuple[int, ...]
    size: tuple[int, ...]


class Block(NamedTuple):
    """A block of a strided read: indices [begin, begin + size) of each dimension, which span `span` elements."""

    begin: tuple[int, ...]
    size: tuple[int, ...]
    span: int


def row_blocks(size: Sequence[int], stride: Sequence[int], limit: int) -> Iterator[Block]:
    """Split a read of `size` and `stride` into blocks that span at most `limit` elements of memory, in memory order.

    The dimension with the largest stride is split first. Rows that are far apart become separate blocks, so that the
    elements between them are not made.
    """
    yield from _cut_blocks([0] * len(size), list(size), stride, limit)


def cut_dimension(size: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """The dimension along which the rows of a tensor of `size` are split into boxes, in this order.

    None if they are split along several, or do not cover the rows. The first dimension is ignored.
    """
    cut = {d for box in boxes for d in range(1, len(size)) if box.size[d] != size[d]}
    if len(cut) != 1:
        return None
    dim = cut.pop()
    at = 0
    for box in boxes:
        if box.begin[dim] != at:
            return None
        at += box.size[dim]
    return dim if at == size[dim] else None


def _cut_blocks(begin: list[int], size: list[int], stride: Sequence[int], limit: int) -> Iterator[Block]:
    if 0 in size:
        return
    whole = span(size, stride)
    long = [d for d in range(len(size)) if size[d] > 1 and stride[d] > 0]
    if not long:
        yield Block(tuple(begin), tuple(size), whole)
        return
    dim = max(long, key=lambda d: stride[d])
    row = whole - (size[dim] - 1) * stride[dim]
    if whole <= limit and stride[dim] - row <= _JUMP_WORTH:
        yield Block(tuple(begin), tuple(size), whole)
        return
    rows = 1 if stride[dim] - row > _JUMP_WORTH else max(1, (limit - row) // stride[dim] + 1)
    for first in range(0, size[dim], rows):
        part_begin, part_size = begin.copy(), size.copy()
        part_begin[dim] += first
        part_size[dim] = min(rows, size[dim] - first)
        if part_size[dim] == 1 and row > limit:
            yield from _cut_blocks(part_begin, part_size, stride, limit)
        else:
            yield Block(tuple(part_begin), tuple(part_size), span(part_size, stride))


def _down(n: int, unit: int) -> int:
    return n // unit * unit


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
