"""Pooling by strided slices: one for each position in the window.

Slices fuse into one loop, handle ties and NaN in PyTorch's order, and need no windowed reductions.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, divide, opmath, where
from .matmul import contract
from .registry import rule
from .unfused import computed_once
from .windows import Windows, each

# --- Maximum ----------------------------------------------------------------------------------------------------------


def _over_planes(plane: np.ndarray, x):
    """A value for each window, broadcast over all planes of `x`."""
    return lax.broadcast_in_dim(plane, x.shape, range(x.ndim - plane.ndim, x.ndim))


def _lowest(dtype: np.dtype):
    return int(np.iinfo(dtype).min) if dtype.kind in "iu" else -math.inf


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(self, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    windows = Windows(self.shape, kernel_size, stride, padding, dilation, ceil_mode)
    padded = windows.padded(self, _lowest(self.dtype))
    best: Any = None
    positions: Any = None
    initialized: Any = False  # which windows have had an element inside the input
    for offset in windows.offsets():
        x, inside = windows.slice(padded, offset), windows.inside(offset)
        position = _over_planes(windows.positions(offset), x)
        if best is None:
            best, positions, initialized = x, position, inside
            continue
        take = (x > best) | (x != x)
        if not np.all(initialized):
            take |= _over_planes(~initialized, x)
        if not np.all(inside):
            take &= _over_planes(inside, x)
        best, positions, initialized = where(take, x, best), where(take, position, positions), initialized | inside
    # XLA considers comparisons and selections cheap, and would recompute them backward for every offset in the window.
    return best, cast(computed_once(positions), np.dtype(np.int64))


@rule(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    windows = Windows(self.shape, kernel_size, stride, padding, dilation, ceil_mode)
    g = cast(grad_output, opmath(grad_output.dtype))
    positions = (_over_planes(windows.positions(offset), g) for offset in windows.offsets())
    return windows.unsliced(where(cast(indices, position.dtype) == position, g, 0) for position in positions)


def _bins(length: int, count: int) -> list[tuple[int, int]]:
    """The begin and end of each of `count` bins: from floor(i n / m) to ceil((i + 1) n / m)."""
    return [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]


@rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(self, output_size):
    """As with equal windows; shorter bins repeat their last element, which changes nothing."""
    space = len(output_size)
    lengths = self.shape[self.ndim - space :]
    bins = [_bins(n, m) for n, m in zip(lengths, output_size, strict=True)]
    reach = [max(end - start for start, end in b) if b else 0 for b in bins]
    flat = lax.reshape(self, (*self.shape[: self.ndim - space], math.prod(lengths)))
    best: Any = None
    positions: Any = None
    for offset in itertools.product(*map(range, reach)):
        position = np.zeros(tuple(output_size), np.int64)
        for d, o in enumerate(offset):
            along = np.array([min(start + o, end - 1) for start, end in bins[d]])
            position = position * lengths[d] + along.reshape((-1,) + (1,) * (space - d - 1))
        x = jnp.take(flat, position, axis=-1)
        position = jnp.broadcast_to(position, x.shape)
        take = True if best is None else (x > best) | ((x != x) & (position > positions))
        best, positions = (x, position) if best is None else (where(take, x, best), where(take, position, positions))
    if best is None:
        shape = (*self.shape[: self.ndim - space], *output_size)
        return lax.full(shape, 0, self.dtype), lax.full(shape, 0, np.int64)
    return best, positions


def _scatter_to_planes(values, indices, lead: int, lengths):
    """Scatter-add `values` at flat `indices` of planes with `lengths`."""
    planes, count = values.shape[:lead], math.prod(values.shape[lead:])
    v = lax.reshape(cast(values, opmath(values.dtype)), (math.prod(planes), count))
    i = lax.reshape(indices, v.shape)
    rows = lax.broadcasted_iota(i.dtype, i.shape, 0)
    written = lax.full((v.shape[0], math.prod(lengths)), 0, v.dtype).at[rows, i].add(v)
    return lax.reshape(written, (*planes, *lengths))


def _chosen_backward(grad_output, self, indices, space):
    lead = self.ndim - space
    return _scatter_to_planes(grad_output, indices, lead, self.shape[lead:])


@rule(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad_output, self, indices):
    return _chosen_backward(grad_output, self, indices, 2)


@rule(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad_output, self, indices):
    return _chosen_backward(grad_output, self, indices, 3)


@rule(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def fractional_max_pool_backward(grad_output, self, kernel_size, output_size, indices):
    return _chosen_backward(grad_output, self, indices, len(kernel_size))


@rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(self, kernel_size, output_size, random_samples):
    """Windows at positions given by random samples (Graham, Fractional max-pooling, 2014)."""
    space = len(kernel_size)
    lead, lengths = self.shape[: self.ndim - space], self.shape[self.ndim - space :]
    batched = lead if len(lead) == 2 else (1, *lead)
    x = lax.reshape(self, (*batched, *lengths))
    starts = []
    for d in range(space):
        n, m, k = lengths[d], output_size[d], kernel_size[d]
        # The samples are ordered from the last dimension in two dimensions, and from the first in three.
        sample = random_samples[:, :, space - 1 - d if space == 2 else d]
        alpha = (n - k) / (m - 1) if m > 1 else 0.0
        u = lax.expand_dims(sample, [2])
        steps = lax.iota(sample.dtype, m)
        position = jnp.trunc((steps + u) * alpha) - jnp.trunc(u * alpha)
        starts.append(cast(where(steps == m - 1, float(n - k), position), np.dtype(np.int64)))
    flat = lax.reshape(x, (*batched, math.prod(lengths)))
    best: Any = None
    positions: Any = None
    for offset in itertools.product(*map(range, kernel_size)):
        position = 0
        for d, o in enumerate(offset):
            along = starts[d] + o
            row = (*batched, *(1,) * d, output_size[d], *(1,) * (space - d - 1))
            position = position * lengths[d] + lax.reshape(along, row)
        flat_place = lax.reshape(position, (*batched, math.prod(output_size)))
        value = lax.reshape(jnp.take_along_axis(flat, flat_place, axis=-1), position.shape)
        if best is None:
            best, positions = value, position
        else:
            take = (value > best) | (value != value)
            best, positions = where(take, value, best), where(take, position, positions)
    return best.reshape(*lead, *output_size), positions.reshape(*lead, *output_size)


@rule(aten.max_unpool2d.default)
def max_unpool2d(self, indices, output_size):
    return _unpool(self, indices, output_size)


@rule(aten.max_unpool3d.default)
def max_unpool3d(self, indices, output_size, stride, padding):
    return _unpool(self, indices, output_size)


def _unpool(self, indices, output_size):
    """The inverse of max pooling: each value at its index, zeros elsewhere."""
    lead = self.ndim - len(output_size)
    planes, count = math.prod(self.shape[:lead]), math.prod(self.shape[lead:])
    i = lax.reshape(indices, (planes, count))
    rows = lax.broadcasted_iota(i.dtype, i.shape, 0)
    zeros = lax.full((planes, math.prod(output_size)), 0, self.dtype)
    written = zeros.at[rows, i].set(lax.reshape(self, (planes, count)))
    return lax.reshape(written, (*self.shape[:lead], *output_size))


# --- Average ----------------------------------------------------------------------------------------------------------


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    self, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
):
    windows = Windows(self.shape, kernel_size, stride, padding, (1,), ceil_mode)
    sums = _window_sums(cast(self, opmath(self.dtype)), windows)
    return divide(sums, _window_sizes(windows, count_include_pad, divisor_override))


def _window_sums(x, windows):
    padded = windows.padded(x, 0)
    return sum(windows.slice(padded, offset) for offset in windows.offsets())


def _window_sizes(windows, count_include_pad, divisor_override):
    return np.asarray(windows.sizes(count_include_pad) if divisor_override is None else divisor_override)


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    windows = Windows(self.shape, kernel_size, stride, padding, (1,), ceil_mode)
    g = cast(grad_output, opmath(grad_output.dtype))
    g = divide(g, _window_sizes(windows, count_include_pad, divisor_override))
    return jax.linear_transpose(lambda x: _window_sums(x, windows), jax.ShapeDtypeStruct(self.shape, g.dtype))(g)[0]


def _averages(length: int, count: int, dtype) -> np.ndarray:
    """The matrix that averages `length` elements to `count`."""
    matrix = np.zeros((count, length))
    for i, (start, end) in enumerate(_bins(length, count)):
        matrix[i, start:end] = 1 / (end - start)
    return matrix.astype(dtype)


@rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _adaptive_avg_pool(self, output_size):
    x = cast(self, opmath(self.dtype))
    space = len(output_size)
    for d, count in zip(range(x.ndim - space, x.ndim), output_size, strict=True):
        if count == 1:
            x = lax.expand_dims(lax.reduce_sum(x, (d,)) / x.shape[d], [d])
        elif x.shape[d] != count:
            pooled = contract(x, _averages(x.shape[d], count, x.dtype), (((d,), (1,)), ((), ())))
            x = lax.transpose(pooled, (*range(d), x.ndim - 1, *range(d, x.ndim - 1)))
    return x


def _adaptive_avg_pool_backward(grad_output, self, space):
    g = cast(grad_output, opmath(grad_output.dtype))
    shape = jax.ShapeDtypeStruct(self.shape, g.dtype)
    return jax.linear_transpose(lambda x: _adaptive_avg_pool(x, g.shape[-space:]), shape)(g)[0]


@rule(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool2d_backward(grad_output, self):
    return _adaptive_avg_pool_backward(grad_output, self, 2)


@rule(aten._adaptive_avg_pool3d_backward.default)
def _adaptive_avg_pool3d_backward(grad_output, self):
    return _adaptive_avg_pool_backward(grad_output, self, 3)


@rule(aten.avg_pool1d.default)
def avg_pool1d(self, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True):
    stride = (1, *stride) if len(stride) else ()
    x = lax.expand_dims(self, [self.ndim - 1])
    y = avg_pool(x, (1, *kernel_size), stride, (0, *padding), ceil_mode, count_include_pad)
    return lax.squeeze(y, [y.ndim - 2])


@rule(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d(self, output_size):
    return _adaptive_avg_pool(self, output_size)


# --- Windows as columns -----------------------------------------------------------------------------------------------


@rule(aten.im2col.default)
def im2col(self, kernel_size, dilation, padding, stride):
    """Every window of the image (channels, *space) as a column: (channels * window, windows)."""
    windows = Windows(self.shape, kernel_size, stride, padding, dilation, False)
    padded = windows.padded(self, 0)
    parts = jnp.stack([windows.slice(padded, offset) for offset in windows.offsets()], axis=self.ndim - 2)
    columns = math.prod(windows.counts)
    return lax.reshape(parts, (*self.shape[:-3], self.shape[-3] * parts.shape[self.ndim - 2], columns))


@rule(aten.col2im.default)
def col2im(self, output_size, kernel_size, dilation, padding, stride):
    channels = self.shape[-2] // math.prod(each(kernel_size, 2))
    g = cast(self, opmath(self.dtype))
    image = jax.ShapeDtypeStruct((*self.shape[:-2], channels, *output_size), g.dtype)
    return jax.linear_transpose(lambda x: im2col(x, kernel_size, dilation, padding, stride), image)(g)[0]
