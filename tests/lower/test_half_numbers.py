"""Half precision with Python numbers: which operations round the number first is as in eager PyTorch, bit for bit."""

import pytest
import torch
import torch.nn.functional as F

import firstloss as fl
from tests.compiled_steps import compilations

OPERATIONS = {
    "add": lambda x, s: x + s,
    "add from the left": lambda x, s: s + x,
    "sub": lambda x, s: x - s,
    "sub from the left": lambda x, s: s - x,
    "mul": lambda x, s: x * s,
    "div": lambda x, s: x / s,
    "div from the left": lambda x, s: s / x,
    "floor division": lambda x, s: x // s,
    "pow": lambda x, s: x.abs() ** s,
    "pow from the left": lambda x, s: s**x,
    "fmod": lambda x, s: torch.fmod(x, s),
    "remainder": lambda x, s: x % s,
    "gt": lambda x, s: x > s,
    "ge": lambda x, s: x >= s,
    "lt": lambda x, s: x < s,
    "le": lambda x, s: x <= s,
    "eq": lambda x, s: x == s,
    "ne": lambda x, s: x != s,
    "clamp": lambda x, s: x.clamp(-s, s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "masked fill": lambda x, s: x.masked_fill(x > 0, s),
    "addcdiv": lambda x, s: torch.addcdiv(x, x, x.flip(0).abs() + 1, value=s),
    "threshold": lambda x, s: F.threshold(x, s, 0.456),
    "leaky relu": lambda x, s: F.leaky_relu(x, s),
    "hardshrink": lambda x, s: F.hardshrink(x, s),
    "softshrink": lambda x, s: F.softshrink(x, s),
    "several": lambda x, s: x * s + s,
    "foreach add": lambda x, s: torch._foreach_add([x], s)[0],
    "foreach sub": lambda x, s: torch._foreach_sub([x], s)[0],
    "foreach mul": lambda x, s: torch._foreach_mul([x], s)[0],
    "foreach div": lambda x, s: torch._foreach_div([x], s)[0],
    "foreach pow": lambda x, s: torch._foreach_pow([x.abs()], s)[0],
    "a scalar tensor": lambda x, s: x + torch.tensor(s),
    "compared with a scalar tensor": lambda x, s: x > torch.tensor(s),
}


def values(dtype):
    torch.manual_seed(0)
    parts = (torch.randn(2000), torch.linspace(-0.3, 0.3, 2000), torch.linspace(0.1, 0.15, 1000))
    return torch.cat(parts).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_numbers_are_rounded_where_eager_rounds_them(operation, dtype, backend):
    function, x = OPERATIONS[operation], values(dtype)
    step = fl.trace(lambda x, s: function(x, s))
    for number in (0.123, 3.3, 0.7, 0.124):  # a constant of the step, then an input of it
        expected, actual = function(x, number), step(x, number).clone()
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0)), number
    assert compilations(step) <= 3 or "scalar tensor" in operation  # which specializes the step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_an_exponent_that_changes_gives_what_a_constant_gives(dtype, backend):
    x = torch.arange(1, 50).to(dtype) if dtype is torch.int32 else values(dtype).abs() + 0.5
    step = fl.trace(lambda x, s: x**s)
    for number in (0.3, 2.0, 0.5, 3.0, -0.5, -1.0, -2.0, 1.0, 0.0, 2.5):  # with the special cases of PyTorch's kernel
        constant = fl.trace(lambda x, number=number: x**number)
        assert torch.equal(step(x, number).clone(), constant(x)), number
    assert compilations(step) <= 3
