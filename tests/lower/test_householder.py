"""The QR decomposition without LAPACK, against NumPy's."""

import jax
import numpy as np
import pytest

from firstloss.lower.householder import qr

SHAPES = [(1, 1), (3, 3), (5, 2), (2, 5), (33, 33), (100, 7), (7, 100), (128, 128), (3, 40, 20), (1, 64), (64, 1),
          (0, 3), (3, 0), (257, 129)]  # fmt: skip


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_it_is_numpys_to_rounding(shape, dtype, complete):
    a = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    if min(shape) > 2:
        a[..., 1] = 0  # a reflection that is an identity
    with jax.enable_x64(True):
        q, r = (np.asarray(x) for x in jax.jit(qr, static_argnums=1)(a, complete))
    expected_q, expected_r = np.linalg.qr(a, "complete" if complete else "reduced")
    assert (q.shape, r.shape, q.dtype) == (expected_q.shape, expected_r.shape, expected_q.dtype)
    # The rounding of a sum of as many products as the matrix has rows, at values of about 1.
    rounding = 10 * np.finfo(dtype).eps * max(1, *shape) ** 0.5
    assert np.abs(q @ r - a).max(initial=0) <= rounding * np.abs(a).max(initial=1)
    assert np.abs(np.swapaxes(q, -1, -2) @ q - np.eye(q.shape[-1])).max(initial=0) <= rounding
    # R is determined up to signs, which are LAPACK's; it is as well conditioned as the matrix, which is random.
    assert np.abs(r - expected_r).max(initial=0) <= 100 * rounding * np.abs(expected_r).max(initial=1)
