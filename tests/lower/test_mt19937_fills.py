"""Fills computed on the device, against PyTorch's kernels."""

import jax
import numpy as np
import pytest
import torch

from firstloss.compat.cpu_fills import rounds_single, uniform_roundings
from firstloss.lower.dtypes import constant
from firstloss.lower.mt19937 import draw
from firstloss.lower.mt19937_fills import kernel
from firstloss.rng.stream import Stream

pytestmark = pytest.mark.optimized

COUNT = 200_000 // 16 * 16

CASES = [
    ("uniform", {"low": 0, "high": 1}, lambda t, g: t.uniform_(generator=g)),
    ("uniform", {"low": -0.02, "high": 0.02}, lambda t, g: t.uniform_(-0.02, 0.02, generator=g)),
    ("uniform", {"low": -0.3, "high": 0.7}, lambda t, g: t.uniform_(-0.3, 0.7, generator=g)),
    ("uniform", {"low": 0.0, "high": 0.3}, lambda t, g: t.uniform_(0, 0.3, generator=g)),
    ("uniform", {"low": 2.0, "high": 2.5}, lambda t, g: t.uniform_(2.0, 2.5, generator=g)),
    ("bernoulli", {"p": 0.3}, lambda t, g: t.bernoulli_(0.3, generator=g)),
    ("bernoulli", {"p": 1.0}, lambda t, g: t.bernoulli_(1.0, generator=g)),
    ("random", {}, lambda t, g: t.random_(generator=g)),
]
INTEGERS = [
    ({"low": 0, "high": 1000}, (0, 1000)),
    ({"low": -5, "high": 1 << 40}, (-5, 1 << 40)),
    ({"low": -3, "high": (1 << 28) - 3}, (-3, (1 << 28) - 3)),
]


def both(name, dtype, arguments, eager):
    generator = torch.Generator().manual_seed(7)
    window = Stream.from_state(generator.get_state().numpy())._block(0)
    expected = eager(torch.empty(COUNT, dtype=dtype), generator)
    with jax.enable_x64(True):
        fill = kernel(name, dtype, arguments)
        if fill is None and not rounds_single(name, dtype):
            pytest.skip(f"this PyTorch draws {dtype} in another way, so it is made on the host")
        actual, _ = jax.jit(lambda w: draw(w, COUNT, fill.emit, fill.words_each, fill.block))(window[None])
    return np.asarray(actual[0]), constant(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, arguments, eager", CASES)
def test_exact_fills_match_eager(name, arguments, eager, dtype):
    actual, expected = both(name, dtype, arguments, eager)
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_integers_match_eager(dtype):
    actual, expected = both("random", dtype, {}, lambda t, g: t.random_(generator=g))
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("arguments, bounds", INTEGERS)
def test_bounded_integers_match_eager(arguments, bounds):
    actual, expected = both("random", torch.int64, arguments, lambda t, g: t.random_(*bounds, generator=g))
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (0.0, 0.02), (0.1, 0.02), (-3.0, 2.5)])
def test_normals_are_within_their_ulps_of_eagers(dtype, mean, std):
    arguments = {"mean": mean, "std": std}
    actual, expected = both("normal", dtype, arguments, lambda t, g: t.normal_(mean, std, generator=g))
    # Units in the last place of the largest standard normal (5.77), scaled: 4 is the documented tolerance if a platform
    # fuses differently. Without AVX2, PyTorch uses the C library's functions, whose results are up to 4.3 units away.
    # If it fuses like PyTorch, as XLA does on AVX2 machines, bits are equal. In half precision it may be the next one.
    unit = np.float64(2.0 ** (2 - 24 + 1)) * std + np.spacing(np.float32(abs(mean)))
    half = {torch.float32: 0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    gap = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    half = half * np.abs(expected.astype(np.float64)) + (dtype is torch.float16) * 2.0**-24  # subnormal
    assert (gap <= 5 * unit + half).all()


@pytest.mark.parametrize(
    "name, dtype, arguments",
    [
        # Would differ if rounded twice, where PyTorch rounds once.
        *[("uniform", torch.float32, {"low": 1e-20, "high": 1.0})] * (uniform_roundings() == 1),
        ("normal", torch.float64, {"mean": 0, "std": 1}),
        ("exponential", torch.float32, {"lambd": 1.0}),
    ],
)
def test_fills_that_could_differ_have_no_kernel(name, dtype, arguments):
    assert kernel(name, dtype, arguments) is None
