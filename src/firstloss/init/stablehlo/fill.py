"""A shard of a random fill, as a JAX function of the fill's stream position and the shard's offset.

A shard is a box. For each index of its outer dimensions there is a jump to a window; along one dimension it is drawn
from its first word to its last. If a later dimension is sharded, too, whole rows are drawn, block by block, and the
shard's columns are kept: this draws all numbers, but never holds the whole weight. If rows are so long that a jump is
cheaper than drawing the numbers in between, each row is jumped to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax import numpy as jnp

from ...lower.mt19937 import draw, emitted
from ...lower.mt19937_fills import BLOCK, FillKernel
from ...lower.mt19937_jump import spread, windows
from ...rng.mt19937 import N

_JUMP_WORTH = 1 << 18  # words that can be drawn in the time of a jump
_MIN_BLOCK_SIZE = 1 << 16  # elements of the blocks of rows from which columns are kept


class ShardGeometry(NamedTuple):
    """The shape of a weight and of its shard. In dimensions where they differ, an offset is given at run time."""

    shape: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def cut(self) -> tuple[int, ...]:
        """The sharded dimensions."""
        return tuple(d for d, (whole, part) in enumerate(zip(self.shape, self.local, strict=True)) if part < whole)

    @property
    def numel(self) -> int:
        """The number of elements of the weight."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the weight, row-major."""
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))


class WordSource(NamedTuple):
    """A stream's origin, a window of uint32, shape (624,), and the jump table.

    lane_words: the minimal number of words per lane, a power of two; 0 for a single lane, on a CPU.
    """

    origin: Any
    table: Any
    lane_words: int = 0

    def windows(self, position: Any, offsets: Any) -> Any:
        """The windows at `position` + each of `offsets`: shape (len(offsets), 624)."""
        positions = position + offsets
        if len(offsets) == 1:
            return windows(self.origin, positions[0], self.table)[None]
        return lax.map(lambda p: windows(self.origin, p, self.table), positions)


class Rows(NamedTuple):
    """The order in which a box is drawn: `outer` runs of `rows` consecutive rows along dimension `dim`."""

    dim: int
    outer: int
    rows: int
    row: int  # elements of a row of the weight
    kept: tuple[int, ...]  # the shape of the part of a row that belongs to the shard

    @property
    def run(self) -> int:
        """The number of elements of one run, which are drawn consecutively."""
        return self.rows * self.row


def rows_of(box: ShardGeometry) -> Rows:
    """The cheapest order for `box`."""
    if not box.cut:
        return Rows(0, 1, 1, box.numel, (box.numel,))
    dim = box.cut[-1]
    while math.prod(box.local[:dim]) > 1 and box.local[dim] * math.prod(box.shape[dim + 1 :]) < _JUMP_WORTH:
        dim -= 1
    row = math.prod(box.shape[dim + 1 :])
    return Rows(dim, math.prod(box.local[:dim]), box.local[dim], row, box.local[dim + 1 :])


def words_drawn(box: ShardGeometry, words_each: int) -> int:
    """The 32-bit words that a device draws for its shard, without those for alignment."""
    rows = rows_of(box)
    return rows.outer * rows.run * words_each


def part_of_fill(
    kernel: FillKernel, box: ShardGeometry, words: int, source: WordSource, position: Any, starts: Sequence[Any]
) -> Any:
    """The shard of a fill: an array of shape `box.local`.

    Args:
        words: the number of words that the whole fill draws.
        position: int64, the fill's position in the stream.
        starts: int64, the shard's offset in each dimension.
    """
    if 0 in box.local:
        return lax.full(box.local, 0, emitted(kernel.emit))
    rows = rows_of(box)
    first = _first_elements(box, rows, starts)
    aligned = kernel.block == 1 or _aligned(box, rows, kernel.block)
    begin = first if aligned else first // np.int64(kernel.block) * np.int64(kernel.block)
    heads = source.windows(position, begin * np.int64(kernel.words_each))
    if math.prod(rows.kept) == rows.row:
        out = _draw_runs(kernel, rows, heads, source, aligned, first - begin)
    elif aligned:
        out = _columns(kernel, box, rows, heads, starts)
    else:
        out = _draw_runs(kernel, rows, heads, source, aligned, first - begin)
        out = _keep(out.reshape(rows.outer, rows.rows, *box.shape[rows.dim + 1 :]), box, rows, starts)
    out = out.reshape(box.local)
    if kernel.block > 1 and box.numel % kernel.block:
        out = _with_end(kernel, box, out, source.windows(position, np.array([words - BLOCK])), starts)
    return out


def _first_elements(box: ShardGeometry, rows: Rows, starts: Sequence[Any]) -> Any:
    """The index of the first element of each run: int64, shape (outer,)."""
    strides = box.strides
    grid = np.zeros((), np.int64)
    for d in range(rows.dim):
        grid = grid[..., None] + np.arange(box.local[d], dtype=np.int64) * strides[d]
    total: Any = grid.reshape(-1)
    for d in range(rows.dim + 1):
        if d in box.cut:
            total = total + starts[d] * np.int64(strides[d])
    return total


