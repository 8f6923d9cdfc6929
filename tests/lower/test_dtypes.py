"""Promotion, casts, integer division and accumulation dtypes."""

import math
import subprocess
import sys

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from firstloss.lower.dtypes import cast, promoted, to_jax, to_torch
from firstloss.lower.registry import RULES

from .harness import assert_rule, assert_same, to_array, to_tensor

aten = torch.ops.aten
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
tensors = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=dtype), st.sampled_from(DTYPES), st.sampled_from([(), (2,)])
)
numbers = st.sampled_from([True, 3, 2.5, 1 + 2j])


@given(tensors, st.one_of(tensors, numbers))
@settings(max_examples=400)
def test_promotion_matches_torch(x, y):
    with jax.enable_x64(True):
        args = [jnp.zeros(a.shape, to_jax(a.dtype)) if isinstance(a, torch.Tensor) else a for a in (x, y)]
        expected = torch.result_type(x, y)
        if expected in (torch.complex32, getattr(torch, "bcomplex32", None)):  # XLA has none
            with pytest.raises(NotImplementedError, match="complex32|bcomplex32"):
                promoted(*args)
        else:
            assert to_torch(promoted(*args)) == expected


def test_the_default_dtype_is_respected():
    torch.set_default_dtype(torch.float64)
    try:
        assert promoted(jnp.zeros(2, "int32"), 1.5) == "float64"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool])
@pytest.mark.parametrize("target", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16])
def test_casts_match_torch(source, target):
    x = torch.tensor([-300.7, -1.5, -0.2, 0.0, 0.9, 1.5, 127.6, 255.9, 300.2]).to(source)
    with jax.enable_x64(True):
        actual = to_tensor(cast(to_array(x), to_jax(target)), target)
    assert_same(actual, x.to(target), 0.0)


SEVENS = torch.tensor([7, -7, 6, -6, 0, 1, -1])
THREES = torch.tensor([3, 3, -3, -3, 5, -2, 2])


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float32, torch.bfloat16], ids=str)
def test_division_matches_torch(mode, dtype):
    x, y = SEVENS.to(dtype), THREES.to(dtype)
    assert_rule(aten.div.Tensor_mode, (x, y), {"rounding_mode": mode}, torch.div(x, y, rounding_mode=mode))
    assert_rule(aten.remainder.Tensor, (x, y), {}, torch.remainder(x, y))
    assert_rule(aten.fmod.Tensor, (x, y), {}, torch.fmod(x, y))


def test_floor_division_is_exact():
    """`floor(x / y)` is off by one if the quotient rounds up to an integer."""
    torch.manual_seed(0)
    y = torch.rand(4000) * 10 - 5
    x = (torch.randint(-1000, 1000, (4000,)) * y).nextafter(torch.tensor(0.0))
    assert_rule(aten.floor_divide.default, (x, y), {}, torch.floor_divide(x, y), tolerance=0.0)
    assert_rule(
        aten.floor_divide.default, (torch.ones(1), 0.1), {}, torch.floor_divide(torch.ones(1), 0.1), tolerance=0.0
    )


def test_float_division_by_zero_matches_torch():
    x, y = torch.tensor([1.0, -1.0, 0.0, float("inf"), 5.0]), torch.tensor([0.0, 0.0, 0.0, 2.0, float("inf")])
    for mode in (None, "trunc", "floor"):
        assert_rule(aten.div.Tensor_mode, (x, y), {"rounding_mode": mode}, torch.div(x, y, rounding_mode=mode))
    assert_rule(aten.remainder.Tensor, (x, y), {}, torch.remainder(x, y))


def test_integers_are_exact():
    big = torch.tensor([2**53 + 1, 2**62 - 1, -(2**53) - 1])
    assert_rule(aten.add.Tensor, (big, 1), {}, big + 1)
    assert_rule(aten.sum.default, (big,), {}, big.sum())
    assert_rule(aten.cumsum.default, (big, 0), {}, big.cumsum(0))
    assert_rule(
        aten.mul.Tensor, (torch.tensor([100, 100], dtype=torch.int8), 3), {}, torch.tensor([44, 44], dtype=torch.int8)
    )
    assert_rule(aten.mm.default, (big[None, :1], big[:1, None]), {}, big[None, :1] @ big[:1, None])
    base, exponent = torch.tensor([2, -2, 1, -1, 3]), torch.tensor([40, 3, -5, -3, -1])
    assert_rule(aten.pow.Tensor_Tensor, (base, exponent), {}, torch.pow(base, exponent))


