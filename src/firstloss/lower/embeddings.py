"""Embedding tables and embedding bags."""

from __future__ import annotations

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, opmath, where
from .indexing import read
from .reductions import linalg_vector_norm
from .registry import rule


@rule(aten.embedding.default)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return read(weight, indices)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    """Rows are accumulated in float32 for half precisions; the row of padding gets no gradient."""
    positions = lax.reshape(indices, (indices.size,))
    width = grad_output.shape[indices.ndim :]
    g = lax.reshape(cast(grad_output, opmath(grad_output.dtype)), (indices.size, *width))
    if scale_grad_by_freq:
        counts = lax.full((num_weights,), 0, g.dtype).at[positions].add(1)
        g = g / lax.expand_dims(counts[positions], range(1, g.ndim))
    if padding_idx >= 0:
        positions = where(positions == padding_idx, num_weights, positions)  # out of bounds, so dropped
    return lax.full((num_weights, *width), 0, g.dtype).at[positions].add(g)


@rule(aten.embedding_renorm.default)
def embedding_renorm(self, indices, max_norm, norm_type):
    """Scale down the indexed rows that are longer than `max_norm`."""
    rows = lax.full((self.shape[0],), False).at[lax.reshape(indices, (indices.size,))].set(True)
    norms = linalg_vector_norm(self, norm_type, list(range(1, self.ndim)), True)
    shrunk = lax.expand_dims(rows, range(1, self.ndim)) & (norms > max_norm)
    return self * where(shrunk, max_norm / (norms + 1e-7), lax.full_like(norms, 1))


_BAG_SUM, _BAG_MEAN, _BAG_MAX = 0, 1, 2


def _bags(indices, starts):
    """The bag of each index."""
    along = jnp.arange(indices.shape[0], dtype=starts.dtype)
    return cast(jnp.searchsorted(starts, along, side="right") - 1, starts.dtype)


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight, indices, offsets, scale_grad_by_freq=False, mode=_BAG_SUM, sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=-1,
):  # fmt: skip
    """Output, the bag of each index, the size of each bag and, for the maximum, the chosen rows.

    Eager PyTorch returns an empty tensor for the bags if its CPU kernel for sums does not need them.
    """
    count = offsets.shape[0] - int(include_last_offset)
    bags = _bags(indices, offsets[:count])
    bag = bags if padding_idx < 0 else where(indices == padding_idx, count, bags)  # out of bounds, so dropped
    is_left_out = mode == _BAG_SUM and padding_idx < 0 and weight.dtype.itemsize <= 4
    bags = bags[:0] if is_left_out else bags
    rows = cast(read(weight, indices), opmath(weight.dtype))
    if per_sample_weights is not None:
        rows = rows * lax.expand_dims(cast(per_sample_weights, rows.dtype), [1])
    width = weight.shape[1]
    sizes = lax.full((count,), 0, offsets.dtype).at[bag].add(1)
    if mode == _BAG_MAX:
        top = lax.full((count, width), -np.inf, rows.dtype).at[bag].max(rows)
        # The first row with the maximum: the smallest index among those that have it.
        position = lax.broadcasted_iota(np.int64, rows.shape, 0)
        position = where(rows == top[lax.min(bag, bag.dtype.type(count - 1))], position, indices.shape[0])
        first = lax.full((count, width), indices.shape[0], np.int64).at[bag].min(position)
        chosen = where(first == indices.shape[0], -1, indices[lax.min(first, np.int64(indices.shape[0] - 1))])
        empty = lax.expand_dims(sizes == 0, [1])
        return where(empty, 0, top), bags, sizes, chosen
    total = lax.full((count, width), 0, rows.dtype).at[bag].add(rows)
    if mode == _BAG_MEAN:
        total = total / cast(lax.expand_dims(lax.max(sizes, lax.full_like(sizes, 1)), [1]), total.dtype)
    return total, bags, sizes, lax.full((count,), 0, offsets.dtype)


@rule(aten._embedding_bag_dense_backward.default)
def _embedding_bag_dense_backward(
    grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
    per_sample_weights, padding_idx=-1,
):  # fmt: skip
    g = cast(grad, opmath(grad.dtype))
    zeros = lax.full((num_weights, g.shape[1]), 0, g.dtype)
    if mode == _BAG_MAX:
        columns = lax.broadcasted_iota(np.int64, maximum_indices.shape, 1)
        positions = where(maximum_indices < 0, num_weights, maximum_indices)
        return zeros.at[positions, columns].add(where(lax.expand_dims(bag_size, [1]) == 0, 0, g))
    if mode == _BAG_MEAN:
        g = g / cast(lax.expand_dims(lax.max(bag_size, lax.full_like(bag_size, 1)), [1]), g.dtype)
    rows = g[offset2bag]
    if per_sample_weights is not None:
        rows = rows * lax.expand_dims(cast(per_sample_weights, g.dtype), [1])
    return embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


@rule(aten._embedding_bag_backward.default)
def _embedding_bag_backward(
    grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, sparse,
    per_sample_weights, padding_idx=-1,
):  # fmt: skip
    if offset2bag.shape[0] != indices.shape[0]:
        offset2bag = _bags(indices, offsets)
    return _embedding_bag_dense_backward(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
        per_sample_weights, padding_idx,
    )  # fmt: skip


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def _embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    if offset2bag.shape[0] != indices.shape[0]:
        offset2bag = _bags(indices, offsets)
    dtype = opmath(grad.dtype)
    products = lax.reduce_sum(cast(grad, dtype)[offset2bag] * cast(weight, dtype)[indices], (1,))
    return products if padding_idx < 0 else where(indices == padding_idx, 0, products)
