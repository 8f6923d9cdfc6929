"""Reading and writing at tensor indices.

Eager PyTorch raises for an index out of range. A compiled program cannot: such a read returns NaN (for integers the
smallest one), so that it is noticed, and such a write writes that to the first element instead. (Bools have no such
value: the write is dropped.) Few operations accept negative indices, -1 for the last: for the others these are out of
range.
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import (
    axis,
    broadcast,
    broadcast_to,
    cast,
    divide,
    error_value,
    is_integer,
    is_number,
    opmath,
    promoted,
    times,
    where,
)
from .registry import rule


def read(x, positions, *, from_end=False):
    """`x[positions]`, where an index out of range gives NaN or the smallest integer.

    Args:
        from_end: whether a negative index counts from the end.
    """
    return x.at[positions].get(mode="fill", wrap_negative_indices=from_end)


def _outside(positions, shape, from_end=False):
    """Where one of several indices, one per dimension, is out of range."""
    beyond = [(p >= n) | (p < (-n if from_end else 0)) for p, n in zip(positions, shape, strict=False)]
    return functools.reduce(lax.bitwise_or, beyond)


def _in_range(outside, positions):
    """The indices, with those out of range replaced by 0."""
    return tuple(where(outside, 0, p) for p in positions)


def _marked(outside, values, dtype):
    """The values to be written, replaced by the error value where the index was out of range."""
    mark = error_value(dtype)
    return values if mark is None else where(outside, cast(mark, dtype), cast(values, dtype))


def _add_at(self, positions, values):
    """Add `values` at `positions`; equal indices accumulate in the dtype that PyTorch computes in."""
    wide = opmath(self.dtype)
    if wide.kind == "b":
        return self.at[positions].max(cast(values, wide))
    return cast(self, wide).at[positions].add(cast(values, wide))


# --- index, as in x[i, :, j] ------------------------------------------------------------------------------------------


def _to_front(self, indices):
    """Move the indexed dimensions to the front.

    Returns the transposed array, the indices broadcast together, and the permutation.
    """
    positions = []
    for index in indices:
        if index is not None and index.dtype in (np.bool_, np.uint8):
            raise NotImplementedError(
                "Indexing with a boolean mask makes a tensor whose shape depends on values, which a compiled program "
                "cannot have. Write torch.where(mask, x, other), or x.masked_fill(mask, value), or multiply by the "
                "mask before a reduction."
            )
        positions.append(index)
    indexed = [d for d, index in enumerate(positions) if index is not None]
    order = indexed + [d for d in range(self.ndim) if d not in indexed]
    return lax.transpose(self, order), tuple(broadcast(*(positions[d] for d in indexed))), order


def _is_run(indexed: list[int]) -> bool:
    return indexed == list(range(indexed[0], indexed[0] + len(indexed)))


def _result_start(indices) -> int:
    """Where the indexed dimensions of the result begin: in place if the indices are adjacent, else in front."""
    indexed = [d for d, index in enumerate(indices) if index is not None]
    return indexed[0] if _is_run(indexed) else 0


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self, indices):
    if all(i is None for i in indices):
        return self
    moved, positions, _ = _to_front(self, indices)
    values = read(moved, positions, from_end=True)
    start, count = _result_start(indices), positions[0].ndim
    return jnp.moveaxis(values, range(count), range(start, start + count))


def _by_mask(self, indices, values, accumulate):
    """`x[mask] = values`: the n-th selected element takes the n-th value, so their number need not be known."""
    if sum(i is not None for i in indices) > 1:
        raise NotImplementedError(
            "A boolean mask combined with another index selects a number of elements that depends on values, which a "
            "compiled program cannot know. Write torch.where(mask, values, x) with a mask of the shape of x."
        )
    lead = next(n for n, index in enumerate(indices) if index is not None)
    mask = cast(indices[lead], np.dtype(bool))
    if lead:  # x[:, mask] = values
        masked = range(lead, lead + mask.ndim)
        rank = self.ndim - mask.ndim + 1
        values = jnp.moveaxis(lax.expand_dims(values, range(rank - values.ndim)), lead, 0)
        front = jnp.moveaxis(self, masked, range(mask.ndim))
        return jnp.moveaxis(_by_mask(front, [mask], values, accumulate), range(mask.ndim), masked)
    rest = self.shape[mask.ndim :]
    if values.ndim > len(rest) and values.shape[0] != 1:
        order = lax.max(lax.cumsum(cast(lax.reshape(mask, (mask.size,)), np.dtype(np.int64))) - 1, np.int64(0))
        values = lax.reshape(broadcast_to(values, (values.shape[0], *rest))[order], self.shape)
    elif values.ndim > len(rest):
        values = lax.squeeze(values, [0])
    values = broadcast_to(cast(values, self.dtype), self.shape)
    mask = lax.broadcast_in_dim(mask, self.shape, range(mask.ndim))
    return lax.select(mask, self + values if accumulate else values, self)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self, indices, values, accumulate=False):
    if all(i is None for i in indices):
        values = broadcast_to(cast(values, self.dtype), self.shape)
        return self + values if accumulate else values
    if any(i is not None and i.dtype in (np.bool_, np.uint8) for i in indices):
        return _by_mask(self, indices, values, accumulate)
    moved, positions, order = _to_front(self, indices)
    count, start = positions[0].ndim, _result_start(indices)
    rest = moved.shape[len(positions) :]
    shape = rest[:start] + positions[0].shape + rest[start:]
    values = jnp.moveaxis(broadcast_to(values, shape), range(start, start + count), range(count))
    outside = _outside(positions, moved.shape, from_end=True)
    values = _marked(lax.expand_dims(outside, range(count, values.ndim)), values, self.dtype)
    positions = _in_range(outside, positions)
    written = _add_at(moved, positions, values) if accumulate else moved.at[positions].set(cast(values, self.dtype))
    return lax.transpose(written, np.argsort(order))


@rule(aten._unsafe_masked_index.default)
def _unsafe_masked_index(self, mask, indices, fill):
    """Indices where the mask is False may be out of range."""
    values = index(self, _clamped(indices, self.shape))
    return where(mask, values, fill)


@rule(aten._unsafe_masked_index_put_accumulate.default)
def _unsafe_masked_index_put_accumulate(self, mask, indices, values):
    return index_put(self, _clamped(indices, self.shape), where(mask, values, 0), accumulate=True)


def _clamped(indices, shape):
    sizes = (cast(n, np.dtype(np.int64)) for n in shape)
    return [i if i is None else lax.clamp(-n, cast(i, n.dtype), n - 1) for i, n in zip(indices, sizes, strict=False)]


@rule(aten.value_selecting_reduction_backward.default)
def value_selecting_reduction_backward(grad, dim, indices, sizes, keepdim):
    """The gradient goes to the selected element."""
    if not keepdim and sizes:
        d = axis(dim, len(sizes))
        grad, indices = lax.expand_dims(grad, [d]), lax.expand_dims(indices, [d])
    x, positions, src = _scatter_operands(lax.full(tuple(sizes), 0, grad.dtype), dim, indices, grad)
    return lax.reshape(x.at[positions].set(src), tuple(sizes)) if indices.size else x


# --- One dimension, one index -----------------------------------------------------------------------------------------


def _rows(self, dim, index):
    """The dimension and a one-dimensional index, as an indexing expression for an array with at least one dimension."""
    x = lax.reshape(self, (1,)) if self.ndim == 0 else self
    d = axis(dim, x.ndim)
    return x, (slice(None),) * d + (lax.reshape(index, (index.size,)),)


@rule(aten.index_select.default)
def index_select(self, dim, index):
    x, positions = _rows(self, dim, index)
    rows = read(x, positions)
    return lax.reshape(rows, ()) if self.ndim == 0 else rows


def _rows_to_write(self, dim, index, source, from_end=False):
    """Like `_rows`, with indices in range, and the values to be written; a number is repeated for each index."""
    x, (*whole, index) = _rows(self, dim, index)
    d = len(whole)
    shape = (*x.shape[:d], index.size, *x.shape[d + 1 :])
    source = broadcast_to(source if np.ndim(source) else lax.reshape(jnp.asarray(source), (1,) * len(shape)), shape)
    outside = _outside([index], [x.shape[d]], from_end)
    marked = _marked(lax.broadcast_in_dim(outside, shape, [d]), source, source.dtype)
    return x, (*whole, *_in_range(outside, [index])), marked


@rule(aten.index_add.default)
def index_add(self, dim, index, source, *, alpha=1):
    source = times(cast(source, opmath(self.dtype)), alpha)
    return lax.reshape(_add_at(*_rows_to_write(self, dim, index, source)), self.shape)


@rule(aten.index_copy.default)
def index_copy(self, dim, index, source):
    x, positions, source = _rows_to_write(self, dim, index, cast(source, self.dtype))
    return lax.reshape(x.at[positions].set(source), self.shape)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self, dim, index, value):
    x, positions, values = _rows_to_write(self, dim, index, cast(value, self.dtype), from_end=True)
    return lax.reshape(x.at[positions].set(values), self.shape)


@rule(aten.index_reduce.default)
def index_reduce(self, dim, index, source, reduce, *, include_self=True):
    x, positions, source = _rows_to_write(self, dim, index, source)
    return lax.reshape(_reduce_at(x, positions, source, reduce, include_self), self.shape)


@rule(aten.take.default)
def take(self, index):
    return read(lax.reshape(self, (self.size,)), index, from_end=True)


@rule(aten.put.default)
def put(self, index, source, accumulate=False):
    flat, positions = lax.reshape(self, (self.size,)), lax.reshape(index, (index.size,))
    outside = _outside([positions], flat.shape, from_end=True)
    source = _marked(outside, lax.reshape(source, (source.size,)), self.dtype)
    positions = _in_range(outside, [positions])
    written = _add_at(flat, positions, source) if accumulate else flat.at[positions].set(cast(source, self.dtype))
    return lax.reshape(written, self.shape)


# --- gather and scatter -----------------------------------------------------------------------------------------------


def _along(index, dim):
    """Indices that differ from an element's own only along one dimension."""
    return tuple(index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim))