def test_half_precision_sums_in_float32():
    """In bfloat16, a running sum of ones would stop at 256."""
    ones = torch.ones(4096, dtype=torch.bfloat16)
    assert_rule(aten.sum.default, (ones,), {}, ones.sum(), tolerance=0.0)
    assert_rule(aten.mean.default, (ones,), {}, ones.mean(), tolerance=0.0)
    assert_rule(aten.mm.default, (ones[None], ones[:, None]), {}, ones[None] @ ones[:, None], tolerance=0.0)
    indices = torch.zeros(512, dtype=torch.int64)
    g = torch.ones(512, 2, dtype=torch.bfloat16)
    # Eager sums rows in bfloat16 here and stalls at 256; the lowering gives the exact sum.
    expected = torch.tensor([[512.0, 512.0], [0.0, 0.0]], dtype=torch.bfloat16)
    assert_rule(aten.embedding_dense_backward.default, (g, indices, 2, -1, False), {}, expected, tolerance=0.0)


def test_half_precision_rounds_once():
    x = torch.tensor([1.0, 3.0, 257.0], dtype=torch.bfloat16)
    assert_rule(aten.add.Tensor, (x, x), {"alpha": 0.3}, torch.add(x, x, alpha=0.3), tolerance=0.0)
    assert_rule(aten.addcmul.default, (x, x, x), {"value": 0.1}, torch.addcmul(x, x, x, value=0.1), tolerance=0.0)
    assert_rule(aten.lerp.Scalar, (x, -x, 0.3), {}, torch.lerp(x, -x, 0.3), tolerance=0.0)


@pytest.mark.parametrize("weight", [0.1, 0.49999999999, 0.5, 0.9, 1.0, -0.3])
def test_lerp_by_a_number_starts_at_the_nearer_end(weight):
    """Like lerp by a tensor; which end is nearer (in float32, 0.49999999999 is 0.5) is decided at trace time."""
    start, end = torch.tensor([0.7, 3.0, -7.0]), torch.tensor([1.0, 0.1, 2.5])
    expected = torch.lerp(start, end, weight)
    # One more rounding than eager's kernel, which uses a fused multiply-add.
    assert_rule(aten.lerp.Scalar, (start, end, weight), {}, expected, tolerance=1.2e-7)
    assert_rule(aten._foreach_lerp.Scalar, ([start], [end], weight), {}, [expected], tolerance=1.2e-7)
    jaxpr = jax.make_jaxpr(lambda x, y: RULES[aten.lerp.Scalar](x, y, weight))(start.numpy(), end.numpy())
    assert not any(equation.primitive.name == "select_n" for equation in jaxpr.eqns)


def test_lerp_by_one_is_exactly_the_end():
    start, end = torch.tensor([1e8]), torch.tensor([0.1])  # 1e8 + (0.1 - 1e8) is 0 in float32
    assert_rule(aten.lerp.Scalar, (start, end, 1.0), {}, end, tolerance=0.0)
    assert_rule(aten.lerp.Tensor, (start, end, torch.tensor(1.0)), {}, end, tolerance=0.0)


def test_nan_and_infinity_match_torch():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5])
    for name in ("abs", "sign", "relu", "floor", "isnan", "isinf", "neg", "sigmoid", "silu", "exp", "rsqrt"):
        overload = getattr(aten, name).default
        assert_rule(overload, (x,), {}, overload(x))
    assert_rule(aten.clamp.default, (x, -1, 1), {}, x.clamp(-1, 1))
    assert_rule(aten.clamp.default, (x, 2, 1), {}, x.clamp(2, 1))
    assert_rule(aten.maximum.default, (x, x.flip(0)), {}, torch.maximum(x, x.flip(0)))
    assert_rule(aten.fmax.default, (x, x.flip(0)), {}, torch.fmax(x, x.flip(0)))
    assert_rule(aten.amax.default, (x,), {}, x.amax())
    assert_rule(aten.argmax.default, (x,), {}, x.argmax())
    for descending in (False, True):
        assert_rule(
            aten.sort.stable,
            (x,),
            {"stable": True, "descending": descending},
            x.sort(stable=True, descending=descending),
        )


def test_registry_needs_no_jax():
    code = "import sys, firstloss.lower.registry; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_mask_times_a_nonfinite_number_is_not_finite(dtype):
    """XLA alone would turn the product into a select, and hide the NaN that eager gives."""
    x = torch.tensor([math.inf, math.nan, -3.0, 2.0], dtype=dtype)
    mask = torch.tensor([False, False, False, True])
    assert_rule(aten.mul.Tensor, (x, mask), {}, x * mask)

    def masked(x, mask):
        return cast(mask, x.dtype) * x

    with jax.enable_x64(True):
        actual = to_tensor(jax.jit(masked)(to_array(x), to_array(mask)), dtype)
    expected = mask.to(dtype) * x
    assert_same(actual, expected)
    if not dtype.is_complex:
        assert torch.equal(actual.signbit()[2:], expected.signbit()[2:])  # -3 * 0 is -0
