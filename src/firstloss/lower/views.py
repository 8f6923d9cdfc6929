"""Views as the arrays that they show, and functional writes through them.

A functional graph has values instead of memory, so a view is an array of its elements in index order: `view` is a
reshape, whatever the strides. Only `as_strided` refers to memory; its base is assumed to be contiguous, as in replayed
functionalization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import axis, broadcast_to, cast, is_complex, to_jax, where
from .registry import rule


@rule(
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.view_as.default,
)
def alias(self, *_):
    return self


def filled_size(numel: int, size: Sequence[int]) -> tuple[int, ...]:
    """`size` with a -1 replaced by the inferred size."""
    if -1 not in size:
        return tuple(size)
    others = -math.prod(size)
    return tuple((numel // others if others else 0) if s == -1 else s for s in size)


@rule(aten.view.default, aten.view_copy.default, aten._unsafe_view.default, aten.reshape.default)
def view(self, size):
    return lax.reshape(self, filled_size(self.size, size))


@rule(aten.resize.default)
def resize(self, size, *, memory_format=None):
    """The same memory with another size; elements beyond the old end are uninitialized, and read as zeros."""
    count = math.prod(size)
    memory = lax.reshape(self, (self.size,))
    memory = lax.pad(memory, cast(0, self.dtype), [(0, max(0, count - self.size), 0)])
    return lax.reshape(memory[:count], tuple(size))


@rule(aten._reshape_alias.default, aten._reshape_alias_copy.default)
def _reshape_alias(self, size, stride):
    return lax.reshape(self, tuple(size))


@rule(aten._reshape_copy.default)
def _reshape_copy(self, size):
    return view(self, size)


@rule(aten.flatten.using_ints)
def flatten(self, start_dim=0, end_dim=-1):
    if self.ndim == 0:
        return lax.reshape(self, (1,))
    first, last = axis(start_dim, self.ndim), axis(end_dim, self.ndim)
    shape = self.shape
    return lax.reshape(self, shape[:first] + (math.prod(shape[first : last + 1]),) + shape[last + 1 :])


@rule(aten.unflatten.int)
def unflatten(self, dim, sizes):
    d = axis(dim, self.ndim)
    return lax.reshape(self, self.shape[:d] + filled_size(self.shape[d], sizes) + self.shape[d + 1 :])


@rule(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(self, dtype):
    """The same bytes with another dtype; a different width multiplies or divides the last dimension."""
    target = to_jax(dtype)
    if self.dtype == target:
        return self
    if is_complex(self.dtype):
        return view_dtype(lax.reshape(view_as_real(self), self.shape[:-1] + (2 * self.shape[-1],)), dtype)
    if is_complex(target):
        return view_as_complex(lax.reshape(view_dtype(self, torch.float32 if target.itemsize == 8 else torch.float64),
                                           self.shape[:-1] + (-1, 2)))  # fmt: skip
    x = lax.convert_element_type(self, np.uint8) if self.dtype == bool else self
    ratio = target.itemsize // x.dtype.itemsize
    if ratio > 1:
        x = lax.reshape(x, x.shape[:-1] + (x.shape[-1] // ratio, ratio))
    bits = lax.bitcast_convert_type(x, np.uint8 if target.kind == "b" else target)
    if bits.ndim > self.ndim:
        bits = lax.reshape(bits, self.shape[:-1] + (self.shape[-1] * bits.shape[-1],))
    return cast(bits, target)


@rule(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(self):
    return lax.concatenate([lax.expand_dims(part, [self.ndim]) for part in (lax.real(self), lax.imag(self))], self.ndim)


@rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(self):
    return lax.complex(self[..., 0], self[..., 1])


# --- The order of dimensions ------------------------------------------------------------------------------------------


@rule(aten.t.default, aten.t_copy.default, aten.numpy_T.default)
def t(self):
    return self if self.ndim < 2 else lax.transpose(self, (1, 0))


@rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(self, dim0, dim1):
    order = list(range(self.ndim))
    if order:
        a, b = axis(dim0, self.ndim), axis(dim1, self.ndim)
        order[a], order[b] = order[b], order[a]
    return lax.transpose(self, order)


@rule(aten.permute.default, aten.permute_copy.default)
def permute(self, dims):
    return lax.transpose(self, [axis(d, self.ndim) for d in dims])


@rule(aten.movedim.int, aten.movedim.intlist)
def movedim(self, source, destination):
    return jnp.moveaxis(self, source, destination)


# --- Dimensions of size 1 ---------------------------------------------------------------------------------------------


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(self, dim):
    return lax.expand_dims(self, [dim % (self.ndim + 1)])


@rule(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(self):
    return lax.squeeze(self, [d for d, size in enumerate(self.shape) if size == 1])


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def squeeze_dims(self, dim):
    dims = [dim] if isinstance(dim, int) else dim
    dims = {axis(d, self.ndim) for d in dims} if self.ndim else ()
    return lax.squeeze(self, [d for d in dims if self.shape[d] == 1])


@rule(aten.expand.default, aten.expand_copy.default)
def expand(self, size, *, implicit=False):
    lead = len(size) - self.ndim
    return broadcast_to(self, [self.shape[d - lead] if s == -1 else s for d, s in enumerate(size)])


# --- Parts ------------------------------------------------------------------------------------------------------------


def bounds(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    """The limits of a slice within a dimension, by Python's rules."""
    start, end, _ = slice(start, end).indices(length)
    return start, max(start, end)


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(self, dim=0, start=None, end=None, step=1):
    d = axis(dim, self.ndim)
    start, end = bounds(self.shape[d], start, end)
    return lax.slice_in_dim(self, start, end, step, d)


