"""The counter policy: random numbers as a function of (seed, draw, index).

A draw is one random operation; `draw` is its number. Its numbers do not depend on earlier draws, on the mesh or on the
engine, and the cost of a slice is proportional to its length. They differ from eager PyTorch's.

Word w of a draw is word w % 4 of the Philox4x32-10 block with key `seed` and 128-bit counter w // 4 + 2^64 draw.

* Element i of a uniform is the upper 24 bits of word i, divided by 2^24.
* Elements 2i and 2i+1 of a normal are computed from the upper 24 bits of words 2i and 2i+1 by Box-Muller, cosine and
  sine (G. E. P. Box and M. E. Muller, "A Note on the Generation of Random Normal Deviates", Annals of Mathematical
  Statistics 29(2), 1958): the first word plus one gives the radius, by its logarithm; the second is the angle, minus an
  eighth of the circle, its two highest bits being the quadrant.
* float16 and bfloat16 are float32 rounded to nearest; a complex number is two reals. A float64 element takes 53 bits of
  two words, of which the first is the upper one.

In float32 each operation below is rounded separately, according to IEEE 754, so NumPy and the C kernels give the same
bits on every machine. A compiler that contracts multiplications and additions to FMAs (XLA may) gives the same words,
the same uniforms of [0, 1), and normals within a few ulp. The functions of words and floats take numpy or `jax.numpy`
as `xp`, and need 32-bit integers only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from firstloss import c_library
from firstloss.rng import philox

if TYPE_CHECKING:
    from numpy.typing import NDArray

Float32: TypeAlias = "NDArray[np.float32]"
Float64: TypeAlias = "NDArray[np.float64]"

LANES = 4  # words in a Philox block
_CHUNK = 1 << 12  # Philox blocks at a time, so that intermediates stay in the cache
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ANGLE = float.fromhex("0x1.921fb6p-22")  # pi / 2 * 2^-22 in float32
# Cephes, single/logf.c, sinf.c and cosf.c (S. L. Moshier, Cephes Mathematical Library 2.2, 1992); highest power first.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


# -- words and floats, in 32 bits: numpy or jax.numpy ----------------------------------------------------------------


def philox32(xp: Any, seed: tuple[Any, Any], block: tuple[Any, Any], draw: tuple[Any, Any]) -> tuple[Any, ...]:
    """The four words of each block: uint32 arrays of the blocks' shape.

    Each argument has 64 bits, as (low, high) uint32: arrays for `block`, numbers for `seed` and `draw`.
    """
    x0, x1 = block
    x2, x3 = (xp.broadcast_to(xp.asarray(half, xp.uint32), x0.shape) for half in draw)
    k0, k1 = (xp.asarray(half, xp.uint32).reshape((1,) * x0.ndim) for half in seed)
    for _ in range(10):
        p_high, p_low = _multiply(xp, x0, _MULTIPLIERS[0])
        q_high, q_low = _multiply(xp, x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = q_high ^ x1 ^ k0, q_low, p_high ^ x3 ^ k1, p_low
        k0, k1 = k0 + xp.uint32(_WEYL[0]), k1 + xp.uint32(_WEYL[1])
    return x0, x1, x2, x3


def _multiply(xp: Any, a: Any, b: int) -> tuple[Any, Any]:
    """The upper and lower 32 bits of a product, by 16-bit products."""
    low, high = xp.uint32(b & 0xFFFF), xp.uint32(b >> 16)
    mask, half = xp.uint32(0xFFFF), xp.uint32(16)
    a_low, a_high = a & mask, a >> half
    middle = a_high * low + (a_low * low >> half)
    rest = a_low * high + (middle & mask)
    return a_high * high + (middle >> half) + (rest >> half), a * xp.uint32(b)


def unit(xp: Any, words: Any) -> Any:
    """Words as fractions: float32 in [0, 1)."""
    return (words >> xp.uint32(8)).astype(xp.float32) * xp.float32(2.0**-24)


def between(xp: Any, words: Any, low: float, end: float) -> Any:
    """Words as uniforms of [low, end); values that are rounded up to `end` become `low`."""
    low, end = xp.float32(low), xp.float32(end)
    values = unit(xp, words) * (end - low) + low
    return xp.where(values == end, low, values)


def pair(xp: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two standard normals from two words: float32."""
    f32, u32 = xp.float32, xp.uint32
    fraction = ((first >> u32(8)).astype(f32) + f32(1)) * f32(2.0**-24)
    radius = xp.sqrt(f32(-2) * _logarithm(xp, fraction))
    quarter = second >> u32(30)
    t = ((second >> u32(8) & u32(0x3FFFFF)).astype(f32) - f32(1 << 21)) * f32(_ANGLE)
    z = t * t
    s = _polynomial(xp, _SINE, z) * z * t + t
    c = (_polynomial(xp, _COSINE, z) * z * z + z * f32(-0.5)) + f32(1)
    turned = (quarter & u32(1)) == u32(1)
    cosine, sine = xp.where(turned, s, c), xp.where(turned, c, s)
    cosine = xp.where((quarter == u32(1)) | (quarter == u32(2)), -cosine, cosine)
    sine = xp.where(quarter >= u32(2), -sine, sine)
    return radius * cosine, radius * sine


