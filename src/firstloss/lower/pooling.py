"""Pooling, as a few strided slices: one for every place in the window.

Slices fuse into one loop, meet ties and NaN in the order that PyTorch does, and need no reduction over windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import torch
from jax import lax

from .convolution import each
from .dtypes import cast, opmath, where
from .matmul import contract
from .registry import rule

aten = torch.ops.aten


def pooled_length(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The number of windows along one dimension; with `ceil_mode` a last one may hang over, but not begin outside."""
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


class _Windows:
    """The windows of a pooling over the last `len(kernel)` dimensions of a shape."""

    def __init__(self, shape: Sequence[int], kernel, stride, padding, dilation, ceil_mode: bool):
        kernel = list(kernel)
        n = self.space = len(kernel) if len(kernel) > 1 else 2
        self.kernel = each(kernel, n)
        self.stride = each(stride, n) if len(stride) else self.kernel
        self.padding, self.dilation = each(padding, n), each(dilation, n)
        self.lead, self.lengths = tuple(shape[: len(shape) - n]), tuple(shape[len(shape) - n :])
        per_dim = zip(self.lengths, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        self.counts = tuple(pooled_length(*numbers, ceil_mode) for numbers in per_dim)

    def extents(self) -> list[int]:
        """How far the windows reach, from the first padded place."""
        return [
            (c - 1) * s + d * (k - 1) + 1
            for c, s, d, k in zip(self.counts, self.stride, self.dilation, self.kernel, strict=True)
        ]

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The places in a window, counted from the window's first, in memory order."""
        return itertools.product(*([i * d for i in range(k)] for k, d in zip(self.kernel, self.dilation, strict=True)))

    def padded(self, x, value):
        edges = [(p, max(0, e - n - p), 0) for p, e, n in zip(self.padding, self.extents(), self.lengths, strict=True)]
        return lax.pad(x, cast(value, x.dtype), [(0, 0, 0)] * len(self.lead) + edges)

    def slice(self, padded, offset):
        """What all windows have at one place."""
        zeros, ones = (0,) * len(self.lead), (1,) * len(self.lead)
        limits = [o + (c - 1) * s + 1 for o, c, s in zip(offset, self.counts, self.stride, strict=True)]
        return lax.slice(padded, zeros + tuple(offset), self.lead + tuple(limits), ones + self.stride)

    def unslice(self, part, offset):
        """The transpose of padding and `slice`: put what all windows have at one place back where it came from."""
        edges = []
        for o, c, s, p, n in zip(offset, self.counts, self.stride, self.padding, self.lengths, strict=True):
            edges.append((o - p, n - (o - p + (c - 1) * s + 1), s - 1))
        return lax.pad(part, cast(0, part.dtype), [(0, 0, 0)] * len(self.lead) + edges)

    def places(self, offset) -> np.ndarray:
        """The flat index, in the unpadded plane, of what `slice` gives."""
        flat = np.zeros(self.counts, np.int64)
        for d, (o, c, s, p) in enumerate(zip(offset, self.counts, self.stride, self.padding, strict=True)):
            along = np.arange(c) * s + o - p
            flat += along.reshape((-1,) + (1,) * (self.space - d - 1)) * math.prod(self.lengths[d + 1 :])
        return flat

    def sizes(self, count_include_pad: bool) -> np.ndarray:
        """How many elements each window averages over."""
        total = np.ones(self.counts, np.int64)
        for d, (c, s, p, k, n) in enumerate(
            zip(self.counts, self.stride, self.padding, self.kernel, self.lengths, strict=True)
        ):
            start = np.arange(c) * s - p
            end = np.minimum(start + k, n + p)
            inside = np.minimum(end, n) - np.maximum(start, 0)
            size = end - start if count_include_pad else inside
            total *= size.reshape((-1,) + (1,) * (self.space - d - 1))
        return total


# --- Maximum ----------------------------------------------------------------------------------------------------------


def _lowest(dtype: np.dtype):
    return int(np.iinfo(dtype).min) if dtype.kind in "iu" else -math.inf


@rule(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(self, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    windows = _Windows(self.shape, kernel_size, stride, padding, dilation, ceil_mode)
    padded = windows.padded(self, _lowest(self.dtype))
    inside = windows.padded(lax.full(self.shape, True), False)
    best = places = found = None
    for offset in windows.offsets():
        x, here = windows.slice(padded, offset), windows.slice(inside, offset)
        place = lax.broadcast_in_dim(windows.places(offset), x.shape, range(len(windows.lead), x.ndim))
        if best is None:
            best, places, found = x, place, here
            continue
        take = here & ((x > best) | (x != x) | ~found)
        best, places, found = where(take, x, best), where(take, place, places), found | here
    return best, places


@rule(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    windows = _Windows(self.shape, kernel_size, stride, padding, dilation, ceil_mode)
    g = cast(grad_output, opmath(grad_output.dtype))
    gradient = lax.full(self.shape, 0, g.dtype)
    for offset in windows.offsets():
        place = lax.broadcast_in_dim(windows.places(offset), g.shape, range(len(windows.lead), g.ndim))
        gradient += windows.unslice(where(indices == place, g, 0), offset)
    return gradient


# --- Average ----------------------------------------------------------------------------------------------------------


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    self, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
):
    windows = _Windows(self.shape, kernel_size, stride, padding, (1,), ceil_mode)
    padded = windows.padded(cast(self, opmath(self.dtype)), 0)
    summed = sum(windows.slice(padded, offset) for offset in windows.offsets())
    sizes = windows.sizes(count_include_pad) if divisor_override is None else np.asarray(divisor_override)
    if summed.dtype.kind in "iu":
        return lax.div(summed, lax.full_like(summed, 0) + cast(sizes, summed.dtype))
    return summed / cast(sizes, summed.dtype)


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    how = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    g = cast(grad_output, opmath(grad_output.dtype))
    return jax.linear_transpose(lambda x: avg_pool(x, *how), jax.ShapeDtypeStruct(self.shape, g.dtype))(g)[0]


def _averages(length: int, count: int, dtype) -> np.ndarray:
    """The matrix that averages `length` elements to `count`: bin i is from floor(i n / m) to ceil((i + 1) n / m)."""
    matrix = np.zeros((count, length))
    for i in range(count):
        start, end = i * length // count, -(-(i + 1) * length // count)
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


@rule(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _adaptive_avg_pool_backward(grad_output, self):
    g = cast(grad_output, opmath(grad_output.dtype))
    space = 3 if self.ndim == 5 else 2
    shape = jax.ShapeDtypeStruct(self.shape, g.dtype)
    return jax.linear_transpose(lambda x: _adaptive_avg_pool(x, g.shape[-space:]), shape)(g)[0]
