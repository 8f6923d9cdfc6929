"""Resizing of images, and sampling at given points.

All resizing here is separable: along each dimension an output element is a weighted sum of a few input elements, whose
indices and weights depend only on sizes and are computed at lowering. The backward pass is the transpose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, opmath, real_of, where
from .registry import rule

Taps = tuple[np.ndarray, np.ndarray]  # indices (taps, outputs) and weights (taps, outputs)


def _scale(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> np.floating:
    """Input elements per output element; `factor` is the caller's scale factor, which the sizes only round."""
    kind = np.dtype(dtype).type
    if align_corners:
        return kind(length - 1) / kind(count - 1) if count > 1 else kind(0)
    return kind(1.0 / factor) if factor else kind(length) / kind(count)


def _centres(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> np.ndarray:
    """The position in the input of each output element's centre."""
    scale = _scale(length, count, align_corners, factor, dtype)
    i = np.arange(count, dtype=dtype)
    return i * scale if align_corners else (i + np.asarray(0.5, dtype)) * scale - np.asarray(0.5, dtype)


def _nearest(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> Taps:
    positions = np.floor(np.arange(count, dtype=dtype) * _scale(length, count, False, factor, dtype)).astype(np.int64)
    return np.minimum(positions, length - 1)[None], np.ones((1, count), dtype)


def _nearest_exact(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> Taps:
    centres = (np.arange(count, dtype=dtype) + np.asarray(0.5, dtype)) * _scale(length, count, False, factor, dtype)
    return np.clip(np.floor(centres).astype(np.int64), 0, length - 1)[None], np.ones((1, count), dtype)


def _linear(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> Taps:
    centres = np.maximum(_centres(length, count, align_corners, factor, dtype), 0)
    low = np.minimum(centres.astype(np.int64), length - 1)
    weight = np.clip(centres - low, 0, 1).astype(dtype)
    return np.stack([low, np.minimum(low + 1, length - 1)]), np.stack([1 - weight, weight])


def _cubic_weight(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys, Cubic convolution interpolation for digital image processing, 1981; PyTorch uses a = -0.75, and -0.5 with
    antialiasing."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _cubic(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> Taps:
    centres = _centres(length, count, align_corners, factor, dtype)
    low = np.floor(centres)
    positions = low + np.arange(-1, 3)[:, None]
    weights = _cubic_weight(centres - positions, -0.75)
    return np.clip(positions.astype(np.int64), 0, length - 1), weights.astype(dtype)


def _antialiased(weight: Callable[..., Any], support: float) -> Callable[..., Any]:
    """A filter stretched over the input elements that correspond to an output element, as in Pillow."""

    def taps(length: int, count: int, align_corners: bool, factor: float | None, dtype) -> Taps:
        scale = float(_scale(length, count, align_corners, factor, dtype))
        stretch = max(scale, 1.0)
        centres = scale * (np.arange(count) + 0.5)
        first = np.maximum((centres - support * stretch + 0.5).astype(np.int64), 0)
        last = np.minimum((centres + support * stretch + 0.5).astype(np.int64), length)
        positions = first + np.arange(int((last - first).max()))[:, None]
        weights = np.where(positions < last, weight((positions - centres + 0.5) / stretch), 0)
        return np.minimum(positions, length - 1), (weights / weights.sum(0)).astype(dtype)

    return taps


_FILTERS = {
    "nearest": _nearest,
    "nearest_exact": _nearest_exact,
    "linear": _linear,
    "cubic": _cubic,
    "linear_aa": _antialiased(lambda d: np.maximum(1 - np.abs(d), 0), 1.0),
    "cubic_aa": _antialiased(lambda d: _cubic_weight(d, -0.5), 2.0),
}


def _resize(x, kind: str, output_size, align_corners: bool, factors):
    """Resize the last dimensions, the last one first, as PyTorch's separable kernels do."""
    plain = kind.startswith("nearest")
    x = x if plain else cast(x, opmath(x.dtype))
    dtype = real_of(x.dtype) if x.dtype.itemsize > 4 and x.dtype.kind == "f" else np.dtype(np.float32)
    lead = x.ndim - len(output_size)
    for d in reversed(range(len(output_size))):
        positions, weights = _FILTERS[kind](x.shape[lead + d], output_size[d], align_corners, factors[d], dtype)
        taps = []
        for position, weight in zip(positions, weights, strict=True):
            tap = jnp.take(x, position, axis=lead + d)
            shape = (-1,) + (1,) * (x.ndim - lead - d - 1)
            taps.append(tap if plain else tap * weight.reshape(shape).astype(x.dtype))
        x = sum(taps[1:], taps[0])
    return x


def _upsample(kind: str, space: int) -> Callable[..., Any]:
    aligned = kind.startswith(("linear", "cubic"))

    def upsample(self, output_size, *args):
        align_corners, *factors = args if aligned else (False, *args)
        return _resize(self, kind, output_size, align_corners, (*factors, *[None] * space)[:space])

    return upsample


def _upsample_named(kind: str, space: int) -> Callable[..., Any]:
    """With keywords as well: the schemas call scale factors scales, or scales_d, scales_h and scales_w."""
    positional = _upsample(kind, space)
    names = ["align_corners"] if kind.startswith(("linear", "cubic")) else []
    names += ["scales"] if space == 1 else ["scales_d", "scales_h", "scales_w"][-space:]

    def upsample(self, output_size, *args, **kwargs):
        return positional(self, output_size, *args, *(kwargs.get(name) for name in names[len(args) :]))

    return upsample


def _upsample_backward(kind: str, space: int) -> Callable[..., Any]:
    forward = _upsample_named(kind, space)

    def upsample_backward(grad_output, output_size, input_size, *args, **kwargs):
        g = cast(grad_output, opmath(grad_output.dtype))
        shape = jax.ShapeDtypeStruct(tuple(input_size), g.dtype)
        return jax.linear_transpose(lambda x: forward(x, output_size, *args, **kwargs), shape)(g)[0]

    return upsample_backward


def _upsample_vec(kind: str, space: int) -> Callable[..., Any]:
    """The overload that takes scale factors instead of a size."""
    forward = _upsample(kind, space)

    def upsample_vec(input, output_size, *args):
        *align_corners, factors = args
        if output_size is None:
            output_size = [int(math.floor(n * f)) for n, f in zip(input.shape[2:], factors, strict=True)]
        return forward(input, output_size, *align_corners, *(factors or ()))

    return upsample_vec


_NAMES = {
    ("nearest", 1): "upsample_nearest1d",
    ("nearest", 2): "upsample_nearest2d",
    ("nearest", 3): "upsample_nearest3d",
    ("nearest_exact", 1): "_upsample_nearest_exact1d",
    ("nearest_exact", 2): "_upsample_nearest_exact2d",
    ("nearest_exact", 3): "_upsample_nearest_exact3d",
    ("linear", 1): "upsample_linear1d",
    ("linear", 2): "upsample_bilinear2d",
    ("linear", 3): "upsample_trilinear3d",
    ("cubic", 2): "upsample_bicubic2d",
    ("linear_aa", 2): "_upsample_bilinear2d_aa",
    ("cubic_aa", 2): "_upsample_bicubic2d_aa",
}
for (_kind, _space), _name in _NAMES.items():
    rule(getattr(aten, _name).default)(_upsample_named(_kind, _space))
    rule(getattr(aten, _name).vec)(_upsample_vec(_kind, _space))
    rule(getattr(aten, f"{_name}_backward").default)(_upsample_backward(_kind, _space))


# --- Sampling at points -----------------------------------------------------------------------------------------------

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _clipped(x, length: int):
    """Clip to the valid range, with derivative 0 at and beyond the ends, as in PyTorch."""
    return where(x <= 0, 0, where(x >= length - 1, length - 1, x))


def _reflected(x, low: float, high: float):
    """Reflect at both ends."""
    if low == high:
        return lax.full_like(x, 0)
    span = high - low
    distance = lax.abs(x - low)
    extra = lax.rem(distance, lax.full_like(distance, span))
    flips = lax.floor(distance / span)
    return where(lax.rem(flips, lax.full_like(flips, 2)) == 0, extra + low, span - extra + low)


def _pixel(x, length: int, align_corners: bool):
    """Convert grid coordinates, from -1 to 1, to pixel positions."""
    return (x + 1) / 2 * (length - 1) if align_corners else ((x + 1) * length - 1) / 2


def _clamped_inside(x, length: int, padding_mode: int, align_corners: bool):
    if padding_mode == _REFLECTION:
        x = _reflected(x, 0, length - 1) if align_corners else _reflected(x, -0.5, length - 0.5)
    return x if padding_mode == _ZEROS else _clipped(x, length)


def _whole(position, length: int):
    """A position as an index in range; rounding has no derivative."""
    position = lax.stop_gradient(position)
    return cast(lax.clamp(cast(0.0, position.dtype), position, cast(length - 1.0, position.dtype)), np.dtype(np.int64))


def _values_at(image, positions):
    """The image (batch, channels, *space) at integer positions (each batch, *points); zero outside."""
    inside = True
    for position, length in zip(positions, image.shape[2:], strict=True):
        inside = inside & (position >= 0) & (position < length)
    whole = [_whole(position, length) for position, length in zip(positions, image.shape[2:], strict=True)]
    values = jax.vmap(lambda plane, index: plane[(slice(None), *index)])(image, tuple(whole))
    return where(lax.expand_dims(inside, [1]), values, 0)


def _grid_sample(image, grid, interpolation_mode, padding_mode, align_corners):
    """`grid` is (batch, *points, space); its last dimension has the image's last dimension first."""
    image, grid = cast(image, opmath(image.dtype)), cast(grid, opmath(grid.dtype))
    lengths = image.shape[2:]
    x = [_pixel(grid[..., -1 - d], n, align_corners) for d, n in enumerate(lengths)]
    if interpolation_mode == _BICUBIC:
        return _bicubic_sample(image, x, padding_mode, align_corners)
    x = [_clamped_inside(p, n, padding_mode, align_corners) for p, n in zip(x, lengths, strict=True)]
    if interpolation_mode == _NEAREST:
        return _values_at(image, [lax.round(p, lax.RoundingMethod.TO_NEAREST_EVEN) for p in x])
    low = [lax.floor(p) for p in x]
    total = 0
    for corner in itertools.product((0, 1), repeat=len(lengths)):
        weight = 1
        for p, start, high in zip(x, low, corner, strict=True):
            weight = weight * ((p - start) if high else (start + 1 - p))
        values = _values_at(image, [start + high for start, high in zip(low, corner, strict=True)])
        total = total + values * lax.expand_dims(weight, [1])
    return total


def _bicubic_sample(image, x, padding_mode, align_corners):
    def weights(t, a=-0.75):
        def near(d):
            return ((a + 2) * d - (a + 3)) * d * d + 1

        def far(d):
            return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

        return [far(t + 1), near(t), near(1 - t), far(2 - t)]

    low = [lax.floor(p) for p in x]
    by_dim = [weights(p - start) for p, start in zip(x, low, strict=True)]
    total = 0
    for i, j in itertools.product(range(4), repeat=2):
        positions = [low[0] + (i - 1), low[1] + (j - 1)]
        positions = [
            _clamped_inside(p, n, padding_mode, align_corners) for p, n in zip(positions, image.shape[2:], strict=True)
        ]
        total = total + _values_at(image, positions) * lax.expand_dims(by_dim[0][i] * by_dim[1][j], [1])
    return total


rule(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    aten._grid_sampler_2d_cpu_fallback.default,
)(_grid_sample)


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask=(True, True)
):
    image, points = cast(input, opmath(input.dtype)), cast(grid, opmath(grid.dtype))
    options = (interpolation_mode, padding_mode, align_corners)
    _, transpose = jax.vjp(lambda image, points: _grid_sample(image, points, *options), image, points)
    image, points = transpose(cast(grad_output, image.dtype))
    return image if output_mask[0] else None, points  # eager's kernels also compute the second in any case