def _scatter_operands(self, dim, index, src=None):
    """The operands of a scatter, with at least one dimension, and `src` sliced to the part that is read."""
    if self.ndim == 0:
        self = lax.reshape(self, (1,))
    if index.ndim == 0:
        index = lax.reshape(index, (1,))
    if src is not None and not is_number(src):
        src = lax.reshape(src, (1,)) if src.ndim == 0 else src
        src = lax.slice(src, (0,) * src.ndim, index.shape)
    return self, _along(index, axis(dim, self.ndim)), src


@rule(aten.gather.default)
def gather(self, dim, index, *, sparse_grad=False):
    x, positions, _ = _scatter_operands(self, dim, index)
    if 0 in index.shape:
        return lax.full(index.shape, 0, self.dtype)
    return lax.reshape(read(x, positions), index.shape)


def _scattered(self, dim, index, src):
    """Like `_scatter_operands`, with indices in range."""
    x, positions, src = _scatter_operands(self, dim, index, src)
    d = axis(dim, x.ndim)
    outside = _outside([positions[d]], [x.shape[d]])
    return x, (*positions[:d], *_in_range(outside, [positions[d]]), *positions[d + 1 :]), _marked(outside, src, x.dtype)


@rule(aten.scatter.src, aten.scatter.value)
def scatter(self, dim, index, src):
    if 0 in index.shape:
        return self
    x, positions, src = _scattered(self, dim, index, src)
    return lax.reshape(x.at[positions].set(cast(src, x.dtype)), self.shape)


