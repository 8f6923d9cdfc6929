"""Sorting and related operations. NaN is the largest number; sorting is stable. See `dispatched.py` for CPU devices."""

from __future__ import annotations

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import axis, cast, where
from .registry import rule


@rule(aten.sort.default)
def sort(self, dim=-1, descending=False):
    return sort_stable(self, stable=True, dim=dim, descending=descending)


@rule(aten.sort.stable)
def sort_stable(self, *, stable, dim=-1, descending=False):
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
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