@rule(aten.narrow.default, aten.narrow_copy.default)
def narrow(self, dim, start, length):
    d = axis(dim, self.ndim)
    start %= self.shape[d] + 1 if start >= 0 else self.shape[d]
    return lax.slice_in_dim(self, start, start + length, 1, d)


@rule(aten.select.int, aten.select_copy.int)
def select(self, dim, index):
    return lax.index_in_dim(self, index, axis(dim, self.ndim), keepdims=False)


@rule(aten.split_with_sizes.default, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(self, split_sizes, dim=0):
    return tuple(lax.split(self, split_sizes, axis(dim, self.ndim)))


@rule(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(self, split_size, dim=0):
    length = self.shape[axis(dim, self.ndim)]
    count = max(1, -(-length // split_size)) if split_size else 1
    return split_with_sizes(self, [min(split_size, length - i * split_size) for i in range(count)], dim)


@rule(aten.chunk.default, aten.unsafe_chunk.default)
def chunk(self, chunks, dim=0):
    length = self.shape[axis(dim, self.ndim)]
    if length == 0:
        return split_with_sizes(self, [0] * chunks, dim)
    return split(self, -(-length // chunks), dim)


@rule(aten.unbind.int, aten.unbind_copy.int)
def unbind(self, dim=0):
    return tuple(select(self, dim, i) for i in range(self.shape[axis(dim, self.ndim)]))


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(self, offset=0, dim1=0, dim2=1):
    return jnp.diagonal(self, offset, dim1, dim2)


@rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(self, dimension, size, step):
    d = axis(dimension, self.ndim)
    if self.ndim == 0:
        return lax.reshape(self, (size,))
    count = (self.shape[d] - size) // step + 1
    windows = step * np.arange(count)[:, None] + np.arange(size)
    values = jnp.take(self, windows, axis=d)
    return jnp.moveaxis(values, d + 1, -1)


# --- Strides ----------------------------------------------------------------------------------------------------------


class Slices(NamedTuple):
    """A strided view as slices of its memory reshaped to `shape`; `dims` has the view's dimension for each dimension of
    `shape`, or None if the slice has a single element that is not a dimension of the view."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    steps: tuple[int, ...]
    dims: tuple[int | None, ...]


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _slices_of(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Slices | None:
    """The view as slices of a contiguous array of `shape`, if each of its dimensions follows one of the array's."""
    positions = _contiguous(shape)
    starts, rest = [], offset
    for n, position in zip(shape, positions, strict=True):
        start, rest = divmod(rest, position) if n > 1 else (0, rest)
        starts.append(start)
    dims: list[int | None] = [None] * len(shape)
    limits, steps = [start + 1 for start in starts], [1] * len(shape)
    for d, (count, step) in enumerate(zip(size, stride, strict=True)):
        if count == 1 or step == 0:
            continue
        j = next((j for j, position in enumerate(positions) if shape[j] > 1 and step % position == 0), None)
        if j is None or dims[j] is not None:
            return None
        dims[j], steps[j] = d, step // positions[j]
        limits[j] = starts[j] + (count - 1) * steps[j] + 1
    if rest or any(limit > n for limit, n in zip(limits, shape, strict=True)):
        return None
    return Slices(tuple(shape), tuple(starts), tuple(limits), tuple(steps), tuple(dims))


def strided_slices(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Slices | None:
    """The view as slices of its base, or of its base reshaped so that the view's strides are those of dimensions."""
    direct = _slices_of(shape, size, stride, offset)
    if direct is not None:
        return direct
    rows = sorted({s for n, s in zip(size, stride, strict=True) if n > 1 and s} | {1}, reverse=True)
    cut = [math.prod(shape), *rows]
    if any(cut[i] % cut[i + 1] for i in range(len(rows))):
        return None
    return _slices_of([cut[i] // cut[i + 1] for i in range(len(rows))] + [1], size, stride, offset)


def strided_rows(size: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The dimensions of a strided view, outermost in memory first, if no two elements share memory.

    Returns (`order`, `rows`): `order` lists the dimensions with more than one element, by descending stride; the memory
    can be split into `size[order[0]]` rows of `rows[0]` elements, of which the beginning of each is split into rows
    again, and so on. Dimensions with stride 0 repeat elements, and are left out of `order`. None if rows would overlap,
    as in a sliding window.
    """
    order = sorted((d for d, s in enumerate(size) if s > 1 and stride[d]), key=lambda d: -stride[d])
    extent = 1  # of a row, from its first to its last element
    for d in reversed(order):
        if extent > stride[d]:
            return None
        extent += (size[d] - 1) * stride[d]
    return order, [stride[d] for d in order]


def strided_positions(size: Sequence[int], stride: Sequence[int], offset: int):
    """The memory offset of each element of a strided view; computed on the device, not stored as a constant."""
    positions = lax.full(tuple(size), offset, np.int64)
    for d, step in enumerate(stride):
        positions += lax.broadcasted_iota(np.int64, tuple(size), d) * np.int64(step)
    return positions


def _beginning(rows, length: int):
    """The first `length` elements of the last dimension; elements past its end are never read, so are zero."""
    missing = length - rows.shape[-1]
    if missing <= 0:
        return lax.slice_in_dim(rows, 0, length, 1, rows.ndim - 1)
    edges = [(0, 0, 0)] * (rows.ndim - 1) + [(0, missing, 0)]
    return lax.pad(rows, cast(0, rows.dtype), edges)


def _arranged(x, dims: Sequence[int], size: tuple[int, ...]):
    """Arrange `x`, whose dimensions are `dims` of the view, in the view's order and with its repetitions."""
    x = lax.transpose(x, np.argsort(dims))
    return x if x.shape == size else lax.broadcast_in_dim(x, size, sorted(dims))


@rule(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(self, size, stride, storage_offset=None):
    """Slices, a transpose and a broadcast if the strides allow; else rows split from the memory; else a gather."""
    size, offset = tuple(size), storage_offset or 0
    if 0 in size:
        return lax.full(size, 0, self.dtype)
    slices = strided_slices(self.shape, size, stride, offset)
    if slices is not None:
        x = lax.slice(lax.reshape(self, slices.shape), slices.starts, slices.limits, slices.steps)
        x = lax.squeeze(x, [j for j, d in enumerate(slices.dims) if d is None])
        return _arranged(x, [d for d in slices.dims if d is not None], size)
    memory, cut = lax.reshape(self, (self.size,)), strided_rows(size, stride)
    if cut is None:
        return memory[strided_positions(size, stride, offset)]
    order, rows = cut
    x = lax.slice_in_dim(memory, offset, self.size, 1, 0)
    for d, row in zip(order, rows, strict=True):
        x = _beginning(x, size[d] * row)
        x = lax.reshape(x, x.shape[:-1] + (size[d], row))
    return _arranged(lax.index_in_dim(x, 0, x.ndim - 1, keepdims=False), order, size)


@rule(aten.as_strided_scatter.default)
def as_strided_scatter(self, src, size, stride, storage_offset=None):
    """The inverse of `as_strided`, by the same steps; a scatter instead of the gather."""
    size, offset = tuple(size), storage_offset or 0
    src = broadcast_to(cast(src, self.dtype), size)
    if 0 in size:
        return self
    slices = strided_slices(self.shape, size, stride, offset)
    if slices is None or any(n > 1 and not step for n, step in zip(size, stride, strict=True)):
        positions = strided_positions(size, stride, offset)
        memory = lax.reshape(self, (self.size,)).at[positions.reshape(-1)].set(lax.reshape(src, (src.size,)))
        return lax.reshape(memory, self.shape)
    present = [d for d in slices.dims if d is not None]
    x = lax.transpose(src, present + [d for d in range(src.ndim) if d not in present])
    x = lax.reshape(x, [1 if d is None else size[d] for d in slices.dims])
    memory = lax.reshape(self, slices.shape)
    if all(step == 1 for step in slices.steps):
        return lax.reshape(lax.dynamic_update_slice(memory, x, slices.starts), self.shape)
    positions = zip(slices.shape, slices.starts, slices.limits, slices.steps, strict=True)
    edges = [(start, n - limit, step - 1) for n, start, limit, step in positions]
    written = lax.pad(lax.full(x.shape, True), np.False_, edges)
    return lax.reshape(lax.select(written, lax.pad(x, cast(0, x.dtype), edges), memory), self.shape)


# --- Writes through views ---------------------------------------------------------------------------------------------


def _among_zeros(src, length: int, dim: int, start: int, step: int):
    """`src` at every `step`th index of dimension `dim` from `start`, zeros elsewhere."""
    extent = max(0, (src.shape[dim] - 1) * step + 1)
    edges = [(0, 0, 0)] * src.ndim
    edges[dim] = (start, length - start - extent, step - 1)
    return lax.pad(src, cast(0, src.dtype), edges)


@rule(aten.slice_backward.default)
def slice_backward(grad_output, input_sizes, dim, start, end, step):
    d = axis(dim, len(input_sizes))
    start, _ = bounds(input_sizes[d], start, end)
    return _among_zeros(grad_output, input_sizes[d], d, start, step)


@rule(aten.select_backward.default)
def select_backward(grad_output, input_sizes, dim, index):
    d = axis(dim, len(input_sizes))
    return _among_zeros(lax.expand_dims(grad_output, [d]), input_sizes[d], d, index % input_sizes[d], 1)


@rule(aten.slice_scatter.default)
def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
    d = axis(dim, self.ndim)
    start, end = bounds(self.shape[d], start, end)
    count = -(-(end - start) // step)
    src = broadcast_to(cast(src, self.dtype), self.shape[:d] + (count,) + self.shape[d + 1 :])
    if step == 1:
        return lax.dynamic_update_slice_in_dim(self, src, start, d)
    written = np.zeros(self.shape[d], bool)
    written[start:end:step] = True
    mask = lax.broadcast_in_dim(written, self.shape, [d])
    return where(mask, _among_zeros(src, self.shape[d], d, start, step), self)


@rule(aten.select_scatter.default)
def select_scatter(self, src, dim, index):
    d = axis(dim, self.ndim)
    index %= self.shape[d]
    src = broadcast_to(src, self.shape[:d] + self.shape[d + 1 :])
    return slice_scatter(self, lax.expand_dims(src, [d]), d, index, index + 1)


def _diagonal_indices(shape: Sequence[int], offset: int, dim1: int, dim2: int) -> tuple[Any, ...]:
    """An index that selects the diagonal of two dimensions moved to the end."""
    count = max(0, min(shape[dim1] + min(offset, 0), shape[dim2] - max(offset, 0)))
    along = np.arange(count)
    return ..., along - min(offset, 0), along + max(offset, 0)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
    dim1, dim2 = axis(dim1, self.ndim), axis(dim2, self.ndim)
    last = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    written = last.at[_diagonal_indices(self.shape, offset, dim1, dim2)].set(cast(src, self.dtype))
    return jnp.moveaxis(written, (-2, -1), (dim1, dim2))


@rule(aten.diagonal_backward.default)
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
    return diagonal_scatter(lax.full(input_sizes, 0, grad_output.dtype), grad_output, offset, dim1, dim2)


@rule(aten.unfold_backward.default)
def unfold_backward(grad_in, input_sizes, dim, size, step):
    d = axis(dim, len(input_sizes))
    if not input_sizes:
        return lax.reshape(grad_in, ())
    count = grad_in.shape[d]
    total = lax.full(input_sizes, 0, grad_in.dtype)
    for i in range(size):
        part = lax.index_in_dim(grad_in, i, grad_in.ndim - 1, keepdims=False)
        total += _among_zeros(part, input_sizes[d], d, i, step) if count else 0
    return total


# --- Sizes, which are static in a compiled step -----------------------------------------------------------------------


@rule(aten.sym_size.int)
def sym_size(self, dim):
    return self.shape[dim]


@rule(aten.sym_numel.default)
def sym_numel(self):
    return self.size
