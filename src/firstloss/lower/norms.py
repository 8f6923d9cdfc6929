"""Softmax and normalizations, with their derivatives; half precision is computed in float32."""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from torch.ops import aten

from . import aten as kernels
from .dtypes import axis, cast, floating, opmath, to_jax, where
from .reductions import moments
from .registry import rule


def wide(x):
    """`x` in the dtype to compute in; None stays None."""
    return None if x is None else cast(x, opmath(x.dtype))


def total(x, dims):
    """A sum that keeps its dimensions."""
    return lax.expand_dims(lax.reduce_sum(x, dims), dims)


# --- Softmax ----------------------------------------------------------------------------------------------------------


def _shifted(self, dim):
    x = cast(self, opmath(floating(self.dtype)))
    d = axis(dim, x.ndim)
    x = x if x.ndim else lax.reshape(x, (1,))
    top = lax.expand_dims(lax.reduce_max(x, (d,)), [d]) if x.size else x
    return x - top if x.size else x, d


def _in(self, dtype):
    return self if dtype is None else cast(self, to_jax(dtype))


@rule(aten.softmax.int)
def softmax(self, dim, dtype=None):
    return _softmax(_in(self, dtype), dim)


@rule(aten.log_softmax.int)
def log_softmax(self, dim, dtype=None):
    return _log_softmax(_in(self, dtype), dim)


@rule(aten._softmax.default)
def _softmax(self, dim, half_to_float=False):
    x, d = _shifted(self, dim)
    e = lax.exp(x)
    return lax.reshape(e / total(e, (d,)), self.shape)


@rule(aten._safe_softmax.default)
def safe_softmax(self, dim, dtype=None):
    """Like softmax, but a row of minus infinity gives zeros."""
    masked = lax.reduce_and(self == -math.inf, (axis(dim, self.ndim),))
    x = _softmax(_in(self, dtype), dim)
    return where(lax.expand_dims(masked, [axis(dim, self.ndim)]), 0, x)


@rule(aten._log_softmax.default)
def _log_softmax(self, dim, half_to_float=False):
    x, d = _shifted(self, dim)
    return lax.reshape(x - lax.log(total(lax.exp(x), (d,))), self.shape)


@rule(aten._softmax_backward_data.default)
def _softmax_backward_data(grad_output, output, dim, input_dtype):
    g, y = wide(grad_output), wide(output)
    if not y.ndim:
        return lax.full_like(y, 0)
    return y * (g - total(g * y, (axis(dim, y.ndim),)))


@rule(aten._log_softmax_backward_data.default)
def _log_softmax_backward_data(grad_output, output, dim, input_dtype):
    g, y = wide(grad_output), wide(output)
    if not y.ndim:
        return lax.full_like(y, 0)
    return g - lax.exp(y) * total(g, (axis(dim, y.ndim),))


# --- Layer and RMS norm -----------------------------------------------------------------------------------------------


def _inner(x, normalized_shape):
    """The normalized dimensions: the last ones."""
    return tuple(range(x.ndim - len(normalized_shape), x.ndim))


def _outer(x, normalized_shape):
    return tuple(range(x.ndim - len(normalized_shape)))