@rule(aten.scatter_add.default)
def scatter_add(self, dim, index, src):
    if 0 in index.shape:
        return self
    x, positions, src = _scattered(self, dim, index, src)
    return lax.reshape(_add_at(x, positions, src), self.shape)


def _reduce_at(x, positions, src, reduce, include_self):
    """Combine `src` into `x`; without `include_self`, written elements start from the neutral element."""
    dtype = opmath(x.dtype)
    x, src = cast(x, dtype), cast(src, dtype)
    if reduce == "mean":
        counts = lax.full(x.shape, int(include_self), np.int64).at[positions].add(1)
        total = _reduce_at(x, positions, src, "sum", include_self)
        counts = cast(lax.max(counts, lax.full_like(counts, 1)), dtype)
        return jnp.floor_divide(total, counts) if is_integer(dtype) else divide(total, counts)
    name, neutral = {
        "sum": ("add", 0),
        "add": ("add", 0),
        "prod": ("mul", 1),
        "multiply": ("mul", 1),
        "amax": ("max", None),
        "amin": ("min", None),
    }[reduce]
    if not include_self:
        if neutral is None:
            info = jnp.iinfo(dtype) if dtype.kind in "iu" else None
            low, high = (
                (-np.inf, np.inf) if dtype.kind not in "iub" else (info.min, info.max) if info else (False, True)
            )
            neutral = low if reduce == "amax" else high
        x = x.at[positions].set(cast(neutral, dtype))
    if dtype.kind == "b":
        name = {"add": "max", "mul": "min"}.get(name, name)
    return getattr(x.at[positions], name)(src)


@rule(aten.scatter_reduce.two)
def scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
    if 0 in index.shape:
        return self
    x, positions, src = _scattered(self, dim, index, src)
    return lax.reshape(_reduce_at(x, positions, src, reduce, include_self), self.shape)


@rule(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_with_reduce(self, dim, index, src, *, reduce):
    x, positions, src = _scattered(self, dim, index, src)
    return lax.reshape(_reduce_at(x, positions, src, reduce, True), self.shape)


# --- Masks ------------------------------------------------------------------------------------------------------------


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self, mask, value):
    return where(cast(mask, np.dtype(bool)), cast(value, self.dtype), self)


