"""Matrix factorizations, and operations based on them.

Eager PyTorch raises if a matrix is singular or not positive definite. A compiled program cannot: its results are then
NaN or infinite, and `info`, if there is one, is not 0.
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from . import householder
from .dtypes import cast, is_complex, opmath, where
from .matmul import matmul
from .registry import portable_rule, rule

INT32 = np.dtype(np.int32)


def adjoint(x):
    x = jnp.swapaxes(x, -1, -2)
    return lax.conj(x) if is_complex(x.dtype) else x


def _common_batch(*matrices):
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return [jnp.broadcast_to(x, batch + x.shape[-2:]) for x in matrices]


def _failed(x):
    """`info` of a factor: 1 if it contains NaN."""
    broken = lax.reduce_or(x != x, (x.ndim - 2, x.ndim - 1))
    return cast(broken, INT32)


@rule(aten._linalg_check_errors.default)
def _linalg_check_errors(info, api_name, *, is_matrix):
    """Raises in eager PyTorch; see the module's docstring."""


# --- Triangular systems and Cholesky ----------------------------------------------------------------------------------


def _solve_triangular(a, b, *, upper, left=True, unit=False, transpose=False, conjugate=False):
    a, b = _common_batch(a, b)
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unit, transpose_a=transpose, conjugate_a=conjugate
    )


@rule(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(self, B, *, upper, left=True, unitriangular=False):
    return _solve_triangular(self, B, upper=upper, left=left, unit=unitriangular)


@rule(aten.triangular_solve.default)
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    a, _ = _common_batch(A, self)
    return _solve_triangular(A, self, upper=upper, unit=unitriangular, transpose=transpose), a


def _cholesky(x, upper):
    """Reads only the given triangle, like LAPACK."""
    factor = lax.linalg.cholesky(adjoint(x) if upper else x, symmetrize_input=False)
    return adjoint(factor) if upper else factor


@rule(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(self, *, upper=False, check_errors=False):
    factor = _cholesky(self, upper)
    return factor, _failed(factor)


@rule("cholesky.default")  # removed in PyTorch 2.15
def cholesky(self, upper=False):
    return _cholesky(self, upper)


@rule(aten.cholesky_solve.default)
def cholesky_solve(self, input2, upper=False):
    lower = adjoint(input2) if upper else input2
    half = _solve_triangular(lower, self, upper=False)
    return _solve_triangular(adjoint(lower), half, upper=True)


@rule(aten.cholesky_inverse.default)
def cholesky_inverse(self, upper=False):
    return cholesky_solve(jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), self, upper)


# --- LU ---------------------------------------------------------------------------------------------------------------


def _lu(x):
    """Both factors in one matrix, LAPACK's row exchanges (counted from 1) and their permutation."""
    lu, pivots, permutation = lax.linalg.lu(x)
    return lu, pivots + 1, permutation


def _singular(lu):
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    zero = (diagonal == 0) | (diagonal != diagonal)
    first = cast(lax.argmax(zero, zero.ndim - 1, np.int32) + 1, INT32) if zero.shape[-1] else None
    return lax.full(lu.shape[:-2], 0, INT32) if first is None else where(jnp.any(zero, -1), first, 0)


def _as_factored(A):
    """For a determinant PyTorch factors the transpose of a real contiguous matrix, to save a copy, and its derivative
    formulas expect that."""
    return A if is_complex(A.dtype) else jnp.swapaxes(A, -1, -2)


@rule(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(A, *, pivot=True, check_errors=False):
    _need_pivot(pivot)
    lu, pivots, _ = _lu(A)
    return lu, pivots, _singular(lu)


def _need_pivot(pivot):
    if not pivot:
        raise NotImplementedError("LU without pivoting is not supported on the CPU; leave pivot=True.")


def _unpack(lu):
    """The factors L (unit lower) and U."""
    k = min(lu.shape[-2:])
    lower = jnp.tril(lu[..., :, :k], -1) + jnp.eye(lu.shape[-2], k, dtype=lu.dtype)
    return lower, jnp.triu(lu[..., :k, :])


def _permutation_matrix(permutation, dtype):
    """The matrix P of A = P L U."""
    size = permutation.shape[-1]
    rows = lax.broadcasted_iota(permutation.dtype, (*permutation.shape[:-1], size, size), permutation.ndim - 1)
    return cast(rows == lax.expand_dims(permutation, [permutation.ndim - 1]), dtype)


@rule(aten.linalg_lu.default)
def linalg_lu(A, *, pivot=True):
    _need_pivot(pivot)
    lu, _, permutation = _lu(A)
    return _permutation_matrix(permutation, A.dtype), *_unpack(lu)


def _permutation_of(pivots, rows: int):
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


@rule(aten.lu_unpack.default)
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    nothing = lax.full((0,), 0, LU_data.dtype)
    lower, upper = _unpack(LU_data) if unpack_data else (nothing, nothing)
    if not unpack_pivots:
        return nothing, lower, upper
    return _permutation_matrix(_permutation_of(LU_pivots, LU_data.shape[-2]), LU_data.dtype), lower, upper


def _lu_solve(lu, permutation, b, adjoint_=False):
    """Solve A x = b, or A^H x = b, from A = P L U."""
    lu, b = _common_batch(lu, b)
    permutation = jnp.broadcast_to(permutation, lu.shape[:-1])
    if not adjoint_:
        x = jnp.take_along_axis(b, lax.expand_dims(permutation, [permutation.ndim]), axis=-2)
        x = _solve_triangular(lu, x, upper=False, unit=True)
        return _solve_triangular(lu, x, upper=True)
    x = _solve_triangular(lu, b, upper=True, transpose=True, conjugate=is_complex(lu.dtype))
    x = _solve_triangular(lu, x, upper=False, unit=True, transpose=True, conjugate=is_complex(lu.dtype))
    inverse = jnp.argsort(permutation, axis=-1)
    return jnp.take_along_axis(x, lax.expand_dims(inverse, [inverse.ndim]), axis=-2)


@rule(aten.linalg_lu_solve.default)
def linalg_lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    permutation = _permutation_of(pivots, LU.shape[-2])
    if left:
        return _lu_solve(LU, permutation, B, adjoint)
    swapped = _lu_solve(LU, permutation, _adjoint(B), not adjoint)  # X A = B  <=>  A^H X^H = B^H
    return _adjoint(swapped)


_adjoint = adjoint  # the argument above shadows the name


@rule(aten._linalg_solve_ex.default)
def _linalg_solve_ex(A, B, *, left=True, check_errors=False):
    is_vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    b = lax.expand_dims(B, [B.ndim]) if is_vector else B
    lu, pivots, permutation = _lu(A)
    x = _lu_solve(lu, permutation, b) if left else adjoint(_lu_solve(lu, permutation, adjoint(b), True))
    return lax.squeeze(x, [x.ndim - 1]) if is_vector else x, lu, pivots, _singular(lu)


@rule(aten.linalg_inv_ex.default)
def linalg_inv_ex(A, *, check_errors=False):
    lu, _, permutation = _lu(A)
    return _lu_solve(lu, permutation, jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)), _singular(lu)


def _exchange_sign(pivots):
    """-1 for an odd number of row exchanges, else 1."""
    moved = pivots != jnp.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    return 1 - 2 * (jnp.sum(moved, -1) % 2)


@rule(aten._linalg_det.default)
def _linalg_det(A):
    lu, pivots, _ = _lu(_as_factored(A))
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, -1) * cast(_exchange_sign(pivots), lu.dtype), lu, pivots


