"""Activation functions and their derivatives. Half precisions are computed in float32."""

from __future__ import annotations

import math

import jax
from jax import lax
from torch.ops import aten

from .dtypes import cast, floats, is_complex, number_in, operands, where
from .pointwise import clamp, mul
from .registry import rule
from .threefry import by_call


@rule(aten.silu.default)
def silu(self):
    (x,) = floats(self)
    return x * lax.logistic(x)


@rule(aten.silu_backward.default)
def silu_backward(grad_output, self):
    g, x = operands(grad_output, self)
    s = lax.logistic(x)
    return g * s * (1 + x * (1 - s))


_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


@rule(aten.gelu.default)
def gelu(self, *, approximate="none"):
    (x,) = operands(self)
    if approximate == "none":
        return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1 + lax.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x)))


@rule(aten.gelu_backward.default)
def gelu_backward(grad_output, self, *, approximate="none"):
    g, x = operands(grad_output, self)
    if approximate == "none":
        density = lax.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return g * (0.5 * (1 + lax.erf(x * math.sqrt(0.5))) + x * density)
    t = lax.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
    inner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


@rule(aten.tanh_backward.default)
def tanh_backward(grad_output, output):
    g, y = operands(grad_output, output)
    y = lax.conj(y) if is_complex(y.dtype) else y
    return g * (1 - y * y)


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(grad_output, output):
    g, y = operands(grad_output, output)
    y = lax.conj(y) if is_complex(y.dtype) else y
    return g * ((1 - y) * y)


@rule(aten.threshold.default)
def threshold(self, threshold, value):
    (x,) = operands(self)
    return where(x <= cast(threshold, x.dtype), value, self)


@rule(aten.threshold_backward.default)
def threshold_backward(grad_output, self, threshold):
    g, x = operands(grad_output, self)
    return where(x <= cast(threshold, x.dtype), 0, g)


@rule(aten.relu.default)
def relu(self):
    return lax.max(self, lax.full_like(self, 0))


@rule(aten.relu6.default)
def relu6(self):
    return clamp(self, 0, 6)


@rule(aten.hardtanh.default)
def hardtanh(self, min_val=-1, max_val=1):
    return clamp(self, cast(min_val, self.dtype), cast(max_val, self.dtype))


@rule(aten.hardtanh_backward.default)
def hardtanh_backward(grad_output, self, min_val, max_val):
    g, x = operands(grad_output, self)
    return where((x <= min_val) | (x >= max_val), 0, g)


@rule(aten.leaky_relu.default)
def leaky_relu(self, negative_slope=0.01):
    (x,) = operands(self)
    return where(x > 0, x, x * negative_slope)


@rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    g, x = operands(grad_output, self)
    return where(x > 0, g, g * negative_slope)


@rule(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(self, noise, lower=0.125, upper=1 / 3, training=False, rng_key=None):
    """In training, each non-positive element gets a random slope, and `noise` holds the slopes."""
    if not training:
        return leaky_relu(self, (lower + upper) / 2), noise
    (x,) = operands(self)
    slopes = where(x > 0, 1, jax.random.uniform(by_call(rng_key), x.shape, x.dtype, lower, upper))
    return x * slopes, slopes


@rule(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    if training and upper - lower > 1e-6:
        return mul(grad_output, noise)
    return leaky_relu_backward(grad_output, self, (lower + upper) / 2, self_is_result)


@rule(aten._prelu_kernel.default)
def _prelu_kernel(self, weight):
    x, w = operands(self, weight)
    return where(x > 0, x, w * x)


@rule(aten._prelu_kernel_backward.default)
def _prelu_kernel_backward(grad_output, self, weight):
    g, x, w = operands(grad_output, self, weight)
    return where(x > 0, g, w * g), where(x > 0, 0, x * g)


@rule(aten.elu.default)
def elu(self, alpha=1, scale=1, input_scale=1):
    (x,) = operands(self)
    return where(x > 0, x * scale, lax.expm1(x * input_scale) * (alpha * scale))


@rule(aten.elu_backward.default)
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    g, x = operands(grad_output, self_or_result)
    slope = x + alpha * scale if is_result else lax.exp(x * input_scale) * (alpha * scale)
    return where(x <= 0, g * input_scale * slope, g * scale)


@rule(aten.celu.default)
def celu(self, alpha=1.0):
    return elu(self, alpha, 1.0, 1.0 / alpha)


@rule(aten.softplus.default)
def softplus(self, beta=1, threshold=20):
    (x,) = operands(self)
    scaled = x * beta
    return where(scaled > threshold, x, lax.log1p(lax.exp(scaled)) / beta)


@rule(aten.softplus_backward.default)
def softplus_backward(grad_output, self, beta, threshold):
    g, x = operands(grad_output, self)
    scaled = x * beta
    return where(scaled > threshold, g, g * lax.logistic(scaled))


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(self):
    """The second result is a buffer for the backward pass, which eager PyTorch fills on the CPU only."""
    (x,) = operands(self)
    small = lax.exp(-lax.abs(x))
    return lax.min(x, lax.full_like(x, 0)) - lax.log1p(small), small


@rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad_output, self, buffer):
    g, x = operands(grad_output, self)
    return g * lax.logistic(-x)


@rule(aten.mish.default)
def mish(self):
    (x,) = operands(self)
    return x * lax.tanh(lax.log1p(lax.exp(x)))


@rule(aten.mish_backward.default)
def mish_backward(grad_output, self):
    g, x = operands(grad_output, self)
    s = lax.logistic(x)
    t = lax.tanh(lax.log1p(lax.exp(x)))
    return g * (t + x * s * (1 - t * t))


@rule(aten.hardsigmoid.default)
def hardsigmoid(self):
    (x,) = operands(self)
    return lax.clamp(cast(0.0, x.dtype), x + 3, cast(6.0, x.dtype)) / 6


@rule(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad_output, self):
    g, x = operands(grad_output, self)
    return where((x > -3) & (x < 3), g / 6, 0)


@rule(aten.hardswish.default)
def hardswish(self):
    (x,) = operands(self)
    return x * lax.clamp(cast(0.0, x.dtype), x + 3, cast(6.0, x.dtype)) / 6


@rule(aten.hardswish_backward.default)
def hardswish_backward(grad_output, self):
    g, x = operands(grad_output, self)
    return where(x <= -3, 0, where(x < 3, g * (x / 3 + 0.5), g))


@rule(aten.hardshrink.default)
def hardshrink(self, lambd=0.5):
    (x,) = operands(self)
    lambd = number_in(lambd, self.dtype)
    return where((x >= -lambd) & (x <= lambd), 0, x)


@rule(aten.softshrink.default)
def softshrink(self, lambd=0.5):
    (x,) = operands(self)
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0))


@rule(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(grad_output, self, lambd):
    g, x = operands(grad_output, self)
    return where((x >= -lambd) & (x <= lambd), 0, g)


@rule(aten.glu.default)
def glu(self, dim=-1):
    (x,) = floats(self)
    a, b = lax.split(x, (x.shape[dim] // 2,) * 2, dim % x.ndim)
    return a * lax.logistic(b)


@rule(aten.glu_backward.default)
def glu_backward(grad_output, self, dim):
    a, b = lax.split(self, (self.shape[dim] // 2,) * 2, dim % self.ndim)
    g, a, b = operands(grad_output, a, b)
    s = lax.logistic(b)
    return lax.concatenate([g * s, g * a * s * (1 - s)], dim % self.ndim)


@rule(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output, mask, scale):
    (g,) = floats(grad_output)
    return g * cast(mask, g.dtype) * cast(scale, g.dtype)
