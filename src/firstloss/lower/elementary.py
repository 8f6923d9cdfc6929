"""Unary pointwise operations: elementary functions, rounding, tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from . import aten as kernels
from .dtypes import (
    cast,
    divide,
    floats,
    is_complex,
    is_integer,
    operands,
    opmath,
    where,
)
from .registry import register, rule
from .unfused import computed_once


def _log2(x: Any) -> Any:
    """Exact for powers of two: with log(x) / log(2), the floor of some would be 1 less."""
    if is_complex(x.dtype):
        return lax.log(x) / cast(math.log(2), x.dtype)
    mantissa, exponent = jnp.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = where(low, 2 * mantissa, mantissa), where(low, exponent - 1, exponent)
    return cast(exponent, x.dtype) + lax.log(mantissa) / math.log(2)


def _sign(x: Any) -> Any:
    """The sign of NaN is 0 in PyTorch, and NaN in XLA."""
    if is_complex(x.dtype):
        return lax.sign(x)
    return x if x.dtype.kind == "b" else where(x != x, 0, lax.sign(x))


def exp2(x: Any) -> Any:
    """XLA computes exp(x log 2), whose error grows with x; here only of the fraction, so integer powers are exact."""
    if is_complex(x.dtype):
        return lax.exp2(x)
    whole = lax.clamp(cast(-2200, x.dtype), _nearest_even(x), cast(2200, x.dtype))
    part = x - whole
    return jnp.ldexp(where(part == 0, 1, lax.exp2(part)), cast(whole, np.dtype(np.int32)))


def _sinc(x: Any) -> Any:
    scaled = x * math.pi
    return where(x == 0, 1, lax.sin(scaled) / where(x == 0, 1, scaled))


def _frac(x: Any) -> Any:
    return x - trunc(x)


def trunc(x: Any) -> Any:
    return lax.select(x < 0, lax.ceil(x), lax.floor(x))


def _nearest_even(x: Any) -> Any:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _angle(x: Any) -> Any:
    return jnp.angle(x) if is_complex(x.dtype) else where(x < 0, math.pi, where(x != x, x, 0))


# Sines of so few numbers are a table, such as those of rotary embeddings: computed once in a step on one CPU device.
# (XLA computed them again for each head and row of the batch, in the step of a Llama for 3% of its time.)
_TABLE = 1 << 16


def _in_table(function: Callable[..., Any]) -> Callable[..., Any]:
    def tabulated(x: Any) -> Any:
        y = function(x)
        return computed_once(y) if 1 < y.size <= _TABLE and kernels.usable() else y

    return tabulated


# Results are floating point for every operand.
_FLOAT_UNARY = {
    aten.sin.default: _in_table(lax.sin),
    aten.cos.default: _in_table(lax.cos),
    aten.tan.default: lax.tan,
    aten.asin.default: lax.asin,
    aten.acos.default: lax.acos,
    aten.atan.default: lax.atan,
    aten.sinh.default: lax.sinh,
    aten.cosh.default: lax.cosh,
    aten.tanh.default: lax.tanh,
    aten.asinh.default: lax.asinh,
    aten.acosh.default: lax.acosh,
    aten.atanh.default: lax.atanh,
    aten.exp.default: lax.exp,
    aten.exp2.default: exp2,
    aten.special_exp2.default: exp2,
    aten.expm1.default: lax.expm1,
    aten.log.default: lax.log,
    aten.log1p.default: lax.log1p,
    aten.log2.default: _log2,
    aten.log10.default: lambda x: lax.log(x) / cast(math.log(10), x.dtype) if is_complex(x.dtype) else jnp.log10(x),
    aten.sqrt.default: lax.sqrt,
    aten.rsqrt.default: lax.rsqrt,
    aten.reciprocal.default: lambda x: lax.div(lax.full_like(x, 1), x),
    aten.sigmoid.default: lax.logistic,
    aten.sinc.default: _sinc,
    aten.angle.default: _angle,
    aten.deg2rad.default: lambda x: x * cast(math.pi / 180, x.dtype),
    aten.rad2deg.default: lambda x: x * cast(180 / math.pi, x.dtype),
}

# Results have the operand's dtype; entries that round return integers unchanged.
_UNARY = {
    aten.neg.default: lax.neg,
    aten.abs.default: lambda x: x if x.dtype.kind in "bu" else lax.abs(x),
    aten.sign.default: _sign,
    aten.sgn.default: _sign,
    aten.square.default: lax.square,
    aten.conj.default: lambda x: lax.conj(x) if is_complex(x.dtype) else x,
    aten._conj.default: lambda x: lax.conj(x) if is_complex(x.dtype) else x,
    aten._conj_physical.default: lambda x: lax.conj(x) if is_complex(x.dtype) else x,
    aten.conj_physical.default: lambda x: lax.conj(x) if is_complex(x.dtype) else x,
    aten.resolve_conj.default: lambda x: x,
    aten.resolve_neg.default: lambda x: x,
    aten._neg_view.default: lax.neg,
    aten.positive.default: lambda x: x,
    aten.real.default: lambda x: lax.real(x) if is_complex(x.dtype) else x,
    aten.imag.default: lambda x: lax.imag(x),
    aten.bitwise_not.default: lax.bitwise_not,
    aten.logical_not.default: lambda x: x == 0,
    aten.isnan.default: lambda x: x != x,
    aten.isinf.default: lambda x: _any_part(lambda part: lax.abs(part) == math.inf, x),
    aten.isposinf.default: lambda x: x == math.inf,
    aten.isneginf.default: lambda x: x == -math.inf,
    aten.signbit.default: lambda x: x < 0 if is_integer(x.dtype) else jnp.signbit(x),
}
_ROUNDING = {
    aten.floor.default: lax.floor,
    aten.ceil.default: lax.ceil,
    aten.trunc.default: trunc,
    aten.round.default: _nearest_even,
    aten.frac.default: _frac,
}


def _any_part(test: Callable[..., Any], x: Any) -> Any:
    if is_integer(x.dtype):
        return lax.full_like(x, False, np.bool_)
    return test(lax.real(x)) | test(lax.imag(x)) if is_complex(x.dtype) else test(x)


for _overload, _function in _FLOAT_UNARY.items():
    register(_overload, lambda self, f=_function: f(*floats(self)))
for _overload, _function in _UNARY.items():
    register(_overload, lambda self, f=_function: f(cast(self, opmath(self.dtype))))
for _overload, _function in _ROUNDING.items():
    register(
        _overload,
        lambda self, f=_function: self if is_integer(self.dtype) else f(cast(self, opmath(self.dtype))),
    )


@rule(aten.round.decimals)
def round_decimals(self, *, decimals):
    if is_integer(self.dtype):
        return self
    (x,) = operands(self)
    ten = cast(10.0 ** abs(decimals), x.dtype)
    return divide(_nearest_even(x * ten), ten) if decimals >= 0 else _nearest_even(divide(x, ten)) * ten


@rule(aten.logit.default)
def logit(self, eps=None):
    (x,) = floats(self)
    x = x if eps is None else lax.clamp(cast(eps, x.dtype), x, cast(1 - eps, x.dtype))
    return lax.log(x / (1 - x))


@rule(aten.logit_backward.default)
def logit_backward(grad_output, self, eps=None):
    g, x = operands(grad_output, self)
    slope = g / (x * (1 - x))
    if eps is None:
        return where((x < 0) | (x > 1), math.nan, slope)
    return where((x < eps) | (x > 1 - eps), 0, slope)


@rule(aten.nan_to_num.default)
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    if is_integer(self.dtype):
        return self
    limits = jnp.finfo(self.dtype)

    def replace_real(x):
        x = where(x != x, 0.0 if nan is None else nan, x)
        x = where(x == math.inf, float(limits.max) if posinf is None else posinf, x)
        return where(x == -math.inf, float(limits.min) if neginf is None else neginf, x)

    if is_complex(self.dtype):
        return lax.complex(replace_real(lax.real(self)), replace_real(lax.imag(self)))
    return replace_real(self)