def _logarithm(xp: Any, x: Any) -> Any:
    """The logarithm of x, 2^-24 <= x <= 1."""
    f32, u32 = xp.float32, xp.uint32
    bits = x.view(u32)
    e = (bits >> u32(23)).astype(f32) - f32(126)
    m = ((bits & u32(0x007FFFFF)) | u32(0x3F000000)).view(f32)  # 0.5 <= m < 1
    small = m < f32(0.707106781186547524)
    m = (m - f32(1)) + xp.where(small, m, f32(0))
    e = e - xp.where(small, f32(1), f32(0))
    z = m * m
    y = _polynomial(xp, _LOG, m) * m * z
    y = (y + e * f32(-2.12194440e-4)) + z * f32(-0.5)  # ln 2 is the sum of two constants:
    return (m + y) + e * f32(0.693359375)  # this one is exact in few bits


def _polynomial(xp: Any, coefficients: tuple[float, ...], x: Any) -> Any:
    value = xp.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + xp.float32(coefficient)
    return value


# -- fills, in numpy or, a hundred times as fast, in C (`_counter.c`) ------------------------------------------------

_MASK64 = (1 << 64) - 1
_SIGNATURE = (None, (ctypes.c_void_p, *[ctypes.c_uint64] * 3, ctypes.c_int64, ctypes.c_double, ctypes.c_double))


@cache
def _kernels() -> Any:
    return c_library.load(
        __file__, "_counter", {"firstloss_counter_normal": _SIGNATURE, "firstloss_counter_uniform": _SIGNATURE}
    )


def has_kernels() -> bool:
    """Whether the package was built with a C compiler."""
    return _kernels() is not None


def uniform(
    seed: int, draw: int, begin: int, count: int, low: float = 0.0, end: float = 1.0, out: Float32 | None = None
) -> Float32:
    """Elements `begin` to `begin + count` of a uniform draw: float32, shape (count,); written to `out` if given."""
    out = _output(begin, count, out)
    if has_kernels():  # without the GIL
        _kernels().firstloss_counter_uniform(out.ctypes.data, seed & _MASK64, draw & _MASK64, begin, count, low, end)
        return out
    return _fill(lambda words: between(np, words, low, end), seed, draw, begin, out)


def normal(
    seed: int, draw: int, begin: int, count: int, mean: float = 0.0, std: float = 1.0, out: Float32 | None = None
) -> Float32:
    """Elements `begin` to `begin + count` of a normal draw: float32, shape (count,); written to `out` if given."""
    out = _output(begin, count, out)
    if has_kernels():
        _kernels().firstloss_counter_normal(out.ctypes.data, seed & _MASK64, draw & _MASK64, begin, count, mean, std)
        return out

    def make(words: philox.Words) -> Float32:
        normals = np.stack(pair(np, words[..., 0::2], words[..., 1::2]), axis=-1)
        return normals.reshape(words.shape) * np.float32(std) + np.float32(mean)

    return _fill(make, seed, draw, begin, out)


def uniform64(seed: int, draw: int, begin: int, count: int, low: float = 0.0, end: float = 1.0) -> Float64:
    """Like `uniform`, in float64."""

    def make(words: philox.Words) -> Float64:
        values = _fractions(words) * (end - low) + low
        return np.where(values == end, low, values)

    return _fill(make, seed, draw, begin, np.empty(_checked(begin, count)))


def normal64(seed: int, draw: int, begin: int, count: int, mean: float = 0.0, std: float = 1.0) -> Float64:
    """Like `normal`, in float64, with NumPy's logarithm, sine and cosine."""

    def make(words: philox.Words) -> Float64:
        fractions = _fractions(words)
        radius = np.sqrt(-2.0 * np.log(fractions[:, 0] + 2.0**-53))
        angle = 2.0 * np.pi * fractions[:, 1] - np.pi / 4
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1) * std + mean

    return _fill(make, seed, draw, begin, np.empty(_checked(begin, count)))


def _fractions(words: philox.Words) -> Float64:
    """Two 53-bit fractions per block: float64, shape (blocks, 2)."""
    wide = words.astype(np.uint64)
    return ((wide[:, 0::2] << np.uint64(32) | wide[:, 1::2]) >> np.uint64(11)) * 2.0**-53


def _output(begin: int, count: int, out: Float32 | None) -> Float32:
    _checked(begin, count)
    if out is None:
        return np.empty(count, np.float32)
    if out.shape != (count,) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"`out` must be contiguous float32 of shape ({count},), but is {out.dtype} of {out.shape}")
    return out


def _checked(begin: int, count: int) -> int:
    if begin < 0 or count < 0:
        raise ValueError(f"begin and count must not be negative, but are {begin} and {count}")
    return count


def _fill(make: Callable[[philox.Words], Any], seed: int, draw: int, begin: int, out: Any) -> Any:
    per_block = LANES if out.dtype == np.float32 else LANES // 2
    done = 0
    while done < len(out):
        block, skip = divmod(begin + done, per_block)
        blocks = min(_CHUNK, -(-(skip + len(out) - done) // per_block))
        numbers = make(philox.words(seed, np.arange(block, block + blocks, dtype=np.uint64), draw))
        part = numbers.reshape(-1)[skip : skip + len(out) - done]
        out[done : done + len(part)] = part
        done += len(part)
    return out
