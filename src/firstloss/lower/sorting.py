"""Sorting and its relatives. NaN is the greatest number; equals keep their order."""

from __future__ import annotations

import numpy as np
import torch
from jax import lax

from .dtypes import axis, cast
from .registry import rule

aten = torch.ops.aten


@rule(aten.sort.default)
def sort(self, dim=-1, descending=False):
    return sort_stable(self, stable=True, dim=dim, descending=descending)


@rule(aten.sort.stable)
def sort_stable(self, *, stable, dim=-1, descending=False):
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    keys = cast(self, np.dtype(np.int8)) if self.dtype == bool else self
    places = lax.broadcasted_iota(np.int64, self.shape, d)
    # Descending is ascending backwards on reversed input: equals end in their first order, without negating a key.
    if descending:
        keys, places = lax.rev(keys, [d]), lax.rev(places, [d])
    keys, places = lax.sort((keys, places), dimension=d, num_keys=1, is_stable=True)
    return (lax.rev(keys, [d]), lax.rev(places, [d])) if descending else (keys, places)


@rule(aten.topk.default)
def topk(self, k, dim=-1, largest=True, sorted=True):
    if self.ndim == 0:
        return self, np.int64(0)
    values, places = sort(self, dim, largest)
    d = axis(dim, self.ndim)
    return lax.slice_in_dim(values, 0, k, 1, d), lax.slice_in_dim(places, 0, k, 1, d)


@rule(aten.kthvalue.default)
def kthvalue(self, k, dim=-1, keepdim=False):
    if self.ndim == 0:
        return self, np.int64(0)
    d = axis(dim, self.ndim)
    return tuple(lax.index_in_dim(x, k - 1, d, keepdims=keepdim) for x in sort(self, dim))
