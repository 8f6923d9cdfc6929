"""Random fills from words, as computed by PyTorch's CPU kernels.

Results that are integers or exactly rounded have PyTorch's bits on every platform. Normals follow ATen's polynomials
(for their origin see `rng/_fill.c`); on a platform that fuses other multiply-adds than PyTorch's compiler, or has
another square root, they differ by a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from ..compat.cpu_fills import rounds_single, uniform_leaves_out_end, uniform_roundings
from ..rng.mt19937 import N
from .dtypes import cast, to_jax
from .mt19937 import u32, uniform_bits, wide
from .unfused import unfused

f32 = np.float32


class FillKernel(NamedTuple):
    """How a fill is computed.

    words_each: words per element.
    block: elements that are made together; a chunk of the fill begins at a multiple of it.
    emit: converts words, uint32 of shape (lanes, 624), to elements of shape (lanes, 624 / words_each).
    """

    words_each: int
    block: int
    emit: Callable[[Any], Any]


BLOCK = 16  # normals made together, from as many words
_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
# Upper bounds of `random_()` without arguments: all integers that a floating dtype represents exactly.
_WHOLE = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.float32: 1 << 24, torch.float64: 1 << 53}


def kernel(name: str, dtype: torch.dtype, arguments: Mapping[str, Any]) -> FillKernel | None:
    """The kernel of a fill, or None if there is none; cached, so that functions derived from it are shared.

    Args:
        name: "uniform", "normal", "bernoulli" or "random".
        dtype: of the filled tensor.
        arguments: low and high, mean and std, p, or low and high; numbers.
    """
    return _kernel(name, dtype, tuple((key, type(value), value) for key, value in sorted(arguments.items())))


@lru_cache(maxsize=1024)
def _kernel(name: str, dtype: torch.dtype, kernel_arguments: tuple[tuple[str, type, Any], ...]) -> FillKernel | None:
    arguments = {key: value for key, _, value in kernel_arguments}
    if name == "uniform":
        return _uniform(dtype, float(arguments["low"]), float(arguments["high"]))
    if name == "normal" and dtype in _SINGLE and rounds_single("normal", dtype):
        return _normal(float(arguments["mean"]), float(arguments["std"]), to_jax(dtype))
    if name == "bernoulli":
        # The 53 bits of a double are compared with p as integers, which needs no doubles.
        bound = np.uint64(math.ceil(float(arguments["p"]) * 2.0**53))

        def bernoulli(words: Any) -> Any:
            return cast((wide(words) & _BITS_53) < bound, to_jax(dtype))

        return FillKernel(2, 1, bernoulli)
    if name == "random":
        return _random(dtype, arguments.get("low"), arguments.get("high"))
    return None


_BITS_53 = np.uint64((1 << 53) - 1)


def _uniform(dtype: torch.dtype, low: float, high: float) -> FillKernel | None:
    if dtype not in _SINGLE or not rounds_single("uniform", dtype):
        return None
    begin, end = f32(low), f32(high)
    span = f32(end - begin)
    if not (np.isfinite(span) and span >= 0):
        return None
    # Where PyTorch rounds u * span + begin once, so does this: products of 24 by 24 bits are exact in double, as are
    # their sums with numbers that are not much smaller; and if the range is symmetric, u - 1/2 is exact in single.
    narrow = to_jax(dtype)
    without_end = uniform_leaves_out_end()
    symmetric, exact = begin == -end, begin == 0 or abs(begin) * 32 >= span
    roundings = 1 if begin == 0 else uniform_roundings()
    if roundings is None or roundings == 1 and not (symmetric or exact):
        return None

    def uniform(words: Any) -> Any:
        u = uniform_bits(words)
        if begin == 0:
            x = u if span == 1 else u * span
        elif roundings == 2:
            x = unfused(u * span) + begin
        elif symmetric:
            x = (u - f32(0.5)) * span
        else:
            x = (u.astype(np.float64) * np.float64(span) + np.float64(begin)).astype(np.float32)
        x = cast(x, narrow)
        # Rounded up to the excluded end.
        return jnp.where(x == end.astype(narrow), begin.astype(narrow), x) if without_end else x

    return FillKernel(1, 1, uniform)


def _random(dtype: torch.dtype, low: int | None, high: int | None) -> FillKernel | None:
    if low is None and high is None:
        if dtype in _WHOLE:
            each, count, low = (2 if dtype == torch.float64 else 1), _WHOLE[dtype] + 1, 0
        elif dtype == torch.bool:
            each, count, low = 1, 2, 0
        elif dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            each, count, low = (2 if dtype == torch.int64 else 1), torch.iinfo(dtype).max + 1, 0
        else:
            return None
    elif high is None or dtype.is_floating_point:
        return None
    else:
        low = low or 0
        count = high - low
        each = 1 if count < 1 << 28 else 2

    def random(words: Any) -> Any:
        if each == 1:
            return cast((words % u32(count)).astype(np.int64) + np.int64(low), to_jax(dtype))
        bits = wide(words) % np.uint64(count)
        return cast(bits.astype(np.int64) + np.int64(low), to_jax(dtype))

    return FillKernel(each, 1, random)


def _normal(mean: float, std: float, dtype: np.dtype) -> FillKernel:
    def normal(words: Any) -> Any:
        return _normals(mean, std, dtype, words)

    return FillKernel(1, BLOCK, normal)


def _normals(mean: float, std: float, dtype: np.dtype, words: Any) -> Any:
    """Box-Muller on groups of 16 uniforms: eight for radii, eight for angles; the eight cosines come first."""
    lanes = words.shape[0]
    shape = (lanes, N // BLOCK, 2, BLOCK // 2)
    # The barriers keep XLA from recomputing a uniform for each of the two normals. The minimum keeps it from fusing the
    # angle's product with what follows, as PyTorch's compiler did not (see `unfused.py`).
    u = lax.optimization_barrier(uniform_bits(words)).reshape(shape)
    radius = lax.optimization_barrier(jnp.sqrt(f32(-2.0) * _log(f32(1.0) - u[:, :, 0])))
    angle = lax.optimization_barrier(lax.min(_CIRCLE * u[:, :, 1], _CIRCLE))
    radius, angle = (jnp.broadcast_to(x[:, :, None], shape) for x in (radius, angle))
    is_sine = lax.broadcasted_iota(np.int32, shape, 2)  # 0 for the cosine, 1 for the sine
    x = (radius * _cosine_or_sine(angle, is_sine)) * f32(std) + f32(mean)
    return cast(x.reshape(lanes, N), dtype)


_CIRCLE = f32(6.283185307179586)


def _horner(x: Any, *coefficients: float) -> Any:
    total = f32(coefficients[0])
    for c in coefficients[1:]:
        total = total * x + f32(c)
    return total


def _log(x: Any) -> Any:
    """The logarithm for 2^-24 <= x <= 1."""
    bits = lax.bitcast_convert_type(x, np.int32)
    e = ((bits >> np.int32(23)) - np.int32(126)).astype(np.float32)
    x = lax.bitcast_convert_type((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000), np.float32)
    small = x < f32(0.707106781186547524)
    x = (x - f32(1.0)) + jnp.where(small, x, f32(0.0))
    e = e - jnp.where(small, f32(1.0), f32(0.0))
    z = x * x
    y = _horner(x, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
    for c in (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        y = y * x + f32(c)
    y = y * x
    y = y * z + e * f32(-2.12194440e-4)
    y = z * f32(-0.5) + y
    return e * f32(0.693359375) + (x + y)


def _cosine_or_sine(x: Any, is_sine: Any) -> Any:
    """For 0 <= x <= 2 pi, the cosine where `is_sine` is 0, the sine where it is 1."""
    octant = ((x * f32(1.27323954473516)).astype(np.int32) + np.int32(1)) & np.int32(~1)
    y = octant.astype(np.float32)
    x = y * f32(-0.78515625) + x
    x = y * f32(-2.4187564849853515625e-4) + x
    x = y * f32(-3.77489497744594108e-8) + x
    z = x * x
    c = _horner(z, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2) * z
    c = (c * z + z * f32(-0.5)) + f32(1.0)
    s = _horner(z, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1) * z
    s = s * x + x
    octant = octant + np.int32(2) - np.int32(2) * is_sine
    value = jnp.where((octant & np.int32(2)) != 0, c, s)
    sign = (octant & np.int32(4)) << np.int32(29)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, np.int32) ^ sign, np.float32)
