"""Special functions: gamma, error, Bessel, zeta."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax import scipy as jsp
from torch.ops import aten

from .dtypes import cast, floats, where
from .registry import register, rule


def _erfcx(x: Any) -> Any:
    """exp(x^2) erfc(x), for large x, where the factors exceed float32, by Laplace's continued fraction."""
    fraction = x
    for k in range(16, 0, -1):
        fraction = x + (k / 2) / fraction
    return where(x > 3, 1 / (math.sqrt(math.pi) * fraction), lax.exp(x * x) * lax.erfc(x))


def _erfinv(x: Any) -> Any:
    """XLA's polynomial and a Newton step: its float32 version is off by 5e-7 in the tails, where exp(y^2) grows.

    The step uses the complement 1 - |x|, which is exact where |x| is near 1, and x itself where it is small.
    """
    size = lax.abs(x)
    y = lax.erf_inv(size)
    slope = (2 / math.sqrt(math.pi)) * lax.exp(-y * y)
    excess = where(size < 0.5, lax.erf(y) - size, (1 - size) - lax.erfc(y))
    return lax.sign(x) * where(size < 1, y - excess / slope, y)


def _digamma(x: Any) -> Any:
    """At 0, infinity with the sign of the limit, where XLA returns NaN."""
    return where(x == 0, jnp.copysign(lax.full_like(x, math.inf), -x), lax.digamma(x))


def _i0(x: Any) -> Any:
    return lax.bessel_i0e(x) * lax.exp(lax.abs(x))


def _i1(x: Any) -> Any:
    return lax.bessel_i1e(x) * lax.exp(lax.abs(x))


_UNARY = {
    aten.erf.default: lax.erf,
    aten.erfc.default: lax.erfc,
    aten.erfinv.default: _erfinv,
    aten.lgamma.default: lax.lgamma,
    aten.digamma.default: _digamma,
    aten.i0.default: _i0,
    aten.special_i0e.default: lax.bessel_i0e,
    aten.special_i1.default: _i1,
    aten.special_i1e.default: lax.bessel_i1e,
    aten.special_ndtri.default: jsp.special.ndtri,
    aten.special_log_ndtr.default: jsp.special.log_ndtr,
    aten.special_erfcx.default: _erfcx,
    aten.special_entr.default: jsp.special.entr,
}
for _overload, _function in _UNARY.items():
    register(_overload, lambda self, f=_function: f(*floats(self)))


@rule(aten.polygamma.default)
def polygamma(n, self):
    """XLA's version does not support negative arguments. Order 1 is reflected (Abramowitz and Stegun 6.4.7), as in
    PyTorch; higher orders are shifted by the recurrence 6.4.6, down to -16, and are NaN below."""
    (x,) = floats(self)
    if n == 0:
        return _digamma(x)
    if n == 1:
        mirrored = x < 0.5
        root = math.pi / lax.sin(math.pi * x)
        trigamma = lax.polygamma(lax.full_like(x, 1), where(mirrored, 1 - x, x))
        return where(mirrored, root * root - trigamma, trigamma)
    shift = 16
    below = sum(lax.integer_pow(x + k, -(n + 1)) for k in range(shift))
    zeta = below + lax.zeta(lax.full_like(x, n + 1), x + shift)
    return where(x < -shift, math.nan, (-1) ** (n + 1) * float(math.factorial(n)) * zeta)


@rule(aten.polygamma_.default)
def polygamma_(self, n):
    return polygamma(n, self)


@rule(aten.mvlgamma.default)
def mvlgamma(self, p):
    (x,) = floats(self)
    return sum(lax.lgamma(x - j / 2) for j in range(p)) + p * (p - 1) / 4 * math.log(math.pi)


def _incomplete_gamma(a: Any, x: Any, *, upper: bool) -> Any:
    """XLA's series, which is truncated too early for large `a`; there by Temme's expansion (DLMF 8.12)."""
    series, large = (lax.igammac if upper else lax.igamma), a > 100
    result = series(where(large, 1, a), where(large, 1, x))
    wide, y = (cast(where(large & (v < math.inf), v, 200), np.dtype(np.float64)) for v in (a, x))
    mu = (y - wide) / wide
    eta = lax.sign(mu) * lax.sqrt(2 * (mu - lax.log1p(mu)))
    near = -1 / 3 + eta * (1 / 12 + eta * (-2 / 135 + eta * (1 / 864 + eta / 2835)))
    small = lax.abs(eta) < 0.05  # where the difference of the two poles cancels
    first = where(small, near, 1 / where(small, 1, mu) - 1 / where(small, 1, eta))
    rest = (
        lax.exp(-wide * eta * eta / 2)
        / lax.sqrt(2 * math.pi * wide)
        * (first - (1 / 540 + lax.clamp(-9.0, eta, 9.0) / 288) / wide)
    )
    half = lax.erfc((eta if upper else -eta) * lax.sqrt(wide / 2)) / 2
    result = where(large, cast(half + rest if upper else half - rest, a.dtype), result)
    whole, none = (0, 1) if upper else (1, 0)
    result = where(x == math.inf, where(a == math.inf, lax.full_like(a, math.nan), whole), result)
    result = where((a == math.inf) & (x != math.inf), none, result)
    return where((a == 0) & (x >= 0), where(x == 0, lax.full_like(a, math.nan), whole), result)


@rule(aten.igamma.default)
def igamma(self, other):
    a, x = floats(self, other)
    return _incomplete_gamma(a, x, upper=False)


@rule(aten.igammac.default)
def igammac(self, other):
    a, x = floats(self, other)
    return _incomplete_gamma(a, x, upper=True)


@rule(aten.special_zeta.default, aten.special_zeta.self_scalar, aten.special_zeta.other_scalar)
def special_zeta(self, other):
    return lax.zeta(*floats(self, other))
