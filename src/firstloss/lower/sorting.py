"""Sorting and related operations. NaN is the largest number; sorting is stable."""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from . import aten as kernels
from .dtypes import axis, cast, where
from .registry import rule


def _bits(x):
    """The bits of elements as float32, of which equal ones have the same, and NaN has a positive one's; None for other
    dtypes. (By their bits: where XLA computes, numbers close to zero may count as zero.)"""
    if x.dtype == jnp.bfloat16:
        bits = lax.shift_left(cast(lax.bitcast_convert_type(x, np.int16), np.dtype(np.int32)), np.int32(16))
    elif x.dtype in (np.float32, np.float16):
        bits = lax.bitcast_convert_type(cast(x, np.dtype(np.float32)), np.int32)
    else:
        return None
    is_nan = (bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
    return where(is_nan, np.int32(0x7FC00000), where(bits == np.int32(-0x80000000), np.int32(0), bits))


def _keys(x):
    """Elements as int32 in the same order; None for dtypes that are wider. NaN is the largest, both zeros are equal."""
    bits = _bits(x)
    if bits is not None:
        return where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return cast(x, np.dtype(np.int32)) if np.can_cast(x.dtype, np.int32) else None


def _at(x, positions, d):
    return jnp.take_along_axis(x, positions, d, mode="promise_in_bounds")


def _sort_on_cpu(x, d, descending):
    """Sorted elements and their positions, or None: the key and the position are one number. (XLA sorts single numbers
    on a CPU four times as fast as pairs.)"""
    keys = _keys(x) if kernels.usable() and x.shape[d] < 1 << 32 else None
    if keys is None:
        return None
    keys = cast(~keys if descending else keys, np.dtype(np.int64))
    packed = lax.shift_left(keys, np.int64(32)) | lax.broadcasted_iota(np.int64, x.shape, d)
    positions = lax.sort(packed, dimension=d, is_stable=False) & np.int64(0xFFFFFFFF)
    return _at(x, positions, d), positions


def _largest_on_cpu(x, k, d):
    """The `k` largest elements and their positions, or None: XLA selects from rows of float32, without sorting."""
    bits = _bits(x) if kernels.usable() and k else None
    if bits is None:
        return None
    rows = jnp.moveaxis(lax.bitcast_convert_type(bits, np.float32), d, -1)
    _, positions = lax.top_k(lax.reshape(rows, (math.prod(rows.shape[:-1]), rows.shape[-1])), k)
    positions = lax.reshape(cast(positions, np.dtype(np.int64)), (*rows.shape[:-1], k))
    positions = jnp.moveaxis(positions, -1, d)
    return _at(x, positions, d), positions


@rule(aten.sort.default)
def sort(self, dim=-1, descending=False):
    return sort_stable(self, stable=True, dim=dim, descending=descending)


@rule(aten.sort.stable)
def sort_stable(self, *, stable, dim=-1, descending=False):
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    if (by_one_number := _sort_on_cpu(self, d, descending)) is not None:
        return by_one_number
    keys = cast(self, np.dtype(np.int8)) if self.dtype == bool else self
    positions = lax.broadcasted_iota(np.int64, self.shape, d)
    # Descending is the reverse of ascending on reversed input, which is stable and needs no negated key.
    if descending:
        keys, positions = lax.rev(keys, [d]), lax.rev(positions, [d])
    keys, positions = lax.sort((keys, positions), dimension=d, num_keys=1, is_stable=True)
    return (lax.rev(keys, [d]), lax.rev(positions, [d])) if descending else (keys, positions)


@rule(aten.topk.default)
def topk(self, k, dim=-1, largest=True, sorted=True):
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    if largest and (found := _largest_on_cpu(self, k, d)) is not None:
        return found
    values, positions = sort(self, dim, largest)
    return lax.slice_in_dim(values, 0, k, 1, d), lax.slice_in_dim(positions, 0, k, 1, d)


def _median(self, dim, keepdim, skip_nan):
    """The lower of the two middle elements; NaN if there is one, unless they are skipped (they sort last)."""
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    length = self.shape[d]
    values, positions = sort(self, d)
    nan = lax.reduce_sum(cast(values != values, np.dtype(np.int64)), (d,))
    if skip_nan:
        middle = lax.max((length - nan - 1) // 2, np.int64(0))
    else:  # the first NaN, as in the CPU kernel
        middle = where(nan > 0, length - nan, (length - 1) // 2)
    middle = lax.expand_dims(middle, [d])
    medians = (jnp.take_along_axis(x, middle, axis=d) for x in (values, positions))
    return tuple(x if keepdim else lax.squeeze(x, [d]) for x in medians)


@rule(aten.median.dim)
def median_dim(self, dim, keepdim=False):
    return _median(self, dim, keepdim, skip_nan=False)


@rule(aten.nanmedian.dim)
def nanmedian_dim(self, dim, keepdim=False):
    return _median(self, dim, keepdim, skip_nan=True)


@rule(aten.median.default)
def median(self):
    return _median(lax.reshape(self, (self.size,)), 0, False, skip_nan=False)[0]


@rule(aten.nanmedian.default)
def nanmedian(self):
    return _median(lax.reshape(self, (self.size,)), 0, False, skip_nan=True)[0]


@rule(aten.mode.default)
def mode(self, dim=-1, keepdim=False):
    """The smallest of the most frequent values, and its last index."""
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    x = jnp.moveaxis(cast(self, np.dtype(np.int8)) if self.dtype == bool else self, d, -1)
    values, positions = sort(x, -1)
    begins = jnp.concatenate([jnp.full((*x.shape[:-1], 1), True), values[..., 1:] != values[..., :-1]], -1)
    along = lax.broadcasted_iota(np.int64, x.shape, x.ndim - 1)
    run = along - lax.cummax(where(begins, along, 0), x.ndim - 1) + 1
    last = lax.expand_dims(lax.argmax(run, x.ndim - 1, np.int64), [x.ndim - 1])
    value, position = (jnp.take_along_axis(a, last, axis=-1) for a in (values, positions))
    return tuple(jnp.moveaxis(a, -1, d) if keepdim else a[..., 0] for a in (value, position))


@rule(aten.kthvalue.default)
def kthvalue(self, k, dim=-1, keepdim=False):
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    return tuple(lax.index_in_dim(x, k - 1, d, keepdims=keepdim) for x in sort(self, dim))
