"""Matrix factorizations, compared by their product, since signs and phases of vectors are arbitrary."""

import jax
import numpy as np
import pytest
import torch

from firstloss.lower.rules import RULES

from .harness import assert_rule, assert_same, to_array, to_tensor

aten = torch.ops.aten


def run(overload, *args, **kwargs):
    with jax.enable_x64(True):
        results = RULES[overload](*map(to_array, args), **kwargs)
    return [to_tensor(x, torch.from_numpy(np.asarray(x)).dtype) for x in results]


@pytest.fixture(params=[torch.float32, torch.float64, torch.complex64], ids=str)
def matrices(request):
    torch.manual_seed(0)
    return torch.randn(2, 5, 3, dtype=request.param)


@pytest.mark.parametrize("full", [False, True])
def test_svd_matches_eager(matrices, full):
    u, s, vh = run(aten._linalg_svd.default, matrices, full)
    assert_same(s, torch.linalg.svdvals(matrices))
    k = s.shape[-1]
    assert_same(u[..., :k] * s[..., None, :] @ vh[..., :k, :], matrices, 1e-5)
    assert_same(u.mH @ u, torch.eye(u.shape[-1], dtype=u.dtype).expand(2, -1, -1), 1e-5)


@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigh_reads_one_triangle(matrices, triangle):
    square = matrices.mT @ matrices.conj()
    half = square.tril() if triangle == "L" else square.triu()
    values, vectors = run(aten._linalg_eigh.default, half, triangle)
    assert_same(values, torch.linalg.eigvalsh(square), 1e-5)
    assert_same(vectors * values[..., None, :] @ vectors.mH, square, 1e-4)


def test_qr_has_lapacks_signs(matrices):
    for mode in ("reduced", "complete", "r"):
        assert_rule(
            aten.linalg_qr.default, (matrices, mode), {}, aten.linalg_qr(matrices, mode), tolerance=1e-5
        )  # LAPACK on both sides


def test_pinv_matches_eager(matrices):
    with jax.enable_x64(True):
        inverse = to_tensor(RULES[aten.linalg_pinv.atol_rtol_tensor](to_array(matrices)), matrices.dtype)
    assert_same(inverse, torch.linalg.pinv(matrices), 1e-4)


def test_a_failed_cholesky_is_reported():
    factor, info = run(aten.linalg_cholesky_ex.default, -torch.eye(3))
    assert info != 0 and factor.isnan().any()
