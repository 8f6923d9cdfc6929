"""Operations on lists of tensors: the optimizers' foreach operations, and the fused optimizer steps.

An operation `_foreach_x` applies `x` to every element of its lists, so these rules are derived from those of `x`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from torch.ops import aten

from . import pointwise, rearrange, reductions, special_functions  # noqa: F401 (special_functions: by name)
from .dtypes import cast, operands, opmath
from .registry import RULES, rule


def _in_rows(element: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a function to a convolution's weights in half precision as if they were matrices.

    XLA on a CPU generates one loop per dimension. It unrolls those of a 3 x 3 kernel, and then fails to vectorize the
    rounding to half precision, which takes eight times as long.
    """

    def in_rows(*arrays):
        whole = [a for a in arrays if a.ndim]
        like = arrays[0]
        if like.ndim < 3 or opmath(like.dtype) == like.dtype:
            return element(*arrays)
        if any(a.shape != like.shape or a.dtype != like.dtype for a in whole):
            return element(*arrays)
        rows = (like.shape[0], math.prod(like.shape[1:]))
        y = element(*(lax.reshape(a, rows) if a.ndim else a for a in arrays))
        # rounded here: after the reshape, XLA would round in the original shape
        return lax.reshape(cast(y, like.dtype), like.shape) if y.ndim else y

    return in_rows


def _traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make JAX trace and lower a function once for all elements of one shape: a list has hundreds."""

    @functools.lru_cache(maxsize=4096)
    def jitted(template: tuple[Any, ...], options: tuple[Any, ...]) -> Callable[..., Any]:
        def element(*arrays):
            rest = iter(arrays)
            row = [next(rest) if constant is None else constant[1] for constant in template]
            positional = len(row) - len(options)
            return function(*row[:positional], **dict(zip(options, row[positional:], strict=True)))

        in_rows = _in_rows(element)
        in_rows.__name__ = in_rows.__qualname__ = function.__name__
        return jax.jit(in_rows)

    def call(*row, **options):
        row = (*row, *options.values())
        template = tuple(None if hasattr(a, "ndim") else (type(a), a) for a in row)
        return jitted(template, tuple(options))(*(a for a in row if hasattr(a, "ndim")))

    return call


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a function to the elements of lists; an argument that is not a list is used for all."""
    function = _traced_once(function)

    def foreach(self, *args, **options):
        length = len(self) if isinstance(self, (list, tuple)) else len(args[0])
        columns = (a if isinstance(a, (list, tuple)) else itertools.repeat(a) for a in (self, *args))
        return tuple(function(*row, **options) for row in itertools.islice(zip(*columns, strict=False), length))

    return foreach


_NAMES = {
    "add": pointwise.add,
    "sub": pointwise.sub,
    "mul": pointwise.mul,
    "div": pointwise.div,
    "maximum": pointwise.clamp_min,
    "minimum": pointwise.clamp_max,
    "clamp_min": pointwise.clamp_min,
    "clamp_max": pointwise.clamp_max,
    "lerp": pointwise.lerp,
    "copy": rearrange.copy,
    "zero": rearrange.zero,
    "max": reductions.amax,
}
_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
_NAMES |= {name: RULES[getattr(aten, name).default] for name in _UNARY}

for _name, _function in _NAMES.items():
    _packet = getattr(aten, f"_foreach_{_name}")
    for _overload in _packet.overloads():
        if not _overload.endswith("out"):
            rule(getattr(_packet, _overload))(_each(_function))


@rule(aten._foreach_pow.List, aten._foreach_pow.Scalar, aten._foreach_pow.ScalarList, aten._foreach_pow.ScalarAndTensor)
def _foreach_pow(self, exponent):
    def power(x, y):
        return pointwise.pow_tensor(x, y) if hasattr(y, "ndim") else pointwise.pow_scalar(x, y)

    return _each(power)(self, exponent)


@rule(aten._foreach_norm.Scalar)
def _foreach_norm(self, ord=2, dtype=None):
    return tuple(reductions.linalg_vector_norm(x, ord, dtype=dtype) for x in self)


def _add_combined(combine: Callable[..., Any]) -> Callable[..., Any]:
    """`self + value * combine(a, b)`, where `value` is a number, a list of them, or a tensor with an element each."""

    @_traced_once
    def combined(x, a, b, v):
        x, a, b = operands(x, a, b)
        return x + cast(v, x.dtype) * combine(a, b)

    def foreach(self, tensor1, tensor2, value=1):
        if hasattr(value, "ndim"):
            value = [value if value.ndim == 0 else value[i] for i in range(len(self))]
        values = value if isinstance(value, list) else itertools.repeat(value)
        return tuple(combined(*row) for row in zip(self, tensor1, tensor2, values, strict=False))

    return foreach


