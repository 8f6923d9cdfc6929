"""Special functions where naive formulas lose all digits: tails, in relative error."""

import jax
import pytest
import torch

from firstloss.lower.rules import RULES

from .harness import to_array, to_tensor

pytestmark = pytest.mark.optimized

aten = torch.ops.aten

NEAR_ONE = 1 - torch.logspace(-6.5, -0.5, 60)
LARGE, SPREAD = torch.logspace(2.01, 12, 40), torch.linspace(-1, 1, 40)
TAILS = {
    "igammac": (aten.igammac.default, (torch.full((40,), 2.5), torch.linspace(1, 60, 40)), 2e-5),  # a power of exp(-60)
    "igamma where both are large": (aten.igamma.default, (LARGE, LARGE + LARGE.sqrt() * SPREAD), 2e-6),
    "igammac where both are large": (aten.igammac.default, (LARGE, LARGE + LARGE.sqrt() * SPREAD), 2e-6),
    "exp2": (aten.exp2.default, (torch.linspace(-125.3, 127.9, 60),), 3e-7),
    "erfinv": (aten.erfinv.default, (torch.cat([NEAR_ONE, -NEAR_ONE]),), 5e-7),  # four units in the last place
    "erfinv of little": (aten.erfinv.default, (torch.logspace(-30, -0.5, 60),), 5e-7),
    "zeta": (aten.special_zeta.default, (torch.full((40,), 3.0), torch.logspace(-1, 4, 40)), 2e-6),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails_keep_their_digits(name):
    op, args, bound = TAILS[name]
    with jax.enable_x64(True):
        actual = to_tensor(jax.jit(RULES[op])(*map(to_array, args)), torch.float32)
    exact = op(*(x.double() for x in args))
    assert actual.isfinite().all()
    assert ((actual.double() - exact) / exact).abs().max() < bound


def test_erfinv_is_accurate_at_its_ends():
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, 1.5, torch.nan])
    with jax.enable_x64(True):
        actual = to_tensor(jax.jit(RULES[aten.erfinv.default])(to_array(x)), torch.float32)
    torch.testing.assert_close(actual, torch.erfinv(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit()[:4], torch.erfinv(x).signbit()[:4])


def test_powers_of_two_are_exact():
    x = torch.tensor([*range(-126, 129), torch.inf, -torch.inf, torch.nan], dtype=torch.float32)
    with jax.enable_x64(True):
        actual = to_tensor(jax.jit(RULES[aten.exp2.default])(to_array(x)), torch.float32)
    torch.testing.assert_close(actual, torch.exp2(x), rtol=0, atol=0, equal_nan=True)


def test_the_incomplete_gamma_function_is_right_at_infinity():
    a, x = torch.cartesian_prod(*[torch.tensor([0.0, 1.0, 300.0, torch.inf])] * 2).T.contiguous()
    for op in (aten.igamma.default, aten.igammac.default):
        with jax.enable_x64(True):
            actual = to_tensor(jax.jit(RULES[op])(to_array(a), to_array(x)), torch.float32)
        torch.testing.assert_close(actual, op(a, x), rtol=2e-6, atol=1e-30, equal_nan=True)  # a few units
