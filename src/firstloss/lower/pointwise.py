"""Pointwise operations with two or more operands: arithmetic, comparisons, bits. See `elementary.py` for unary ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import (
    broadcast,
    cast,
    divide,
    error_value,
    floating,
    floats,
    is_complex,
    is_integer,
    is_number,
    kept,
    narrowed,
    number_in,
    operands,
    opmath,
    promoted,
    rounded,
    times,
    where,
)
from .elementary import exp2, trunc
from .registry import register, rule

# --- Functions of two operands ----------------------------------------------------------------------------------------


@rule(aten.add.Tensor, aten.add.Scalar)
def add(self, other, alpha=1):
    x, y = narrowed(self, other)
    if x.dtype == bool:
        return x | (y & cast(alpha, y.dtype))
    y = times(y, number_in(alpha, promoted(self, other)))
    return lax.add(x, kept(y, x) if _is_scalar(other) else y)


def _is_scalar(x: Any) -> bool:
    """Whether an operand may be a constant: a number, or an array of one element."""
    return is_number(x) or x.size == 1


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(self, other, alpha=1):
    x, y = narrowed(self, other)
    y = times(y, number_in(alpha, promoted(self, other)))
    return lax.sub(x, kept(y, x) if _is_scalar(other) else y)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(self, other, alpha=1):
    y, x = narrowed(self, other)
    return lax.sub(x, times(y, number_in(alpha, promoted(self, other))))


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(self, other):
    x, y = operands(self, other)
    return x & y if x.dtype == bool else lax.mul(x, y)


def _of_integers(result: Any, divisor: Any) -> Any:
    """A quotient or remainder, with the error value for integers divided by zero, where eager PyTorch raises."""
    mark = error_value(result.dtype) if result.dtype.kind in "iu" else None
    return result if mark is None else where(divisor == 0, cast(mark, result.dtype), result)


def _rem(x: Any, y: Any) -> Any:
    return _of_integers(lax.rem(x, y), y)


def _floor_divide(x: Any, y: Any) -> Any:
    """Round towards minus infinity as Python does: exactly, unlike `floor(x / y)`, whose quotient may be rounded up.

    For floating point the steps are those of CPython's `float_floor_div`, like in PyTorch.
    """
    if is_integer(x.dtype):
        quotient = lax.div(x, y)
        if x.dtype.kind == "u":
            return _of_integers(quotient, y)
        return _of_integers(quotient - cast((lax.rem(x, y) != 0) & ((x < 0) != (y < 0)), x.dtype), y)
    remainder = lax.rem(x, y)
    quotient = (x - remainder) / y
    quotient = where((remainder != 0) & ((y < 0) != (remainder < 0)), quotient - 1, quotient)
    floored = lax.floor(quotient)
    floored = where(quotient - floored > 0.5, floored + 1, floored)
    floored = where(quotient == 0, jnp.copysign(lax.full_like(x, 0), x / y), floored)
    return where(y == 0, x / y, floored)


@rule(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(self, other):
    return divide(*floats(self, other))


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(self, other, *, rounding_mode):
    if rounding_mode is None:
        return div(self, other)
    x, y = operands(self, other)
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = divide(x, y)
    if is_integer(x.dtype):
        return _of_integers(quotient, y)
    return trunc(rounded(quotient, promoted(self, other)))  # rounded before truncation, so 2.999 is 3 in bfloat16


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(self, other):
    return _floor_divide(*operands(self, other))


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(self, other):
    """The remainder with the sign of the divisor."""
    x, y = narrowed(self, other)
    result = lax.rem(x, y)
    return _of_integers(where((result != 0) & ((y < 0) != (result < 0)), result + y, result), y)


@rule(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(self, exponent):
    x, y = narrowed(self, exponent)
    return _power(x, y)


def _power(x: Any, y: Any) -> Any:
    if not is_integer(x.dtype):
        return jnp.power(x, y)
    if x.dtype.kind != "i":
        return jnp.power(x, y)
    # For integers, 1 / x is 0 unless x is 1 or -1.
    inverse = where(x == 1, 1, where(x == -1, where(y % 2 == 0, lax.full_like(x, 1), lax.full_like(x, -1)), 0))
    return where(y < 0, inverse, jnp.power(x, lax.max(y, lax.full_like(y, 0))))


@rule(aten.pow.Tensor_Scalar)
def pow_scalar(self, exponent):
    """With the special cases of PyTorch's CPU kernel, which are the exponents that models use."""
    (x,) = operands(self, dtype=opmath(promoted(self, exponent)))
    special = {value: power for value, power in _POWERS.items() if value in (2, 3) or not is_integer(x.dtype)}

    def general(x: Any) -> Any:
        return _power(*broadcast(x, cast(number_in(exponent, promoted(self, exponent)), x.dtype)))

    if is_number(exponent):
        return special.get(exponent, general)(x)
    # An input of the step: which case it is is decided when the step runs.
    case = sum(cast(exponent == value, np.dtype(np.int32)) * (i + 1) for i, value in enumerate(special))
    return lax.switch(case, [general, *special.values()], x)