@rule(aten._linalg_slogdet.default)
def _linalg_slogdet(A):
    lu, pivots, _ = _lu(_as_factored(A))
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    sign = jnp.prod(jnp.sign(diagonal), -1) * cast(_exchange_sign(pivots), lu.dtype)
    return sign, jnp.sum(lax.log(lax.abs(diagonal)), -1), lu, pivots


# --- QR and spectra ---------------------------------------------------------------------------------------------------


@rule(aten.linalg_qr.default)
def linalg_qr(A, mode="reduced"):
    q, r = lax.linalg.qr(A, full_matrices=mode == "complete")
    return (lax.full((0,), 0, A.dtype) if mode == "r" else q), r


@portable_rule(aten.linalg_qr.default)
def portable_linalg_qr(A, mode="reduced"):
    """As `linalg_qr`, in StableHLO's own operations."""
    if is_complex(A.dtype):
        return linalg_qr(A, mode)
    q, r = householder.qr(A, mode == "complete")
    return (lax.full((0,), 0, A.dtype) if mode == "r" else q), r


@rule(aten.geqrf.default)
def geqrf(self):
    """The reflections and their scales in LAPACK's form (numpy's are transposed)."""
    reflections, scales = jnp.linalg.qr(self, mode="raw")
    return jnp.swapaxes(reflections, -1, -2), scales


