"""Convolutions and transposed convolutions of one to three dimensions, as XLA's single convolution."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from . import aten as kernels
from . import precision
from .dtypes import cast, is_complex, opmath
from .matmul import of_matrices
from .registry import rule
from .windows import Windows, each

# --- As XLA's convolution ---------------------------------------------------------------------------------------------


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
        # On a CPU, XLA computes a kernel that is larger than the input with a plain loop, up to 100 times slower than
        # its library. Explicit zeros, rather than padding, make the input larger.
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
        precision=precision.now().convolutions,
    )


def _input_gradient(g, lengths, weight, stride, padding, dilation, transposed, output_padding, groups):
    if transposed:  # one more output position, if the output's padding was longer than the stride
        x = _convolve(g, weight, stride, padding, dilation, False, output_padding, groups)
        return lax.slice(x, (0,) * x.ndim, (*x.shape[:2], *lengths))
    space = len(lengths)
    numbers = (lengths, g.shape[2:], weight.shape[2:], *(each(v, space) for v in (stride, padding, dilation)))
    rest = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in zip(*numbers, strict=True)]
    return _convolve(g, weight, stride, padding, dilation, True, rest, groups)


# --- As a product of matrices -----------------------------------------------------------------------------------------
#
# On a CPU, XLA's convolutions take a weight as (*kernel, in, out), and return its gradient as (in, *kernel, out).
# PyTorch stores both as (out, in, *kernel); transposing a weight twice and its gradient once takes longer than the
# convolutions themselves if the output has fewer positions than channels, as in the last layers of a ResNet. In this
# case the windows of the input are copied to columns, which have fewer elements than the weight, and multiplied with
# the weight without transposing it. Forward, backward and update on one core: 11 ms instead of 29 for 512 channels of 4
# x 4 positions in a batch of 4, 10 instead of 12 for 256 channels of 8 x 8, close to the break-even.

_MAX_POSITIONS = 64  # positions in a window; each becomes a slice to compile


def _as_product(x, weight, stride, padding, dilation, transposed, output_padding, groups) -> Windows | None:
    """The windows of `x`, if the convolution with `weight` is faster as a matrix product."""
    kernel = weight.shape[2:]
    if transposed or groups != 1 or jax.default_backend() != "cpu":
        return None
    if len(kernel) < 2 or math.prod(kernel) > _MAX_POSITIONS:
        return None
    windows = Windows(x.shape, kernel, stride, padding, dilation, False)
    return windows if 0 < x.shape[0] * math.prod(windows.counts) <= weight.shape[0] else None


def _windows_of(x, windows):
    """The elements at each position in the windows of (batch, in, *space): (positions, batch, in, *windows)."""
    padded = windows.padded(x, 0)
    return jnp.stack([windows.slice(padded, offset) for offset in windows.offsets()])


def _columns(x, windows):
    """The windows as columns: (in * positions, batch * windows)."""
    parts = _windows_of(x, windows)
    positions, batch, channels = parts.shape[:3]
    shape = (channels * positions, batch * math.prod(windows.counts))
    return lax.reshape(parts, shape, (2, 0, 1, *range(3, parts.ndim)))


def _matrix(weight):
    return lax.reshape(weight, (weight.shape[0], math.prod(weight.shape[1:])))


def _product(x, weight, windows):
    y = of_matrices(_matrix(weight), _columns(x, windows))
    return jnp.swapaxes(lax.reshape(y, (weight.shape[0], x.shape[0], *windows.counts)), 0, 1)


def _product_backward(g, x, weight, windows):
    """The gradients of the input and of the weight."""
    batch, out, *counts = g.shape
    g = lax.reshape(g, (out, batch * math.prod(counts)), (1, 0, *range(2, g.ndim)))
    # Windows as rows here: with transposed operands the same product takes XLA three times as long.
    rows = of_matrices(lax.transpose(g, (1, 0)), _matrix(weight), (True, False))
    parts = lax.reshape(rows, (batch, *counts, x.shape[1], math.prod(windows.kernel)))
    parts = jnp.moveaxis(parts, (-1, -2), (0, 2))
    of_weight = of_matrices(g, lax.transpose(_columns(x, windows), (1, 0)), (False, True))
    return windows.unsliced(parts), lax.reshape(of_weight, weight.shape)


# --- By PyTorch's own kernels -----------------------------------------------------------------------------------------


def _by_pytorch(input, weight, windows, groups):
    """Whether PyTorch's convolution is faster: in bfloat16 always; in float32 where XLA would transpose the weight, or
    all of the input (1 x 1 kernels: 50 ms instead of 174 for 256 channels of 56 x 56 to 64, in a batch of 8); in
    float64 if it has groups, which XLA computes with a plain loop then."""
    grouped = kernels.usable() and input.dtype == np.float64 and groups > 1
    if not (kernels.computes(input.dtype) or grouped) or input.dtype != weight.dtype or input.ndim not in (3, 4, 5):
        return False
    if 0 in (*input.shape, *weight.shape):
        return False
    return input.dtype == jnp.bfloat16 or windows is None


def _spread(space, how):
    """The arguments of a convolution, with one number for each spatial dimension."""
    stride, padding, dilation, transposed, output_padding, groups = how
    numbers = [each(v, space) for v in (stride, padding, dilation, output_padding)]
    return (*numbers[:3], transposed, numbers[3], groups)


# --- The operations ---------------------------------------------------------------------------------------------------


def _plain(x):
    """In float32 for half precision: XLA on a CPU cannot accumulate it separately."""
    return cast(x, opmath(x.dtype))


@rule(aten.convolution.default, aten._convolution.default, aten.convolution_overrideable.default)
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_):
    x, w, how = _plain(input), _plain(weight), (stride, padding, dilation, transposed, output_padding, groups)
    windows = _as_product(x, w, *how)
    if _by_pytorch(input, weight, windows, groups):
        shape = jax.eval_shape(lambda: _convolve(x, w, *how)).shape
        bias = None if bias is None else cast(bias, input.dtype)
        return kernels.convolution(input, weight, bias, shape, *_spread(input.ndim - 2, how))
    y = _convolve(x, w, *how) if windows is None else _product(x, w, windows)
    return y if bias is None else y + lax.reshape(cast(bias, y.dtype), (bias.size, *(1,) * (y.ndim - 2)))


@rule(aten.convolution_backward.default)
def convolution_backward(
    grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """A convolution is linear in each operand, so its derivatives are its transposes (conjugated, when complex).

    The derivative with respect to the input is the transposed convolution with the same weight, and vice versa.
    """
    g, x, w = _plain(grad_output), _plain(input), _plain(weight)
    if is_complex(x.dtype):
        x, w = lax.conj(x), lax.conj(w)
    how = (stride, padding, dilation, transposed, output_padding, groups)
    windows = _as_product(x, w, *how)
    if _by_pytorch(input, weight, windows, groups) and any(output_mask[:2]):
        wanted = [bool(wants) for wants in output_mask[:2]]
        how = _spread(input.ndim - 2, how)
        of_input, of_weight = kernels.convolution_backward(cast(grad_output, input.dtype), input, weight, wanted, *how)
    elif windows is not None:
        of_input, of_weight = _product_backward(g, x, w, windows)
    else:
        of_input = _input_gradient(g, x.shape[2:], w, *how) if output_mask[0] else None
        of_weight = jax.linear_transpose(lambda w: _convolve(x, w, *how), w)(g)[0] if output_mask[1] else None
    return (
        of_input if output_mask[0] else None,
        of_weight if output_mask[1] else None,
        lax.reduce_sum(g, (0, *range(2, g.ndim))) if output_mask[2] else None,
    )
