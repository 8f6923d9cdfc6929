"""Reductions over dimensions, and cumulative ones.

Half precisions accumulate in float32 and integers in int64, as in PyTorch.
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import (
    accumulator,
    axes,
    axis,
    cast,
    divide,
    floating,
    is_complex,
    is_integer,
    operands,
    opmath,
    to_jax,
    where,
)
from .pointwise import logaddexp
from .registry import rule


def keep_dims(reduced, like, dims, keepdim: bool):
    """Restore reduced dimensions with size 1 if `keepdim`."""
    return lax.expand_dims(reduced, dims) if keepdim and like.ndim else reduced


def _summand(self, dtype):
    return cast(self, accumulator(self.dtype) if dtype is None else opmath(to_jax(dtype)))


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(self, dim=None, keepdim=False, *, dtype=None):
    dims = axes(dim, self.ndim)
    x = _summand(self, dtype)
    return keep_dims(lax.reduce_or(x, dims) if x.dtype == bool else lax.reduce_sum(x, dims), self, dims, keepdim)


@rule(aten.nansum.default)
def nansum(self, dim=None, keepdim=False, *, dtype=None):
    return sum_(self if is_integer(self.dtype) else where(self != self, 0, self), dim, keepdim, dtype=dtype)


def _count(self, dims) -> int:
    return math.prod(self.shape[d] for d in dims)


@rule(aten.mean.default, aten.mean.dim)
def mean(self, dim=None, keepdim=False, *, dtype=None):
    dims = axes(dim, self.ndim)
    total = lax.reduce_sum(cast(self, opmath(to_jax(dtype)) if dtype else opmath(self.dtype)), dims)
    return keep_dims(divide(total, _count(self, dims)), self, dims, keepdim)


@rule(aten.prod.default, aten.prod.dim_int)
def prod(self, dim=None, keepdim=False, *, dtype=None):
    dims = axes(dim, self.ndim)
    x = _summand(self, dtype)
    return keep_dims(lax.reduce_and(x, dims) if x.dtype == bool else lax.reduce_prod(x, dims), self, dims, keepdim)


def _extreme(reduce, self, dim, keepdim):
    dims = axes(dim, self.ndim)
    return keep_dims(reduce(self, dims), self, dims, keepdim)


@rule(aten.amax.default, aten.max.default)
def amax(self, dim=(), keepdim=False):
    return _extreme(lax.reduce_max, self, dim, keepdim)


@rule(aten.amin.default, aten.min.default)
def amin(self, dim=(), keepdim=False):
    return _extreme(lax.reduce_min, self, dim, keepdim)


@rule(aten.aminmax.default)
def aminmax(self, *, dim=None, keepdim=False):
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


@rule(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)
def any_(self, dim=None, keepdim=False):
    return _extreme(lax.reduce_or, self != 0, dim, keepdim)


@rule(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
def all_(self, dim=None, keepdim=False):
    return _extreme(lax.reduce_and, self != 0, dim, keepdim)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(self, dim=None):
    return sum_(self != 0, dim)


# --- Index of the extreme: the first of equals, NaN before any number -------------------------------------------------


def _index_of_extreme(find, self, dim, keepdim):
    x = cast(self, np.dtype(np.int8)) if self.dtype == bool else self
    if dim is None:
        position = find(lax.reshape(x, (x.size,)), 0, np.int64)
        return lax.reshape(position, (1,) * self.ndim) if keepdim else position
    if self.ndim == 0:
        return np.int64(0)
    d = axis(dim, self.ndim)
    return keep_dims(find(x, d, np.int64), self, (d,), keepdim)


@rule(aten.argmax.default)
def argmax(self, dim=None, keepdim=False):
    return _index_of_extreme(lax.argmax, self, dim, keepdim)


@rule(aten.argmin.default)
def argmin(self, dim=None, keepdim=False):
    return _index_of_extreme(lax.argmin, self, dim, keepdim)


@rule(aten.max.dim)
def max_dim(self, dim, keepdim=False):
    return amax(self, dim, keepdim), argmax(self, dim, keepdim)


@rule(aten.min.dim)
def min_dim(self, dim, keepdim=False):
    return amin(self, dim, keepdim), argmin(self, dim, keepdim)


# --- Spread -----------------------------------------------------------------------------------------------------------


def moments(x, dims, correction):
    """Mean (with dimensions kept) and variance of an array in the dtype of the computation."""
    count = _count(x, dims)
    average = lax.expand_dims(lax.reduce_sum(x, dims) / count, dims)
    centred = x - average
    squares = lax.real(centred * lax.conj(centred)) if is_complex(x.dtype) else centred * centred
    freedom = max(count - correction, 0)
    summed = lax.reduce_sum(squares, dims)
    return average, lax.div(summed, cast(float(freedom), summed.dtype))


@rule(aten.var_mean.correction)
def var_mean(self, dim=None, *, correction=None, keepdim=False):
    dims = axes(dim, self.ndim)
    average, variance = moments(cast(self, opmath(self.dtype)), dims, 1 if correction is None else correction)
    return keep_dims(variance, self, dims, keepdim), average if keepdim else lax.squeeze(average, dims)


@rule(aten.var.correction)
def var(self, dim=None, *, correction=None, keepdim=False):
    return var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


@rule(aten.std.correction)
def std(self, dim=None, *, correction=None, keepdim=False):
    return lax.sqrt(var(self, dim, correction=correction, keepdim=keepdim))


@rule(aten.std_mean.correction)
def std_mean(self, dim=None, *, correction=None, keepdim=False):
    variance, average = var_mean(self, dim, correction=correction, keepdim=keepdim)
    return lax.sqrt(variance), average


def _by_flag(by_correction):
    """The older overloads: a flag `unbiased` for correction 1 or 0, after the dimensions, if any."""

    def with_flag(self, *args, unbiased=True, keepdim=False):
        dim = None
        if args and not isinstance(args[0], bool):
            dim, args = args[0], args[1:]
        if args:
            unbiased, args = args[0], args[1:]
        return by_correction(self, dim, correction=int(unbiased), keepdim=args[0] if args else keepdim)

    return with_flag


rule(aten.var.default, aten.var.dim)(_by_flag(var))
rule(aten.std.default, aten.std.dim)(_by_flag(std))
rule(aten.var_mean.default, aten.var_mean.dim)(_by_flag(var_mean))
rule(aten.std_mean.default, aten.std_mean.dim)(_by_flag(std_mean))


# --- Norms ------------------------------------------------------------------------------------------------------------


@rule(aten.linalg_vector_norm.default)
def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = lax.abs(cast(self, opmath(to_jax(dtype) if dtype else self.dtype)))
    dims = axes(dim, self.ndim)
    if ord == math.inf:
        norm = lax.reduce_max(x, dims)
    elif ord == -math.inf:
        norm = lax.reduce_min(x, dims)
    elif ord == 0:
        norm = lax.reduce_sum(cast(x != 0, x.dtype), dims)
    elif ord == 1:
        norm = lax.reduce_sum(x, dims)
    elif ord == 2:
        norm = lax.sqrt(lax.reduce_sum(x * x, dims))
    else:
        norm = jnp.power(lax.reduce_sum(jnp.power(x, float(ord)), dims), 1 / ord)
    return keep_dims(norm, self, dims, keepdim)


@rule(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype)
def norm(self, p=2, dim=None, keepdim=False, *, dtype=None):
    return linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@rule(aten.dist.default)
def dist(self, other, p=2):
    return linalg_vector_norm(lax.sub(*operands(self, other)), p)


@rule(aten.renorm.default)
def renorm(self, p, dim, maxnorm):
    """Scale down each slice with a norm above `maxnorm`."""
    dims = [d for d in range(self.ndim) if d != axis(dim, self.ndim)]
    norms = linalg_vector_norm(self, p, dims, True)
    return self * cast(where(norms > maxnorm, maxnorm / (norms + 1e-7), lax.full_like(norms, 1)), self.dtype)


@rule(aten.logsumexp.default)
def logsumexp(self, dim, keepdim=False):
    x = cast(self, opmath(floating(self.dtype)))
    dims = axes(dim, self.ndim)
    if self.size == 0:
        return lax.log(sum_(lax.exp(x), dim, keepdim))
    top = lax.expand_dims(lax.reduce_max(lax.real(x) if is_complex(x.dtype) else x, dims), dims)
    top = where(lax.abs(top) == math.inf, 0, top)
    return keep_dims(lax.log(lax.reduce_sum(lax.exp(x - top), dims)) + lax.squeeze(top, dims), self, dims, keepdim)


# --- Cumulative reductions --------------------------------------------------------------------------------------------


@rule(aten.cumsum.default)
def cumsum(self, dim, *, dtype=None):
    x = _summand(self, dtype)
    return lax.cumsum(x, axis(dim, x.ndim)) if x.ndim else x


@rule(aten.cumprod.default)
def cumprod(self, dim, *, dtype=None):
    x = _summand(self, dtype)
    return lax.cumprod(x, axis(dim, x.ndim)) if x.ndim else x


@rule(aten.logcumsumexp.default)
def logcumsumexp(self, dim):
    x = cast(self, opmath(self.dtype))
    if x.ndim and is_complex(x.dtype):
        return lax.associative_scan(logaddexp, x, axis=axis(dim, x.ndim))
    return lax.cumlogsumexp(x, axis(dim, x.ndim)) if x.ndim else x


def _running_extreme(better, self, dim):
    """Values and indices; the last of equals, and NaN from its first occurrence on, as in the CPU kernel."""
    d = axis(dim, self.ndim)
    if self.ndim == 0:
        return self, np.int64(0)
    positions = lax.broadcasted_iota(np.int64, self.shape, d)

    def later(left, right):
        (x, i), (y, j) = left, right
        take = better(y, x) | (y != y)
        return where(take, y, x), where(take, j, i)

    return lax.associative_scan(later, (self, positions), axis=d)


@rule(aten.cummax.default)
def cummax(self, dim):
    return _running_extreme(lambda y, x: y >= x, self, dim)


@rule(aten.cummin.default)
def cummin(self, dim):
    return _running_extreme(lambda y, x: y <= x, self, dim)
