"""The QR decomposition in StableHLO's own operations, for modules that must run where LAPACK's custom calls are not.

Householder reflections in blocks, as in LAPACK's `geqrf` and `orgqr`: each block's reflections are one product,
I - V T V', so that most of the work is matrix products (Schreiber and Van Loan, "A storage-efficient WY representation
for products of Householder transformations", 1989). The signs are LAPACK's; the last bits are not.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

_BLOCK = 32  # columns


def qr(a: Any, complete: bool = False) -> tuple[Any, Any]:
    """The Q and R of real matrices of shape [..., m, n]; Q has min(m, n) columns, or m if `complete`."""
    factor = _qr if not complete else lambda matrix: _qr(matrix, complete=True)
    for _ in range(a.ndim - 2):
        factor = jax.vmap(factor)
    return factor(a)


def _qr(a: Any, complete: bool = False) -> tuple[Any, Any]:
    m, n = a.shape
    k = min(m, n)
    columns = m if complete else k
    panels = -(-k // _BLOCK)
    if panels == 0:
        return jnp.eye(m, columns, dtype=a.dtype), a[:columns]
    width = max(n, panels * _BLOCK)
    a = jnp.pad(a, ((0, 0), (0, width - n)))  # reflections of zero columns are identities

    def reduce(p: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        a, vs, ts = state
        first = p * np.int64(_BLOCK)
        panel, v, t = _panel(lax.dynamic_slice_in_dim(a, first, _BLOCK, 1), first)
        update = v @ (t.T @ (v.T @ a))
        a = jnp.where(jnp.arange(width) >= first + _BLOCK, a - update, a)
        a = lax.dynamic_update_slice_in_dim(a, panel, first, 1)
        return a, lax.dynamic_update_index_in_dim(vs, v, p, 0), lax.dynamic_update_index_in_dim(ts, t, p, 0)

    vs, ts = jnp.zeros((panels, m, _BLOCK), a.dtype), jnp.zeros((panels, _BLOCK, _BLOCK), a.dtype)
    a, vs, ts = lax.fori_loop(np.int64(0), np.int64(panels), reduce, (a, vs, ts))

    def expand(i: Any, q: Any) -> Any:
        v, t = vs[panels - 1 - i], ts[panels - 1 - i]
        return q - v @ (t @ (v.T @ q))

    q = lax.fori_loop(np.int64(0), np.int64(panels), expand, jnp.eye(m, columns, dtype=a.dtype))
    return q, jnp.triu(a[:columns, :n])


def _panel(a: Any, first: Any) -> tuple[Any, Any, Any]:
    """Reduce a block of columns, whose diagonal begins in row `first`: the reduced block, V and T."""
    rows, columns = jnp.arange(a.shape[0]), jnp.arange(_BLOCK)

    def reflect(j: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        a, v, t = state
        row = first + j
        x = a[:, j]
        alpha = jnp.sum(jnp.where(rows == row, x, 0))  # 0 beyond the last row
        tail = jnp.where(rows > row, x, 0)
        scale = jnp.max(jnp.abs(tail))
        norm = scale * jnp.sqrt(jnp.sum(jnp.square(tail / jnp.where(scale == 0, 1, scale))))
        beta = jnp.where(alpha < 0, 1, -1) * jnp.hypot(alpha, norm)
        is_identity = norm == 0
        tau = jnp.where(is_identity, 0, (beta - alpha) / jnp.where(is_identity, 1, beta))
        reflection = jnp.where(rows == row, 1, tail / jnp.where(is_identity, 1, alpha - beta))
        reduced = a - tau * jnp.outer(reflection, reflection @ a)
        column = jnp.where(rows > row, 0, jnp.where(rows == row, jnp.where(is_identity, alpha, beta), x))
        a = jnp.where(columns > j, reduced, jnp.where(columns == j, column[:, None], a))
        before = jnp.where(columns < j, v.T @ reflection, 0)
        t_column = jnp.where(columns == j, tau, -tau * (t @ before))
        return a, v.at[:, j].set(reflection), t.at[:, j].set(t_column)

    empty = jnp.zeros_like(a), jnp.zeros((_BLOCK, _BLOCK), a.dtype)
    return lax.fori_loop(np.int64(0), np.int64(_BLOCK), reflect, (a, *empty))