def _aligned(box: ShardGeometry, rows: Rows, block: int) -> bool:
    """Whether every run begins at a block boundary, on all devices."""
    strides = box.strides
    return all(
        (d not in box.cut or box.local[d] * strides[d] % block == 0)
        and (d == rows.dim or box.local[d] == 1 or strides[d] % block == 0)
        for d in range(rows.dim + 1)
        if box.shape
    )


def _draw_runs(kernel: FillKernel, rows: Rows, heads: Any, source: WordSource, aligned: bool, skip: Any) -> Any:
    """Draw whole runs: shape (outer, run)."""
    count = rows.run if aligned else rows.run + kernel.block
    out = _in_lanes(kernel, heads, count, source)
    if aligned:
        return out
    parts = [lax.dynamic_slice(out[i], (skip[i],), (rows.run,)) for i in range(rows.outer)]
    return jnp.stack(parts)


def _in_lanes(kernel: FillKernel, heads: Any, count: int, source: WordSource) -> Any:
    """Draw `count` elements from each window, with several lanes per window if there are enough."""
    each = source.lane_words // kernel.words_each
    lanes = -(-count // each) if each else 1
    if lanes < 2:
        return draw(heads, count, kernel.emit, kernel.words_each, kernel.block)[0]
    step = source.lane_words.bit_length() - 1
    windows = jnp.concatenate([spread(heads[i], lanes, step, source.table) for i in range(heads.shape[0])])
    out = draw(windows, each, kernel.emit, kernel.words_each, kernel.block)[0].reshape(heads.shape[0], lanes * each)
    return out[:, :count]


def _columns(kernel: FillKernel, box: ShardGeometry, rows: Rows, heads: Any, starts: Sequence[Any]) -> Any:
    """Draw blocks of rows, and keep the shard's columns: shape (outer, rows, *kept)."""
    each = N // kernel.words_each
    unit = each // math.gcd(each, rows.row)  # the number of rows that is a multiple of a block of words
    block = unit * max(1, -(-_MIN_BLOCK_SIZE // (unit * rows.row)))
    whole, rest = divmod(rows.rows, block)
    inner = box.shape[rows.dim + 1 :]

    def draw_rows(windows: Any, count: int) -> tuple[Any, Any]:
        values, windows = draw(windows, count * rows.row, kernel.emit, kernel.words_each, kernel.block)
        return _keep(values.reshape(rows.outer, count, *inner), box, rows, starts), windows

    if whole == 0:
        return draw_rows(heads, rest)[0]
    out = lax.empty((rows.outer, rows.rows, *rows.kept), emitted(kernel.emit))
    zeros = (np.int32(0),) * len(rows.kept)

    def step(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        windows, out = carry
        values, windows = draw_rows(windows, block)
        return windows, lax.dynamic_update_slice(out, values, (np.int32(0), i * np.int32(block), *zeros))

    windows_, out = lax.fori_loop(np.int32(0), np.int32(whole), step, (heads, out))
    if rest:
        last = draw_rows(windows_, rest)[0]
        out = lax.dynamic_update_slice(out, last, (np.int32(0), np.int32(whole * block), *zeros))
    return out


def _keep(values: Any, box: ShardGeometry, rows: Rows, starts: Sequence[Any]) -> Any:
    """The part of rows, shape (outer, rows, *inner dimensions of the weight), that belongs to the shard."""
    begin = [starts[d] if d in box.cut else np.int64(0) for d in range(rows.dim + 1, len(box.shape))]
    zero = np.int64(0)
    return lax.dynamic_slice(values, (zero, zero, *begin), (*values.shape[:2], *rows.kept))


def flat_indices(box: ShardGeometry, starts: Sequence[Any]) -> Any:
    """The flat index in the weight of each element of the shard: int64, shape `box.local`."""
    total: Any = np.int64(0)
    for d, stride in enumerate(box.strides):
        index = lax.broadcasted_iota(np.int64, box.local, d) + (starts[d] if d in box.cut else np.int64(0))
        total = total + index * np.int64(stride)
    return jnp.broadcast_to(total, box.local)


def _with_end(kernel: FillKernel, box: ShardGeometry, out: Any, window: Any, starts: Sequence[Any]) -> Any:
    """Replace the last 16 elements of a ragged fill, which PyTorch redraws from the last 16 words."""
    end: Callable[[Any], Any] = draw(window, BLOCK, kernel.emit, 1, BLOCK)[0][0].__getitem__
    index = flat_indices(box, starts) - np.int64(box.numel - BLOCK)
    return jnp.where(index >= 0, end(jnp.clip(index, 0, BLOCK - 1)), out)