_POWERS: dict[float, Callable[[Any], Any]] = {
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: lax.sqrt,
    -0.5: lax.rsqrt,
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}


def _xlogy(x: Any, y: Any) -> Any:
    product = x * lax.log(y)
    return where(y != y, y, where(x == 0, 0, product))


def _ignoring_nan(choose: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: choose(where(x != x, y, x), where(y != y, x, y))


def _heaviside(x: Any, y: Any) -> Any:
    return where(x != x, 0, where(x == 0, y, cast(x > 0, x.dtype)))


def logaddexp(x: Any, y: Any) -> Any:
    if not is_complex(x.dtype):
        return jnp.logaddexp(x, y)
    order = lax.real(x) < lax.real(y)  # for complex numbers, stay on the branch of the larger one
    low, high = lax.select(order, x, y), lax.select(order, y, x)
    return high + lax.log1p(lax.exp(low - high))


def _logaddexp2(x: Any, y: Any) -> Any:
    top = lax.max(x, y)
    summed = top + jnp.log2(1 + lax.exp2(-lax.abs(x - y)))
    return where((x == y) & (lax.abs(x) == math.inf), x, summed)


# Operands are promoted together; the flag says whether integers become floating point.
_BINARY = {
    aten.fmod.Tensor: (_rem, False),
    aten.fmod.Scalar: (_rem, False),
    aten.maximum.default: (lax.max, False),
    aten.minimum.default: (lax.min, False),
    aten.fmax.default: (_ignoring_nan(lax.max), False),
    aten.fmin.default: (_ignoring_nan(lax.min), False),
    aten.atan2.default: (lax.atan2, True),
    aten.hypot.default: (jnp.hypot, True),
    aten.copysign.Tensor: (jnp.copysign, True),
    aten.copysign.Scalar: (jnp.copysign, True),
    aten.logaddexp.default: (logaddexp, True),
    aten.logaddexp2.default: (_logaddexp2, True),
    aten.xlogy.Tensor: (_xlogy, True),
    aten.xlogy.Scalar_Other: (_xlogy, True),
    aten.xlogy.Scalar_Self: (_xlogy, True),
    aten.special_xlog1py.default: (lambda x, y: where(y != y, y, where(x == 0, 0, x * lax.log1p(y))), True),
    aten.heaviside.default: (_heaviside, False),
    aten.gcd.default: (jnp.gcd, False),
    aten.lcm.default: (jnp.lcm, False),
    aten.eq.Tensor: (lax.eq, False),
    aten.eq.Scalar: (lax.eq, False),
    aten.ne.Tensor: (lax.ne, False),
    aten.ne.Scalar: (lax.ne, False),
    aten.lt.Tensor: (lax.lt, False),
    aten.lt.Scalar: (lax.lt, False),
    aten.le.Tensor: (lax.le, False),
    aten.le.Scalar: (lax.le, False),
    aten.gt.Tensor: (lax.gt, False),
    aten.gt.Scalar: (lax.gt, False),
    aten.ge.Tensor: (lax.ge, False),
    aten.ge.Scalar: (lax.ge, False),
    aten.bitwise_and.Tensor: (lax.bitwise_and, False),
    aten.bitwise_and.Scalar: (lax.bitwise_and, False),
    aten.bitwise_and.Scalar_Tensor: (lax.bitwise_and, False),
    aten.bitwise_or.Tensor: (lax.bitwise_or, False),
    aten.bitwise_or.Scalar: (lax.bitwise_or, False),
    aten.bitwise_or.Scalar_Tensor: (lax.bitwise_or, False),
    aten.bitwise_xor.Tensor: (lax.bitwise_xor, False),
    aten.bitwise_xor.Scalar: (lax.bitwise_xor, False),
    aten.bitwise_xor.Scalar_Tensor: (lax.bitwise_xor, False),
    aten.bitwise_left_shift.Tensor: (lax.shift_left, False),
    aten.bitwise_left_shift.Tensor_Scalar: (lax.shift_left, False),
    aten.bitwise_left_shift.Scalar_Tensor: (lax.shift_left, False),
    aten.__lshift__.Tensor: (lax.shift_left, False),
    aten.__lshift__.Scalar: (lax.shift_left, False),
}
_NARROWED = (_rem, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
for _overload, (_function, _to_float) in _BINARY.items():
    _align = floats if _to_float else narrowed if _function in _NARROWED else operands
    register(_overload, lambda self, other, f=_function, align=_align: f(*align(self, other)))


@rule(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
def bitwise_right_shift(self, other):
    x, y = operands(self, other)
    return (lax.shift_right_logical if x.dtype.kind == "u" else lax.shift_right_arithmetic)(x, y)


@rule(aten.logical_and.default)
def logical_and(self, other):
    return lax.bitwise_and(*broadcast(self != 0, other != 0))


@rule(aten.logical_or.default)
def logical_or(self, other):
    return lax.bitwise_or(*broadcast(self != 0, other != 0))


@rule(aten.logical_xor.default)
def logical_xor(self, other):
    return lax.bitwise_xor(*broadcast(self != 0, other != 0))


@rule(aten.nextafter.default)
def nextafter(self, other):
    """In the operands' own dtype, so bfloat16 is not widened first."""
    return lax.nextafter(*operands(self, other, dtype=promoted(self, other)))


@rule(aten.ldexp.Tensor)
def ldexp(self, other):
    """PyTorch computes a product with a rounded power."""
    x, exponent = floats(self, other)
    return x * rounded(exp2(exponent), floating(other.dtype))


@rule(aten.frexp.Tensor)
def frexp(self):
    return jnp.frexp(cast(self, opmath(self.dtype)))


@rule(aten.complex.default)
def complex_(real, imag):
    return lax.complex(*operands(real, imag))


@rule(aten.polar.default)
def polar(abs, angle):
    radius, angle = operands(abs, angle)
    return lax.complex(radius * lax.cos(angle), radius * lax.sin(angle))


# --- Functions of three and more --------------------------------------------------------------------------------------


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where_(condition, self, other):
    dtype = promoted(self, other)
    return lax.select(*broadcast(cast(condition, np.dtype(bool)), cast(self, dtype), cast(other, dtype)))


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self, end, weight):
    """From the nearer end, like PyTorch, so that weight 1 gives `end` exactly."""
    dtype = opmath(promoted(self, end))
    if is_number(weight):
        start, end = operands(self, end, dtype=dtype)
        weight = cast(weight, dtype)
        difference = end - start
        return start + weight * difference if abs(weight) < 0.5 else end - difference * (1 - weight)
    start, end, weight = operands(self, end, weight, dtype=dtype)
    near = lax.abs(weight) < 0.5
    return where(near, start + weight * (end - start), end - (end - start) * (1 - weight))


@rule(aten.addcmul.default)
def addcmul(self, tensor1, tensor2, *, value=1):
    x, a, b = operands(self, tensor1, tensor2)
    return x + cast(value, x.dtype) * a * b


@rule(aten.addcdiv.default)
def addcdiv(self, tensor1, tensor2, *, value=1):
    x, a, b = operands(self, tensor1, tensor2)
    return x + cast(value, x.dtype) * a / b


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(self, min=None, max=None):
    """Where `min` exceeds `max` the result is `max`; NaN propagates from any operand."""
    bounds = [b for b in (min, max) if b is not None]
    x, *bounds = operands(self, *bounds)
    if min is not None:
        x = lax.max(x, bounds[0])
    return x if max is None else lax.min(x, bounds[-1])


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(self, min):
    return clamp(self, min)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self, max):
    return clamp(self, None, max)
