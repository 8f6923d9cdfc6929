"""Discrete Fourier transforms. `normalization` is PyTorch's enum: 0 none, 1 root of the length, 2 length."""

from __future__ import annotations

import math

from jax import numpy as jnp
from torch.ops import aten

from .dtypes import axis, cast, floating, opmath, real_of
from .registry import rule


def _normalized(y, length: int, normalization: int):
    if normalization == 0:
        return y
    return y * cast((1 / length) if normalization == 2 else 1 / math.sqrt(length), real_of(y.dtype))


def _one_sided(x, dims):
    """The transform of a real signal, with the last dimension reduced to the half that determines the rest."""
    return jnp.fft.fftn(jnp.fft.rfft(x, axis=dims[-1]), axes=dims[:-1]) if dims[:-1] else jnp.fft.rfft(x, axis=dims[-1])


@rule(aten._fft_c2c.default)
def _fft_c2c(self, dim, normalization, forward):
    if not dim:
        return self
    dims = [axis(d, self.ndim) for d in dim]
    length = math.prod(self.shape[d] for d in dims)
    y = jnp.fft.fftn(self, axes=dims) if forward else jnp.fft.ifftn(self, axes=dims, norm="forward")
    return _normalized(y, length, normalization)


@rule(aten._fft_r2c.default)
def _fft_r2c(self, dim, normalization, onesided):
    x = cast(self, opmath(floating(self.dtype)))
    dims = [axis(d, self.ndim) for d in dim]
    y = _one_sided(x, dims) if onesided else jnp.fft.fftn(x, axes=dims)
    return _normalized(y, math.prod(self.shape[d] for d in dims), normalization)


@rule(aten._fft_c2r.default)
def _fft_c2r(self, dim, normalization, last_dim_size):
    """The inverse for a real signal, whose length is given, as the half spectrum does not determine it."""
    *others, last = [axis(d, self.ndim) for d in dim]
    x = jnp.fft.ifftn(self, axes=others, norm="forward") if others else self
    y = jnp.fft.irfft(x, n=last_dim_size, axis=last, norm="forward")
    length = math.prod(self.shape[d] for d in others) * last_dim_size
    return _normalized(y, length, normalization)