@rule(aten.ormqr.default)
def ormqr(self, input2, input3, left=True, transpose=False):
    return lax.linalg.ormqr(self, input2, input3, left=left, transpose=transpose)


@rule(aten.linalg_householder_product.default)
def linalg_householder_product(input, tau):
    return lax.linalg.householder_product(input, tau)


@rule(aten._linalg_svd.default)
def _linalg_svd(A, full_matrices=False, compute_uv=True, *, driver=None):
    if not compute_uv:
        nothing = lax.full((0,), 0, A.dtype)
        return nothing, lax.linalg.svd(A, compute_uv=False), nothing
    return tuple(lax.linalg.svd(A, full_matrices=full_matrices))


@rule(aten._linalg_eigh.default)
def _linalg_eigh(A, UPLO="L", compute_v=True):
    vectors, values = lax.linalg.eigh(A, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else lax.full((0,), 0, A.dtype)


@rule(aten.linalg_eig.default)
def linalg_eig(self):
    return tuple(jnp.linalg.eig(self))


@rule(aten._linalg_eigvals.default, aten.linalg_eigvals.default)
def _linalg_eigvals(self):
    return jnp.linalg.eigvals(self)


@rule(aten.linalg_pinv.atol_rtol_tensor)
def linalg_pinv(self, *, atol=None, rtol=None, hermitian=False):
    """By the singular values above max(atol, rtol * largest); of a Hermitian matrix only the lower triangle is read."""
    if hermitian:
        below = jnp.tril(self, -1)
        self = below + adjoint(below) + cast(jnp.real(self) * jnp.eye(self.shape[-1]), self.dtype)
    u, s, vh = lax.linalg.svd(self, full_matrices=False)
    largest = jnp.max(s, -1, keepdims=True, initial=0)
    if rtol is None:
        default = 0.0 if atol is not None else max(self.shape[-2:]) * float(jnp.finfo(self.dtype).eps)
        rtol = jnp.full((), default, s.dtype)
    cut = cast(rtol, s.dtype)[..., None] * largest
    cut = cut if atol is None else jnp.maximum(cast(atol, s.dtype)[..., None], cut)
    inverse = where(s > cut, 1 / where(s > cut, s, 1), 0)
    return matmul(adjoint(vh), cast(lax.expand_dims(inverse, [inverse.ndim]), vh.dtype) * adjoint(u))


# --- Others -----------------------------------------------------------------------------------------------------------


@rule(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(self):
    """The Taylor polynomial of A / 2^s, squared s times, like in eager PyTorch; more accurate in float32 than a
    quotient.

    Degree 20 is exact to rounding for norms up to 3 in single precision, 1 in double (Bader, Blanes and Casas 2019,
    table 2, for degree 18: 3.01 and 1.09). Each squaring doubles the rounding error, hence as few of them as possible.
    """
    x = cast(self, opmath(self.dtype))
    if not x.size:
        return x
    norm = lax.reduce_max(lax.reduce_sum(lax.abs(x), (x.ndim - 2,)), (x.ndim - 2,))
    most = 3 if norm.dtype == np.float32 else 1
    squarings = cast(lax.clamp(0.0, cast(lax.ceil(jnp.log2(norm / most)), np.dtype(np.float64)), 1100.0), INT32)
    halved = lax.exp2(cast(-squarings, norm.dtype))
    x = x * cast(lax.expand_dims(halved, (norm.ndim, norm.ndim + 1)), x.dtype)
    one = jnp.eye(x.shape[-1], dtype=x.dtype)
    square = matmul(x, x)
    cube = matmul(square, x)
    term = [1 / math.factorial(n) for n in range(21)]
    total = term[18] * one + term[19] * x + term[20] * square
    for n in range(15, -1, -3):
        total = matmul(total, cube) + term[n] * one + term[n + 1] * x + term[n + 2] * square
    still = lax.expand_dims(squarings, (norm.ndim, norm.ndim + 1))
    return lax.fori_loop(
        0, lax.reduce_max(squarings, range(norm.ndim)), lambda i, y: where(i < still, matmul(y, y), y), total
    )


@rule(aten.linalg_cross.default)
def linalg_cross(self, other, *, dim=-1):
    shape = np.broadcast_shapes(self.shape, other.shape)
    return jnp.cross(jnp.broadcast_to(self, shape), jnp.broadcast_to(other, shape), axis=dim)


@rule(aten.trace.default)
def trace(self):
    return jnp.trace(self, dtype=np.int64 if self.dtype.kind in "biu" else None)