def _in_rows(x, length):
    """A row for each of the outer dimensions' elements."""
    return None if x is None else lax.reshape(x, (x.size // length, length))


def _flat(x):
    return None if x is None else lax.reshape(x, (x.size,))


def _row_norm(input, normalized_shape, weight, bias, eps, centered):
    """By a call: the output, the inverse deviations and, if rows are centered, the means."""
    rows = _in_rows(input, math.prod(normalized_shape))
    y, *of_rows = kernels.row_norm(rows, _flat(weight), _flat(bias), eps, centered)
    outer = input.shape[: input.ndim - len(normalized_shape)] + (1,) * len(normalized_shape)
    return lax.reshape(y, input.shape), *(lax.reshape(v, outer) for v in of_rows)


def _row_norm_backward(g, input, normalized_shape, mean, rstd, weight, wanted):
    """By a call: the derivatives with respect to input, weight and bias."""
    length = math.prod(normalized_shape)
    arrays = _in_rows(g, length), _in_rows(input, length), _flat(mean), _flat(rstd), _flat(weight)
    made = kernels.row_norm_backward(*arrays, wanted)
    shapes = input.shape, normalized_shape, normalized_shape
    return [None if v is None else lax.reshape(v, tuple(s)) for v, s in zip(made, shapes, strict=True)]


@rule(aten.native_layer_norm.default)
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    if isinstance(eps, float) and kernels.normalizes([input], math.prod(normalized_shape), weight, bias):
        y, rstd, mean = _row_norm(input, normalized_shape, weight, bias, eps, True)
        return y, mean, rstd
    x, dims = wide(input), _inner(input, normalized_shape)
    mean, variance = moments(x, dims, 0)
    rstd = lax.rsqrt(lax.expand_dims(variance, dims) + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * wide(weight)
    return y if bias is None else y + wide(bias), mean, rstd


def _input_gradient(g, normed, rstd, dims):
    """The derivative through `normed = (x - mean) * rstd`: `g` without its mean and its component along `normed` (Ba et
    al., Layer Normalization, 2016; holds for every norm that uses batch moments)."""
    n = math.prod(normed.shape[d] for d in dims)
    return rstd * (g - total(g, dims) / n - normed * (total(g * normed, dims) / n))


@rule(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    if any(output_mask) and kernels.normalizes([input, grad_out], math.prod(normalized_shape), mean, rstd, weight):
        return _row_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, output_mask)
    g, dims, outer = wide(grad_out), _inner(input, normalized_shape), _outer(input, normalized_shape)
    rstd = wide(rstd)
    normed = (wide(input) - wide(mean)) * rstd
    scaled = g if weight is None else g * wide(weight)
    return (
        _input_gradient(scaled, normed, rstd, dims) if output_mask[0] else None,
        lax.reduce_sum(g * normed, outer) if output_mask[1] else None,
        lax.reduce_sum(g, outer) if output_mask[2] else None,
    )


@rule(aten._fused_rms_norm.default)
def _fused_rms_norm(input, normalized_shape, weight, eps):
    x, dims = wide(input), _inner(input, normalized_shape)
    n = math.prod(normalized_shape)
    eps = float(np.finfo(x.dtype).eps) if eps is None else eps
    if isinstance(eps, float) and kernels.normalizes([input], n, weight):
        return _row_norm(input, normalized_shape, weight, None, eps, False)
    rstd = lax.rsqrt(total(x * x, dims) / n + eps)
    y = x * rstd
    return y if weight is None else y * wide(weight), rstd


@rule(aten._fused_rms_norm_backward.default)
def _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    if any(output_mask) and kernels.normalizes([input, grad_out], math.prod(normalized_shape), rstd, weight):
        wanted = (*output_mask, False)
        return _row_norm_backward(grad_out, input, normalized_shape, None, rstd, weight, wanted)[:2]
    g, dims, outer = wide(grad_out), _inner(input, normalized_shape), _outer(input, normalized_shape)
    rstd = wide(rstd)
    normed = wide(input) * rstd
    scaled = g if weight is None else g * wide(weight)
    n = math.prod(normalized_shape)
    return (
        rstd * (scaled - normed * (total(scaled * normed, dims) / n)) if output_mask[0] else None,
        lax.reduce_sum(g * normed, outer) if output_mask[1] else None,
    )


# --- Batch norm -------------------------------------------------------------------------------------------------------


def _all_but_channels(x):
    return (0, *range(2, x.ndim))


def _by_channel(values, x):
    """One value per channel, shaped for broadcasting with `x`."""
    return lax.reshape(wide(values), (values.size, *(1,) * (x.ndim - 2)))


def _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Output, saved mean and inverse deviation, and the updated running statistics."""
    running = [running_mean, running_var]
    if (
        training
        and isinstance(momentum, float)
        and (running_mean is None) == (running_var is None)
        and kernels.normalizes([input], math.prod(input.shape[2:]), weight, bias, *running)
    ):
        results = kernels.batch_norm(input, weight, bias, [v for v in running if v is not None], momentum, eps)
        return *results, *running[: 5 - len(results)]
    x = wide(input)
    dims = _all_but_channels(x)
    if training:
        mean, variance = moments(x, dims, 0)
        mean = lax.squeeze(mean, dims)
        n = math.prod(x.shape[d] for d in dims)
        if running_mean is not None:
            running_mean = momentum * mean + (1 - momentum) * wide(running_mean)
        if running_var is not None:
            running_var = momentum * (variance * (n / max(n - 1, 1))) + (1 - momentum) * wide(running_var)
    else:
        mean, variance = wide(running_mean), wide(running_var)
    rstd = lax.rsqrt(variance + eps)
    y = (x - _by_channel(mean, x)) * _by_channel(rstd, x)
    y = y if weight is None else y * _by_channel(weight, x)
    y = y if bias is None else y + _by_channel(bias, x)
    saved = (mean, rstd) if training else (lax.full((0,), 0, input.dtype),) * 2  # unused: empty, as on a CPU
    return y, *saved, running_mean, running_var


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Does not update the running statistics: capture records `_native_batch_norm_legit_functional` for that."""
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@rule(aten._native_batch_norm_legit.no_stats)
def _native_batch_norm_legit_no_stats(input, weight, bias, training, momentum, eps):
    return _batch_norm(input, weight, bias, None, None, training, momentum, eps)[:3]


@rule(aten._native_batch_norm_legit_no_training.default)
def _native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps):
    return _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@rule(aten._native_batch_norm_legit_functional.default)
def _native_batch_norm_legit_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


@rule(aten._batch_norm_with_update_functional.default)
def _batch_norm_with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps):
    y, mean, rstd, *running = _batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, rstd, lax.full((0,), 0, np.uint8), *running


@rule(aten._batch_norm_no_update.default)
def _batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps):
    saved = _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)[:3]
    return *saved, lax.full((0,), 0, np.uint8)


