"""Convolutions of one to three dimensions, and transposed ones, as XLA's one convolution."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch
from jax import lax

from .dtypes import cast, is_complex, opmath
from .registry import rule

aten = torch.ops.aten


def each(values: Sequence[int], count: int) -> tuple[int, ...]:
    """One value for every spatial dimension: a single one stands for all."""
    return tuple(values) * count if len(values) == 1 else tuple(values)


def _transposed_weight(weight, groups):
    """(in, out / groups, *kernel), as transposed convolutions store it, to (out, in / groups, *kernel) reversed."""
    c_in, c_out, *kernel = weight.shape
    w = lax.reshape(weight, (groups, c_in // groups, c_out, *kernel))
    w = lax.transpose(w, (0, 2, 1, *range(3, w.ndim)))
    w = lax.reshape(w, (groups * c_out, c_in // groups, *kernel))
    return lax.rev(w, range(2, w.ndim))


def _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups):
    space = x.ndim - 2
    stride, padding, dilation, output_padding = (each(v, space) for v in (stride, padding, dilation, output_padding))
    spread = (1,) * space
    edges = [(p, p) for p in padding]
    if transposed:  # a convolution of the input with stride - 1 zeros between its elements
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        edges = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)]
        weight, stride, spread = _transposed_weight(weight, groups), (1,) * space, stride
    if any(k > n for k, n in zip(weight.shape[2:], x.shape[2:], strict=True)):
        # On a CPU, XLA leaves a kernel that is larger than the input to a plain loop, up to 100 times slower than the
        # library it calls else. Zeros that are there, and not asked for as padding, make the input larger.
        x = lax.pad(x, cast(0, x.dtype), [(0, 0, 0)] * 2 + [(*e, s - 1) for e, s in zip(edges, spread, strict=True)])
        edges, spread = [(0, 0)] * space, (1,) * space
    return lax.conv_general_dilated(
        x,
        weight,
        stride,
        edges,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )


def _input_gradient(g, lengths, weight, stride, padding, dilation, transposed, output_padding, groups):
    if transposed:  # one output place more, where the output's padding was longer than the stride
        x = _convolve(g, weight, stride, padding, dilation, False, output_padding, groups)
        return lax.slice(x, (0,) * x.ndim, (*x.shape[:2], *lengths))
    space = len(lengths)
    numbers = (lengths, g.shape[2:], weight.shape[2:], *(each(v, space) for v in (stride, padding, dilation)))
    rest = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in zip(*numbers, strict=True)]
    return _convolve(g, weight, stride, padding, dilation, True, rest, groups)


def _plain(x):
    """XLA's convolutions on a CPU take no half precision sums apart: do those in float32."""
    return cast(x, opmath(x.dtype))


@rule(aten.convolution.default, aten._convolution.default, aten.convolution_overrideable.default)
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_):
    y = _convolve(_plain(input), _plain(weight), stride, padding, dilation, transposed, output_padding, groups)
    return y if bias is None else y + lax.reshape(cast(bias, y.dtype), (bias.size, *(1,) * (y.ndim - 2)))


@rule(aten.convolution_backward.default)
def convolution_backward(
    grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """A convolution is linear in each operand, so its derivatives are its transposes (conjugated, when complex).

    That of the input is the transposed convolution with the same weight, and the other way round.
    """
    g, x, w = _plain(grad_output), _plain(input), _plain(weight)
    if is_complex(x.dtype):
        x, w = lax.conj(x), lax.conj(w)
    how = (stride, padding, dilation, transposed, output_padding, groups)
    return (
        _input_gradient(g, x.shape[2:], w, *how) if output_mask[0] else None,
        jax.linear_transpose(lambda w: _convolve(x, w, *how), w)(g)[0] if output_mask[1] else None,
        lax.reduce_sum(g, (0, *range(2, g.ndim))) if output_mask[2] else None,
    )
