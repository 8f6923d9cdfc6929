"""Values that eager PyTorch gives exactly and code then truncates or compares: a last bit would change them by 1.

XLA's simplifications of floating-point arithmetic keep values only up to the last bits. See `lower/dtypes.py`.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import firstloss as fl

pytestmark = pytest.mark.optimized


@pytest.fixture(autouse=True, scope="module")
def device(tmp_path_factory):
    """A compiled model makes its backend that of the traced functions."""
    backend = fl.backend("XLA", artifact_dir=tmp_path_factory.mktemp("artifacts"))
    return fl.compile(torch.nn.Linear(1, 1), backend)


def compiled(function, x):
    return torch.as_tensor(fl.trace(function)(x)).cpu()


NUMBERS = torch.arange(3000.0)
PIXELS = torch.arange(6144.0).mul(37).remainder(256).reshape(8, 3, 16, 16)
POWERS_OF_TWO = torch.exp2(torch.arange(-126.0, 128))

CASES = {
    "quotients, rounded down": (NUMBERS.double(), lambda x: (x / 49).floor()),
    "quotients as integers": (NUMBERS, lambda x: (x / 0.3).long()),
    "truncated quotients": (NUMBERS, lambda x: torch.div(x, 0.3, rounding_mode="trunc")),
    "quotients of integers": (NUMBERS.long(), lambda x: (x / 0.3).long()),
    "in place": (NUMBERS.double(), lambda x: x.clone().div_(49).floor()),
    "of a list": (NUMBERS.double(), lambda x: torch._foreach_div([x, x + 1], 49.0)[1].floor()),
    "by a scalar tensor": (NUMBERS, lambda x: (x / torch.tensor(0.3)).long()),
    "by a constant tensor": (NUMBERS, lambda x: (x / torch.full_like(x, 0.3)).long()),
    "by counts": (NUMBERS.reshape(60, 50), lambda x: x / torch.arange(1.0, 51)),
    "by the maximum": (PIXELS, lambda x: (x / x.max() * 255).to(torch.uint8)),
    "by each row's maximum": (PIXELS + 1, lambda x: x / x.amax((1, 2, 3), keepdim=True)),
    "by sums": (PIXELS.reshape(-1, 16) + 1, lambda x: x / x.sum(-1, keepdim=True)),
    "by square roots": (NUMBERS.square() + 1, lambda x: (3000 / (x - 1).clamp(1).sqrt()).floor()),
    "NaN and infinities": (torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]), lambda x: x / 3 + (x + 3)),
    "a mean that is 1": (torch.ones(41), lambda x: x.mean() == 1),
    "means": (torch.ones(300, 41) * torch.arange(300.0)[:, None], lambda x: x.mean(1).floor()),
    "averages of windows": (PIXELS * 9, lambda x: F.avg_pool2d(x, 3).floor()),
    "the average of all": (torch.ones(1, 3, 41, 1), lambda x: F.adaptive_avg_pool2d(x, 1).floor()),
    "means at indices": (
        torch.ones(82),
        lambda x: torch.zeros(2).scatter_reduce(0, torch.arange(82) % 2, x, "mean", include_self=False).floor(),
    ),
    "rounded to decimals": (NUMBERS / 10, lambda x: torch.round(x, decimals=1) == x),
    "bins": (NUMBERS, lambda x: torch.histc(x, bins=49, min=0, max=2940)),
    "spaced integers": (NUMBERS, lambda x: torch.linspace(x[50], x[1], 50, dtype=torch.int64)),
    "logarithms of powers of two": (POWERS_OF_TWO, lambda x: x.log2().floor()),
    "the same in double precision": (POWERS_OF_TWO.double(), lambda x: x.log2()),
    "rounding by a large number": (NUMBERS / 7, lambda x: (x + 12582912.0) - 12582912.0),
    "the same by a scalar tensor": (NUMBERS / 7, lambda x: (x + torch.tensor(12582912.0)) - torch.tensor(12582912.0)),
    "back to the value": (NUMBERS, lambda x: ((x + 0.1) - 0.1).floor()),
}


@pytest.mark.parametrize("name", CASES)
def test_truncated_values_are_those_of_eager(name):
    x, function = CASES[name]
    torch.testing.assert_close(compiled(function, x), function(x), rtol=0, atol=0, equal_nan=True)


CONSTANTS = st.one_of(st.integers(1, 1000).map(float), st.floats(2**-20, 2**24, width=32))
STEPS = st.tuples(st.sampled_from(["add", "sub", "radd", "add_tensor"]), CONSTANTS)


def _sum(steps, x):
    for name, constant in steps:
        if name == "add":
            x = x + constant
        elif name == "sub":
            x = x - constant
        elif name == "radd":
            x = constant + x
        else:
            x = x + torch.tensor(constant, dtype=x.dtype)
    return x


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, min_size=2, max_size=5), CONSTANTS, st.sampled_from([torch.float32, torch.float64]))
def test_sums_with_constants_and_a_quotient_have_the_bits_of_eager(steps, divisor, dtype):
    x = NUMBERS.to(dtype)
    for function in (functools.partial(_sum, steps), lambda x: x / divisor, lambda x: _sum(steps, x) / divisor):
        assert torch.equal(compiled(function, x), function(x))
