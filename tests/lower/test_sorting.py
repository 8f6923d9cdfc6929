"""The order of equal elements, if PyTorch defines it, and consistency of values and indices."""

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstloss.lower import aten as kernels
from firstloss.lower.rules import RULES

from .harness import assert_rule, to_array, to_tensor

aten = torch.ops.aten


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8], ids=str)
def test_sorting_is_stable(dtype, descending):
    x = (torch.arange(60).reshape(3, 20) * 7 % 5).to(dtype)
    how = {"stable": True, "dim": 1, "descending": descending}
    assert_rule(aten.sort.stable, (x,), how, x.sort(**how))


@pytest.mark.parametrize("largest", [False, True])
def test_topk_indices_match_the_values(largest):
    x = torch.arange(60).reshape(3, 20) * 7 % 5
    x = torch.where(x == 3, torch.nan, x.float())
    with jax.enable_x64(True):
        values, places = RULES[aten.topk.default](to_array(x), 6, 1, largest)
    values, places = to_tensor(values, x.dtype), to_tensor(places, torch.int64)
    torch.testing.assert_close(values, x.topk(6, 1, largest)[0], equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(x.gather(1, places), values, equal_nan=True, rtol=0, atol=0)


def test_medians_and_modes_match_eager():
    x = torch.tensor([[3.0, 1, 2, 2, 4, torch.nan], [5, 1, 1, 5, 0, 7]])
    for overload in (aten.median, aten.nanmedian):
        assert_rule(overload.dim, (x, 1), {}, overload(x, 1))
        assert_rule(overload.default, (x,), {}, overload(x))
    whole = torch.tensor([[3, 1, 2, 2, 3], [5, 1, 1, 0, 7]])
    assert_rule(aten.mode.default, (whole, 1), {}, whole.mode(1))


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
HARD = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), 1e-45, -1e-45, 3e38, 1.0, -1.0]


@st.composite
def tensors_with_ties(draw):
    """Few different values, among them those that are hard to order, and a dimension."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    if dtype.is_floating_point:
        chosen = torch.tensor(HARD, dtype=torch.float64)[torch.randint(len(HARD), shape, generator=generator)].to(dtype)
    elif dtype == torch.bool:
        chosen = torch.randint(2, shape, generator=generator).bool()
    else:
        low, high = (0, 255) if dtype == torch.uint8 else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        chosen = torch.tensor([low, high, 0, 1, 7], dtype=dtype)[torch.randint(5, shape, generator=generator)]
    return chosen, draw(st.integers(-len(shape), len(shape) - 1))


def bits(x):
    """All of them, but which NaN it is: XLA computes in float32 with half precision."""
    x = x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() else x
    return bytes(x.clone(memory_format=torch.contiguous_format).untyped_storage())


@pytest.mark.skipif(not kernels.registered_with_xla(), reason="the handlers are not built, or not here")
@given(tensors_with_ties(), st.booleans(), st.data())
def test_on_one_cpu_device_elements_are_sorted_to_the_bit(case, descending, data):
    x, dim = case
    expected = x.sort(dim=dim, descending=descending, stable=True)
    k = data.draw(st.integers(0, x.shape[dim]))
    with jax.enable_x64(True), kernels.within():
        sort, topk = (RULES[op] for op in (aten.sort.stable, aten.topk.default))
        found = jax.jit(lambda x: sort(x, stable=True, dim=dim, descending=descending))(to_array(x))
        first = jax.jit(lambda x: topk(x, k, dim, descending))(to_array(x))
    values, places = to_tensor(found[0], x.dtype), to_tensor(found[1], torch.int64)
    assert torch.equal(places, expected.indices) and bits(values) == bits(x.gather(dim, places))
    assert torch.equal(to_tensor(first[1], torch.int64), expected.indices.narrow(dim, 0, k))
    assert bits(to_tensor(first[0], x.dtype)) == bits(values.narrow(dim, 0, k))
