"""Tensors filled with numbers. Random ones are created by the driver, which knows the stream.

Without `dtype` the result has the default dtype or the operand's, and the driver casts.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, default_float, divide, is_integer, to_jax
from .registry import rule


def _dtype(dtype, value=1.0):
    """The requested dtype, or PyTorch's default for a number of this kind."""
    if dtype is not None:
        return to_jax(dtype)
    kinds = {bool: np.dtype(bool), int: np.dtype(np.int64), complex: np.dtype(np.complex64)}
    return kinds.get(type(value), default_float())


@rule(aten.full.default)
def full(size, fill_value, *, dtype=None, **_):
    dtype = _dtype(dtype, fill_value)
    return lax.full(tuple(size), cast(fill_value, dtype), dtype)


@rule(aten.zeros.default, aten.empty.memory_format, aten.empty_permuted.default, aten._efficientzerotensor.default)
def zeros(size, *_, dtype=None, **__):
    """Also for uninitialized memory, which reads as zeros."""
    return full(size, 0, dtype=dtype or torch.get_default_dtype())


@rule(aten.empty_strided.default)
def empty_strided(size, stride, *, dtype=None, **_):
    return zeros(size, dtype=dtype)


@rule(aten.ones.default)
def ones(size, *, dtype=None, **_):
    return full(size, 1, dtype=dtype or torch.get_default_dtype())


@rule(aten.scalar_tensor.default)
def scalar_tensor(s, *, dtype=None, **_):
    return full((), s, dtype=dtype or torch.get_default_dtype())


@rule(aten.full_like.default)
def full_like(self, fill_value, *, dtype=None, **_):
    dtype = to_jax(dtype) if dtype else self.dtype
    return lax.full(self.shape, cast(fill_value, dtype), dtype)


@rule(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(self, *, dtype=None, **_):
    return full_like(self, 0, dtype=dtype)


@rule(aten.ones_like.default)
def ones_like(self, *, dtype=None, **_):
    return full_like(self, 1, dtype=dtype)


@rule(aten.new_full.default)
def new_full(self, size, fill_value, *, dtype=None, **_):
    dtype = to_jax(dtype) if dtype else self.dtype
    return lax.full(tuple(size), cast(fill_value, dtype), dtype)


@rule(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(self, size, *, dtype=None, **_):
    return new_full(self, size, 0, dtype=dtype)


@rule(aten.new_empty_strided.default)
def new_empty_strided(self, size, stride, *, dtype=None, **_):
    return new_full(self, size, 0, dtype=dtype)


@rule(aten.new_ones.default)
def new_ones(self, size, *, dtype=None, **_):
    return new_full(self, size, 1, dtype=dtype)


# --- Ranges -----------------------------------------------------------------------------------------------------------


def _ramp(start, step, count, dtype):
    """`start + i * step` in `dtype` (exact for integers), computed on the device."""
    i = lax.iota(dtype if dtype.kind in "iu" else np.int64, count)
    return cast(start, dtype) + cast(i, dtype) * cast(step, dtype)


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(*limits, dtype=None, **_):
    start, end, step = (0, *limits, 1) if len(limits) == 1 else (*limits, 1)[:3]
    whole = all(isinstance(x, int) for x in limits)
    target = to_jax(dtype) if dtype else np.dtype(np.int64) if whole else default_float()
    if target == np.int64:  # only for this dtype, PyTorch truncates the limits to integers first
        start, end, step = int(start), int(end), int(step)
        count = -(-(end - start) // step)
    else:
        count = math.ceil((end - start) / step)
    return _ramp(start, step, max(0, count), np.dtype(np.int64) if is_integer(target) else _wide(target))


def _wide(dtype):
    """PyTorch's CPU kernel computes floating-point ranges in double precision."""
    return np.dtype(np.float64) if dtype.kind not in "biu" else dtype


@rule(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(start, end, steps, *, dtype=None, **_):
    """From both ends towards the middle, like PyTorch, so that both ends are exact."""
    target = _dtype(dtype)
    if steps == 1:
        return jnp.full((1,), cast(start, target), target)
    wide = np.dtype(np.complex128) if target.kind == "c" else np.dtype(np.float64)
    if target.kind in "iu":
        start, end = cast(start, target), cast(end, target)
    start, end = cast(start, wide), cast(end, wide)
    step = divide(end - start, max(steps - 1, 1))
    up = _ramp(start, step, steps, wide)
    down = end - cast(lax.rev(lax.iota(np.int64, steps), [0]), wide) * step
    return lax.select(lax.iota(np.int64, steps) < steps // 2, up, down)


@rule(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor)
def logspace(start, end, steps, base=10.0, *, dtype=None, **_):
    wide = torch.complex128 if dtype is not None and dtype.is_complex else torch.float64
    if dtype is not None and to_jax(dtype).kind in "iu":
        start, end = cast(start, to_jax(dtype)), cast(end, to_jax(dtype))
    return jnp.power(base, linspace(start, end, steps, dtype=wide))


@rule(aten.eye.default, aten.eye.m)
def eye(n, m=None, *, dtype=None, **_):
    return jnp.eye(n, m, dtype=_dtype(dtype))