rule(aten._foreach_addcmul.Scalar, aten._foreach_addcmul.ScalarList, aten._foreach_addcmul.Tensor)(
    _add_combined(lax.mul)
)
rule(aten._foreach_addcdiv.Scalar, aten._foreach_addcdiv.ScalarList, aten._foreach_addcdiv.Tensor)(
    _add_combined(lax.div)
)


# --- Fused optimizers -------------------------------------------------------------------------------------------------


def _unscaled(grads, grad_scale):
    return grads if grad_scale is None else [cast(g, opmath(g.dtype)) / grad_scale for g in grads]


def _unless(found_inf, new, old):
    """Keep the old values if the gradient scaler has found an infinity."""
    if found_inf is None:
        return new
    skip = lax.reshape(found_inf, ()) == 1
    return [lax.select(skip, cast(o, n.dtype), n) for n, o in zip(new, old, strict=True)]


def _fused_adam_step(decay: Callable[..., Any]) -> Callable[..., Any]:
    """Adam (Kingma and Ba, 2015), in the order of PyTorch's fused CPU kernel; `decay` applies the weight decay."""

    def fused(
        self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *,
        lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, grad_scale=None, found_inf=None,
    ):  # fmt: skip
        unscaled = _unscaled(grads, grad_scale)
        new: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
        for i, (p, g, m, v, step) in enumerate(zip(self, unscaled, exp_avgs, exp_avg_sqs, state_steps, strict=True)):
            p, g, m, v = operands(p, g, m, v)
            rate, step = cast(lr, p.dtype), cast(step, p.dtype)
            p, g = decay(p, -g if maximize else g, rate, weight_decay)
            m = m + (1 - beta1) * (g - m)
            v = beta2 * v + (1 - beta2) * g * g
            largest = v
            if amsgrad:
                largest = lax.max(cast(max_exp_avg_sqs[i], p.dtype), v)
                new[3].append(largest)
            root = lax.sqrt(largest) / lax.sqrt(1 - cast(beta2, p.dtype) ** step)
            p = p - rate / (1 - cast(beta1, p.dtype) ** step) * m / (root + eps)
            for results, value in zip(new[:3], (p, m, v), strict=True):
                results.append(value)
        old = (self, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        p, m, v, largest = (_unless(found_inf, n, o) for n, o in zip(new, old, strict=True))
        return p, unscaled, m, v, largest

    return fused


rule(aten._fused_adamw.default, aten._fused_adamw.tensor_lr)(
    _fused_adam_step(lambda p, g, rate, weight_decay: (p - rate * weight_decay * p, g))
)
rule(aten._fused_adam.default, aten._fused_adam.tensor_lr)(
    _fused_adam_step(lambda p, g, rate, weight_decay: (p, g + weight_decay * p))
)


@rule(aten._fused_sgd.default, aten._fused_sgd.tensor_lr)
def _fused_sgd(
    self, grads, momentum_buffer_list, *,
    weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, grad_scale=None, found_inf=None,
):  # fmt: skip
    unscaled = _unscaled(grads, grad_scale)
    parameters, buffers = [], []
    for i, (p, g) in enumerate(zip(self, unscaled, strict=True)):
        p, g = operands(p, g)
        g = (-g if maximize else g) + weight_decay * p
        if momentum:
            b = cast(momentum_buffer_list[i], p.dtype)
            b = g if is_first_step else momentum * b + (1 - dampening) * g
            buffers.append(b)
            g = g + momentum * b if nesterov else b
        parameters.append(p - cast(lr, p.dtype) * g)
    return _unless(found_inf, parameters, self), unscaled, _unless(found_inf, buffers, momentum_buffer_list)


@rule(aten._fused_adagrad.default)
def _fused_adagrad(
    self, grads, state_sums, state_steps, *,
    lr, lr_decay, weight_decay, eps, maximize, grad_scale=None, found_inf=None,
):  # fmt: skip
    """Adagrad (Duchi et al., 2011)."""
    unscaled = _unscaled(grads, grad_scale)
    parameters, sums = [], []
    for p, g, s, step in zip(self, unscaled, state_sums, state_steps, strict=True):
        p, g, s = operands(p, g, s)
        g = (-g if maximize else g) + weight_decay * p
        s = s + g * g
        rate = cast(lr, p.dtype) / (1 + (cast(step, p.dtype) - 1) * lr_decay)
        parameters.append(p - rate * g / (lax.sqrt(s) + eps))
        sums.append(s)
    return _unless(found_inf, parameters, self), unscaled, _unless(found_inf, sums, state_sums), state_steps
