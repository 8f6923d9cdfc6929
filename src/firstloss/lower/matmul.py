"""Matrix products. Half precision operands are multiplied as they are, and accumulated in float32."""

from __future__ import annotations

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from . import aten as kernels
from . import precision
from .activations import gelu, relu
from .decompose import OF_LIBRARIES
from .dtypes import cast, equals_number, is_integer, is_number, opmath, times, where
from .registry import OF_ORDERS, rule


def contract(x, y, dims):
    """`lax.dot_general` with PyTorch's precision: by default float32 stays float32 on accelerators too."""
    if x.dtype == bool:
        x, y = cast(x, np.dtype(np.int32)), cast(y, np.dtype(np.int32))
    return lax.dot_general(x, y, dims, precision=precision.now().products, preferred_element_type=opmath(x.dtype))


def matmul(x, y):
    """The product of the last two dimensions; the dimensions before them are equal."""
    batch = tuple(range(x.ndim - 2))
    return contract(x, y, (((x.ndim - 1,), (y.ndim - 2,)), (batch, batch)))


def _plus(self, product, beta, alpha):
    """`beta * self + alpha * product`; if `beta` is 0, NaN in `self` is ignored."""
    product = times(product, alpha)
    if equals_number(beta, 0):
        return product
    sum = times(cast(self, product.dtype), beta) + product
    return sum if is_number(beta) else where(beta == 0, product, sum)


def of_matrices(x, y, by_columns=(False, False)):
    """The product of two matrices, or of each pair in two batches, by PyTorch's kernels if they are faster.

    Args:
        by_columns: which of the two lie in memory by columns.
    """
    return kernels.product(x, y, by_columns) if kernels.multiplies(x, y, by_columns) else matmul(x, y)


@rule(aten.mm.default, aten.bmm.default)
def mm(self, mat2, *, by_columns=(False, False)):
    return of_matrices(self, mat2, by_columns)


@rule(aten.mm.dtype, aten.bmm.dtype)
def mm_dtype(self, mat2, out_dtype):
    return matmul(self, mat2)


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(self, mat1, mat2, *, beta=1, alpha=1, by_columns=(False,) * 3):
    return _plus(self, of_matrices(mat1, mat2, by_columns[1:]), beta, alpha)


OF_ORDERS.update((aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default))


@rule(aten._addmm_activation.default)
def _addmm_activation(self, mat1, mat2, *, beta=1, alpha=1, use_gelu=False):
    x = addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    return gelu(x, approximate="tanh") if use_gelu else relu(x)


@rule(aten.addbmm.default)
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return _plus(self, contract(batch1, batch2, (((0, 2), (0, 1)), ((), ()))), beta, alpha)


@rule(aten.mv.default)
def mv(self, vec):
    return contract(self, vec, (((1,), (0,)), ((), ())))


@rule(aten.addmv.default)
def addmv(self, mat, vec, *, beta=1, alpha=1):
    return _plus(self, mv(mat, vec), beta, alpha)


@rule(aten.addr.default)
def addr(self, vec1, vec2, *, beta=1, alpha=1):
    x, y = cast(vec1, opmath(vec1.dtype)), cast(vec2, opmath(vec2.dtype))
    return _plus(self, lax.expand_dims(x, [1]) * lax.expand_dims(y, [0]), beta, alpha)


@rule(aten.dot.default)
def dot(self, tensor):
    return contract(self, tensor, (((0,), (0,)), ((), ())))


@rule(aten.vdot.default)
def vdot(self, other):
    return dot(self if is_integer(self.dtype) or self.dtype.kind != "c" else lax.conj(self), other)


@rule(aten.linear.default)
def linear(input, weight, bias=None):
    product = contract(input, weight, (((input.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return product if bias is None else product + cast(bias, product.dtype)


@rule(aten._trilinear.default)
def _trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """The product of three tensors, each with inserted dimensions, summed over some."""
    count = i1.ndim + len(expand1)
    operands = []
    for array, inserted in ((i1, expand1), (i2, expand2), (i3, expand3)):
        operands += [cast(array, opmath(array.dtype)), [d for d in range(count) if d not in inserted]]
    given = {d for dims in operands[1::2] for d in dims}
    left = [d for d in range(count) if d not in sumdim]
    product = jnp.einsum(
        *operands, [d for d in left if d in given], optimize="optimal", precision=precision.now().products
    )
    return lax.expand_dims(product, [i for i, d in enumerate(left) if d not in given])


@rule(aten._grouped_mm.default)
def _grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
    """One product per group; `offs` has the end of each group along the dimension that the groups divide.

    (rows, k) by (groups, k, n) for the forward pass of a mixture of experts; for the backward pass, (groups, m, k) by
    (k, columns) and (m, inner) by (inner, n), the last giving (groups, m, n).
    """
    if offs is None:
        return matmul(self, mat2)
    sizes = jnp.diff(offs, prepend=jnp.zeros_like(offs, shape=(1,)))
    options = {"precision": precision.now().products, "preferred_element_type": opmath(self.dtype)}
    if self.ndim == 2 and mat2.ndim == 3:
        return lax.ragged_dot(self, mat2, sizes, **options)
    if self.ndim == 3:
        return lax.ragged_dot(mat2.T, jnp.swapaxes(self, 1, 2), sizes, **options).T
    inner = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])
    return lax.ragged_dot_general(self, mat2, sizes, inner, **options)


# --- transformers' own operation for a mixture of experts -------------------------------------------------------------


def grouped_mm_fallback(input, weight, offs):
    """Like `_grouped_mm`; rows after the last group, which belong to no expert, are zero."""
    return _grouped_mm(input, weight, offs)


def grouped_mm_fallback_backward(input, weight, offs, grad_output):
    """Gradients of the rows and of each expert's weight."""
    grad_input = _grouped_mm(grad_output, jnp.swapaxes(weight, 1, 2), offs)
    return grad_input, _grouped_mm(input.T, grad_output, offs)


OF_LIBRARIES["transformers::grouped_mm_fallback"] = grouped_mm_fallback
OF_LIBRARIES["transformers::grouped_mm_fallback_backward"] = grouped_mm_fallback_backward
