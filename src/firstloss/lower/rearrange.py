"""Joining, repeating, padding and masking: new arrays from the elements of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import axis, cast, is_number, promoted, to_jax, where
from .registry import rule
from .views import diagonal_scatter, slice_


@rule(aten.clone.default, aten.contiguous.default)
def clone(self, *, memory_format=None):
    return self


@rule(aten._to_copy.default)
def _to_copy(self, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    return self if dtype is None else cast(self, to_jax(dtype))


@rule(aten.cat.default)
def cat(tensors, dim=0):
    # A one-dimensional empty tensor can be joined with any shape, for backward compatibility.
    shaped = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    dtype = promoted(*tensors)
    return lax.concatenate([cast(x, dtype) for x in shaped], axis(dim, shaped[0].ndim))


@rule(aten.stack.default)
def stack(tensors, dim=0):
    d = dim % (tensors[0].ndim + 1)
    dtype = promoted(*tensors)
    return lax.concatenate([lax.expand_dims(cast(x, dtype), [d]) for x in tensors], d)


@rule(aten.repeat.default)
def repeat(self, repeats):
    return jnp.tile(self, tuple(repeats))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(self, repeats, dim=None, *, output_size=None):
    return jnp.repeat(self, repeats, axis=dim)


@rule(aten.flip.default)
def flip(self, dims):
    return lax.rev(self, [axis(d, self.ndim) for d in dims] if self.ndim else [])


@rule(aten.rot90.default)
def rot90(self, k=1, dims=(0, 1)):
    return jnp.rot90(self, k, tuple(dims))


@rule(aten.roll.default)
def roll(self, shifts, dims=()):
    shifts = [shifts] if isinstance(shifts, int) else shifts
    if not dims:
        return lax.reshape(roll(lax.reshape(self, (self.size,)), shifts, [0]), self.shape) if self.ndim else self
    for shift, dim in zip(shifts, dims, strict=True):
        d = axis(dim, self.ndim)
        if self.ndim and (shift := shift % max(self.shape[d], 1)):
            cut = self.shape[d] - shift
            self = lax.concatenate([slice_(self, d, cut), slice_(self, d, 0, cut)], d)
    return self


def _above(shape: tuple[int, ...], diagonal: int) -> np.ndarray:
    """True at and above a diagonal of the last two dimensions; computed on the device, not stored as a constant."""
    rows = lax.broadcasted_iota(np.int32, shape[-2:], 0)
    columns = lax.broadcasted_iota(np.int32, shape[-2:], 1)
    return lax.broadcast_in_dim(columns - rows >= diagonal, shape, (len(shape) - 2, len(shape) - 1))


@rule(aten.triu.default)
def triu(self, diagonal=0):
    return where(_above(self.shape, diagonal), self, 0)


@rule(aten.tril.default)
def tril(self, diagonal=0):
    return where(_above(self.shape, diagonal + 1), 0, self)


@rule(aten.diag_embed.default)
def diag_embed(self, offset=0, dim1=-2, dim2=-1):
    ndim, size = self.ndim + 1, self.shape[-1] + abs(offset)
    dim1, dim2 = axis(dim1, ndim), axis(dim2, ndim)
    shape = list(self.shape[:-1])
    for d in sorted((dim1, dim2)):
        shape.insert(d, size)
    return diagonal_scatter(lax.full(shape, 0, self.dtype), self, offset, dim1, dim2)


@rule(aten.copy.default)
def copy(self, src, non_blocking=False):
    return jnp.broadcast_to(cast(src, self.dtype), self.shape)


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(self, value):
    value = cast(value, self.dtype)
    return lax.full(self.shape, value, self.dtype) if is_number(value) else jnp.broadcast_to(value, self.shape)


@rule(aten.zero.default)
def zero(self):
    return lax.full(self.shape, 0, self.dtype)


@rule(aten.block_diag.default)
def block_diag(tensors):
    return jax.scipy.linalg.block_diag(*(cast(x, promoted(*tensors)) for x in tensors))


@rule(aten.tril_indices.default)
def tril_indices(row, col, offset=0, **_):
    return np.stack(np.tril_indices(row, offset, col))


@rule(aten.triu_indices.default)
def triu_indices(row, col, offset=0, **_):
    return np.stack(np.triu_indices(row, offset, col))


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(self, upscale_factor):
    *batch, c, h, w = self.shape
    r, n = upscale_factor, len(batch)
    x = lax.reshape(self, (*batch, c // (r * r), r, r, h, w))
    x = lax.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return lax.reshape(x, (*batch, c // (r * r), h * r, w * r))


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(self, downscale_factor):
    *batch, c, h, w = self.shape
    r, n = downscale_factor, len(batch)
    x = lax.reshape(self, (*batch, c, h // r, r, w // r, r))
    x = lax.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return lax.reshape(x, (*batch, c * r * r, h // r, w // r))


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(self, groups):
    n, c, *space = self.shape
    x = lax.reshape(self, (n, groups, c // groups, *space))
    return lax.reshape(lax.transpose(x, (0, 2, 1, *range(3, x.ndim))), self.shape)


# --- Padding ----------------------------------------------------------------------------------------------------------


def _edges(pad: list[int], ndim: int) -> list[tuple[int, int]]:
    """Padding by dimension from the left; PyTorch's order starts at the last dimension."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(self, pad, value=0):
    return lax.pad(self, cast(value, self.dtype), [(low, high, 0) for low, high in _edges(pad, self.ndim)])


def _reflect(positions: np.ndarray, length: int) -> np.ndarray:
    period = max(2 * (length - 1), 1)
    return length - 1 - np.abs(positions % period - (length - 1))


def _replicate(positions: np.ndarray, length: int) -> np.ndarray:
    return np.clip(positions, 0, length - 1)


def _pad_by_index(rule_of_positions: Callable[..., Any]) -> Callable[..., Any]:
    """A padding whose elements are elements of the operand, by their index along each dimension."""

    def pad_by_index(self, padding):
        for d, (low, high) in enumerate(_edges(padding, self.ndim)):
            if low or high:
                positions = rule_of_positions(np.arange(-low, self.shape[d] + high), self.shape[d])
                self = jnp.take(self, positions, axis=d)
        return self

    return pad_by_index


def _pad_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def pad_backward(grad_output, self, padding):
        return jax.linear_transpose(lambda x: forward(x, padding), self)(grad_output)[0]

    return pad_backward


reflection_pad = rule(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
)(_pad_by_index(_reflect))
replication_pad = rule(
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)(_pad_by_index(_replicate))
rule(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)(_pad_backward(reflection_pad))
rule(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)(_pad_backward(replication_pad))