@rule(aten.masked_scatter.default)
def masked_scatter(self, mask, source):
    """The n-th selected element takes the n-th element of `source`: its index is the count of those before it."""
    mask, x = broadcast(cast(mask, np.dtype(bool)), self)
    if 0 in (x.size, source.size):
        return x
    order = lax.cumsum(cast(lax.reshape(mask, (mask.size,)), np.dtype(np.int64))) - 1
    values = read(lax.reshape(source, (source.size,)), lax.max(order, lax.full_like(order, 0)))  # may be too few
    return lax.select(mask, lax.reshape(cast(values, x.dtype), x.shape), x)


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output, mask, sizes):
    """Selected gradients, packed to the front of a tensor of `sizes`."""
    mask = lax.reshape(broadcast_to(cast(mask, np.dtype(bool)), grad_output.shape), (grad_output.size,))
    count = math.prod(sizes)
    order = lax.cumsum(cast(mask, np.dtype(np.int64))) - 1
    positions = lax.select(mask, order, lax.full_like(order, count))  # out of bounds, so dropped
    packed = lax.full((count,), 0, grad_output.dtype).at[positions].set(lax.reshape(grad_output, (grad_output.size,)))
    return lax.reshape(packed, tuple(sizes))


# --- Searches and counts ----------------------------------------------------------------------------------------------


def _search(sequence, x, right):
    """The insertion points of `x` in the sorted rows of `sequence`, which has the same leading dimensions or none."""
    dtype = promoted(sequence, x)
    sequence, x = cast(sequence, dtype), cast(x, dtype)
    find = functools.partial(jnp.searchsorted, side="right" if right else "left", method="scan_unrolled")
    if sequence.ndim == 1:
        return find(sequence, x)
    rows, columns = sequence.shape[:-1], x.shape[-1]
    count = math.prod(rows)
    flat = jax.vmap(find)(sequence.reshape(count, sequence.shape[-1]), x.reshape(count, columns))
    return flat.reshape(*rows, columns)


@rule(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(self, boundaries, *, out_int32=False, right=False):
    return _search(boundaries, self, right)


@rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    return _search(sorted_sequence, self, right or side == "right")


@rule(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(elements, test_elements, *, assume_unique=False, invert=False):
    dtype = promoted(elements, test_elements)
    x, tests = jnp.asarray(cast(elements, dtype)), cast(test_elements, dtype).reshape(-1)
    is_in = lax.reduce_or(lax.expand_dims(x, [x.ndim]) == tests, (x.ndim,))
    return ~is_in if invert else is_in


@rule(aten.histc.default)
def histc(self, bins=100, min=0, max=0):
    x = cast(lax.reshape(self, (self.size,)), opmath(self.dtype))
    low, high = cast(min, x.dtype), cast(max, x.dtype)
    if min == max and x.size:
        low, high = lax.reduce_min(x, (0,)), lax.reduce_max(x, (0,))
    empty = low == high
    low, high = where(empty, low - 1, low), where(empty, high + 1, high)
    position = cast(lax.floor(divide((x - low) * cast(bins, x.dtype), high - low)), np.dtype(np.int64))
    position = lax.min(position, np.int64(bins - 1))
    position = where((x >= low) & (x <= high), position, bins)  # out of bounds, so dropped
    return lax.full((bins,), 0, x.dtype).at[position].add(1)


@rule(aten.bincount.default)
def bincount(self, weights=None, minlength=0):
    raise NotImplementedError(
        "torch.bincount makes a tensor as long as its largest value, which a compiled program cannot know. Write "
        "torch.zeros(length).scatter_add(0, x, torch.ones_like(x, dtype=torch.float))."
    )


@rule(
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
)
def nonzero(self, *_, **__):
    raise NotImplementedError(
        "The shape of this result depends on values, which is not possible in a compiled program. Write "
        "torch.where(mask, x, other), or multiply by the mask before a reduction, or use torch.nonzero_static."
    )


@rule(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, *, output_size):
    """The n-th result is the first element whose cumulative repeats exceed n.

    Eager PyTorch raises if `output_size` is not the sum of `repeats`; here every index is then out of range.
    """
    ends = lax.cumsum(cast(repeats, np.dtype(np.int64)))
    positions = jnp.searchsorted(ends, jnp.arange(output_size), side="right")
    total = ends[-1] if repeats.size else 0
    return where(total == output_size, cast(positions, np.dtype(np.int64)), np.int64(repeats.size))


@rule(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
def item(self, *_):
    raise NotImplementedError(
        "This reads a value into Python, but there are no values while a step is compiled. Keep it a tensor and write "
        "torch.where(condition, x, y) for a branch, or read it after the step, in a step closure."
    )


@rule(aten.nonzero_static.default)
def nonzero_static(self, *, size, fill_value=-1):
    if self.ndim == 0:
        return lax.full((size, 0), 0, np.int64)
    if self.size == 0:  # JAX would ignore fill_value
        return lax.full((size, self.ndim), fill_value, np.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), axis=-1)