@rule(aten.batch_norm_backward.default)
def batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    """Despite its name, the saved tensor is the inverse deviation."""
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


@rule(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    if train and kernels.normalizes([input, grad_out], math.prod(input.shape[2:]), weight, save_mean, save_invstd):
        of_input, of_weight, of_bias = kernels.batch_norm_backward(grad_out, input, save_mean, save_invstd, weight)
        return of_input, of_weight if output_mask[1] else None, of_bias if output_mask[2] else None
    g, x = wide(grad_out), wide(input)
    dims = _all_but_channels(x)
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, lax.rsqrt(wide(running_var) + eps))
    mean, rstd = _by_channel(mean, x), _by_channel(rstd, x)
    normed = (x - mean) * rstd
    scaled = g if weight is None else g * _by_channel(weight, x)
    return (
        # the meta kernel returns it even if it is not requested; XLA removes it if it is unused
        _input_gradient(scaled, normed, rstd, dims) if train else scaled * rstd,
        lax.reduce_sum(g * normed, dims) if output_mask[1] else None,
        lax.reduce_sum(g, dims) if output_mask[2] else None,
    )


# --- Group norm -------------------------------------------------------------------------------------------------------


def _in_groups(x, N, C, HxW, group):
    return lax.reshape(x, (N, group, C // group, HxW))


@rule(aten.native_group_norm.default)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    length = C // group * HxW
    if isinstance(eps, float) and kernels.normalizes([input], HxW, weight, bias):
        y, rstd, mean = kernels.row_norm(_in_rows(input, length), weight, bias, eps, True, group, HxW)
        return lax.reshape(y, input.shape), *(lax.reshape(v, (N, group)) for v in (mean, rstd))
    x = _in_groups(wide(input), N, C, HxW, group)
    mean, variance = moments(x, (2, 3), 0)
    rstd = lax.rsqrt(lax.expand_dims(variance, (2, 3)) + eps)
    y = lax.reshape((x - mean) * rstd, input.shape)
    y = y if weight is None else y * _by_channel(weight, y)
    y = y if bias is None else y + _by_channel(bias, y)
    return y, lax.squeeze(mean, (2, 3)), lax.squeeze(rstd, (2, 3))


@rule(aten.native_group_norm_backward.default)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    length = C // group * HxW
    if any(output_mask) and kernels.normalizes([input, grad_out], HxW, mean, rstd, weight):
        arrays = _in_rows(grad_out, length), _in_rows(input, length), _flat(mean), _flat(rstd), weight
        of_input, *of_vectors = kernels.row_norm_backward(*arrays, output_mask, group, HxW)
        return None if of_input is None else lax.reshape(of_input, input.shape), *of_vectors
    g = wide(grad_out)
    mean, rstd = (lax.expand_dims(wide(m), (2, 3)) for m in (mean, rstd))
    normed = (_in_groups(wide(input), N, C, HxW, group) - mean) * rstd
    scaled = _in_groups(g if weight is None else g * _by_channel(weight, g), N, C, HxW, group)
    by_channel = (N, C, HxW)
    g = lax.reshape(g, by_channel)
    return (
        lax.reshape(_input_gradient(scaled, normed, rstd, (2, 3)), input.shape) if output_mask[0] else None,
        lax.reduce_sum(g * lax.reshape(normed, by_channel), (0, 2)) if output_mask[1] else None,
        lax.reduce_sum(g, (0, 2)) if output_mask[2] else None,
    )


# --- Weight norm ------------------------------------------------------------------------------------------------------


def _all_but(x, dim):
    return tuple(d for d in range(x.ndim) if d != axis(dim, x.ndim))


@rule(aten._weight_norm_interface.default)
def _weight_norm_interface(v, g, dim=0):
    x = wide(v)
    norm = lax.sqrt(total(x * x, _all_but(x, dim)))
    return x * (wide(g) / norm), norm


@rule(aten._weight_norm_interface_backward.default)
def _weight_norm_interface_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    gradient, v, g, norm = wide(grad_w), wide(saved_v), wide(saved_g), wide(saved_norms)
    along = total(gradient * v, _all_but(v, dim))
    return g / norm * (gradient - v * (along / (norm * norm))), along / norm
