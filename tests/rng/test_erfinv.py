"""The native inverse error function is bit-identical to torch's wherever it gives a result."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.engine.sampler import ROUNDING_MARGIN, HardCaseBuffers, StreamSampler, erfinv_trusted, has_erfinv
from firstloss.rng import Position, Stream, native

from . import fit_erfinv

native_only = pytest.mark.skipif(
    not native.has_erfinv(), reason="the kernel is written for AVX-512, and built by a C compiler"
)
trusted_only = pytest.mark.skipif(
    not native.has_erfinv() or not erfinv_trusted(), reason="PyTorch's own is too far from the truth on this machine"
)
FULL = (0.5, 0.25, -1.0, 1.0)
NOTHING = (1.0, -0.0, -float("inf"), float("inf"))


def bits(tensor):
    return tensor.view(torch.int32)


def answered(numbers, margin):
    """The kernel's results for `numbers`, and a mask of those for which it gives one."""
    results, buffers = numbers.clone(), HardCaseBuffers(len(numbers))
    count = native.erfinv(results.data_ptr(), len(results), buffers.hard_cases(margin))
    sure = torch.ones(len(numbers), dtype=torch.bool)
    sure[buffers.indices[:count].long()] = False
    assert torch.equal(bits(buffers.arguments[:count]), bits(numbers[~sure]))  # in order, each once
    return results, sure


@trusted_only
def test_all_uniforms_match_torch():
    """All values that `uniform_(-1, 1)` can draw; half of the engine's margin suffices."""
    numbers = torch.arange(1 << 24, dtype=torch.float32) * 2**-23 - 1
    result, sure = answered(numbers, ROUNDING_MARGIN / 2)
    assert torch.equal(bits(result[sure]), bits(numbers.erfinv()[sure]))
    assert 0.98 < sure.float().mean() < 1


@trusted_only
@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 70))
def test_any_numbers_match_torch(seed, count):
    numbers = torch.empty(40 * count, dtype=torch.int32).random_(generator=torch.Generator().manual_seed(seed))
    numbers = torch.cat([numbers * 2 + 1, numbers]).view(torch.float32)  # of both signs; some are NaN
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, 1e-44, -1e-30, torch.inf, -torch.inf, torch.nan])
    numbers = torch.cat([numbers[:count], special, numbers.clamp(-1, 1)])
    result, sure = answered(numbers, ROUNDING_MARGIN)
    assert torch.equal(bits(result[sure]), bits(numbers.erfinv()[sure]))
    assert not sure[count : count + 10].any()  # those are left to PyTorch


@native_only
def test_a_smaller_doubt_interval_leaves_fewer_numbers():
    numbers = torch.empty(50_000).uniform_(-0.99, 0.99)
    margins = [1 / 4, 1 / 16, 1 / 64]
    left = [(~answered(numbers, margin)[1]).float().mean().item() for margin in margins]
    # values within `margin` of a midpoint, on both sides; 4 standard deviations of a mean of 50,000
    assert all(abs(share - 2 * margin) < 0.01 for share, margin in zip(left, margins, strict=True))


@trusted_only
@settings(max_examples=60)
@given(
    st.integers(0, 2**40),
    st.integers(0, 2000),
    st.integers(16, 9000),
    st.integers(0, 15),
    st.sampled_from([(-1.0, 1.0), (0.9, 1.0), (-0.5, 0.25), (2.0, 3.0)]),
    st.sampled_from([FULL, NOTHING]),
)
def test_a_fused_draw_matches_torch(seed, drawn, count, misaligned, interval, finish):
    generator = torch.Generator().manual_seed(seed)
    stream = Stream(generator.get_state().numpy())
    torch.empty(drawn, dtype=torch.int32).random_(generator=generator)
    factor, term, low, high = finish
    expected = torch.empty(count).uniform_(*interval, generator=generator)
    expected.erfinv_().mul_(factor).add_(term).clamp_(low, high)
    room = torch.full((count + misaligned + 16,), 7.0)
    actual = room[misaligned : misaligned + count]
    sampler = StreamSampler()
    sampler.seek(stream, Position(drawn))
    assert has_erfinv(stream, "uniform", actual, *interval)
    sampler.fill_erfinv(actual, *interval, finish)
    assert torch.equal(bits(actual), bits(expected))
    assert (room[:misaligned] == 7).all() and (room[misaligned + count :] == 7).all()


def test_the_table_is_up_to_date():
    """And the fit's error is below half of the engine's margin; the rest is for rounding."""
    written = fit_erfinv.written(fit_erfinv.table()).split()
    with open(fit_erfinv.PATH) as file:
        kept = file.read().split()
    assert len(kept) == len(written)
    for actual, expected in zip(kept, written, strict=True):
        if not expected.endswith("f,"):
            assert actual == expected
            continue
        # float64 libraries differ in the last bits, and so do the errors below float32, the lower halves (by 1.2e-13
        # between two processors, for coefficients of up to 1)
        assert float.fromhex(actual[:-2]) == pytest.approx(float.fromhex(expected[:-2]), rel=1e-4, abs=1e-12)
    assert fit_erfinv.largest_error(np.linspace(0, 1 - 2**-8, 20_001)) < ROUNDING_MARGIN / 2
