"""The order of equal elements, if PyTorch defines it, and consistency of values and indices."""

import jax
import pytest
import torch

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
