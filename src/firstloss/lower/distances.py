"""Distances between the rows of matrices."""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, opmath, where
from .matmul import matmul
from .reductions import linalg_vector_norm
from .registry import rule


def _differences(x1, x2):
    """The differences of all pairs of rows of `x1` and `x2`."""
    return lax.expand_dims(x1, [x1.ndim - 1]) - lax.expand_dims(x2, [x2.ndim - 2])


def _broadcast_batch(x1, x2):
    batch = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return jnp.broadcast_to(x1, batch + x1.shape[-2:]), jnp.broadcast_to(x2, batch + x2.shape[-2:])


@rule(aten._cdist_forward.default)
def _cdist_forward(x1, x2, p, compute_mode):
    x1, x2 = _broadcast_batch(x1, x2)
    return linalg_vector_norm(_differences(x1, x2), p, -1)


@rule(aten._euclidean_dist.default)
def _euclidean_dist(x1, x2):
    """With a matrix product, as PyTorch does for many rows: |x|^2 + |y|^2 - 2 x y."""
    x1, x2 = _broadcast_batch(x1, x2)
    squares1 = lax.expand_dims(lax.reduce_sum(x1 * x1, (x1.ndim - 1,)), [x1.ndim - 1])
    squares2 = lax.expand_dims(lax.reduce_sum(x2 * x2, (x2.ndim - 1,)), [x2.ndim - 2])
    squared = squares1 + squares2 - 2 * matmul(x1, jnp.swapaxes(x2, -1, -2))
    return lax.sqrt(lax.max(squared, lax.full_like(squared, 0)))


def _slope(difference, p, distance):
    """The derivative of a p-norm with respect to the difference; 0 where the distance is 0."""
    if p == 0:
        return lax.full_like(difference, 0)
    if p == 1:
        return lax.sign(difference)
    safe = where(distance == 0, 1, distance)
    if p == math.inf:
        slope = lax.sign(difference) * cast(lax.abs(difference) == distance, difference.dtype)
    elif p == 2:
        slope = difference / safe
    else:
        size = where(difference == 0, 1, lax.abs(difference))
        slope = where(difference == 0, 0, lax.sign(difference) * jnp.power(size / safe, p - 1))
    return where(distance == 0, 0, slope)


@rule(aten._cdist_backward.default)
def _cdist_backward(grad, x1, x2, p, cdist):
    if grad.size == 0:
        return lax.full_like(x1, 0)
    x1, x2 = _broadcast_batch(x1, x2)
    slope = _slope(_differences(x1, x2), p, lax.expand_dims(cdist, [cdist.ndim]))
    return lax.reduce_sum(lax.expand_dims(grad, [grad.ndim]) * slope, (grad.ndim - 1,))


def _pairs(rows: int):
    return np.triu_indices(rows, 1)


@rule(aten._pdist_forward.default)
def _pdist_forward(self, p=2.0):
    i, j = _pairs(self.shape[0])
    return linalg_vector_norm(cast(self[i] - self[j], opmath(self.dtype)), p, -1)


@rule(aten._pdist_backward.default)
def _pdist_backward(grad, self, p, pdist):
    i, j = _pairs(self.shape[0])
    slope = _slope(self[i] - self[j], p, lax.expand_dims(pdist, [1])) * lax.expand_dims(grad, [1])
    return lax.full_like(self, 0).at[i].add(slope).at[j].add(-slope)
