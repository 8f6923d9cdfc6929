"""The layout of CUDA's random stream, against a simulation of the kernel's loops and against values from GPUs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.rng.cuda_layout import GpuProperties, KernelLaunch, advance, element_position, launches, words

V100 = GpuProperties(80, 2048)
SMALL = GpuProperties(2, 1024)


def kernel(numel: int, device: GpuProperties, lanes: int) -> tuple[dict[int, tuple[int, int, int]], int]:
    """The launch as its threads run it: element -> (subsequence, offset, lane), and each thread's number of blocks."""
    grid = min(device.multi_processor_count * (device.max_threads_per_multi_processor // 256), (numel + 255) // 256)
    stride = 256 * grid
    rounded = ((numel - 1) // (stride * lanes) + 1) * stride * lanes
    layout = {}
    calls = 0
    for thread in range(stride):
        calls = 0
        for linear in range(thread, rounded, stride * lanes):
            for lane in range(lanes):
                if linear + stride * lane < numel:
                    layout[linear + stride * lane] = (thread, 4 * calls, lane)
            calls += 1
    return layout, calls


@settings(max_examples=25)
@given(st.integers(1, 20_000), st.sampled_from(["float32", "bfloat16", "float64"]))
def test_the_layout_matches_the_kernel(numel, dtype):
    layout, calls = kernel(numel, SMALL, 2 if dtype == "float64" else 4)
    assert len(layout) == numel
    for element in {0, numel - 1, numel // 2, numel // 3, *range(0, numel, 997)}:
        subsequence, offset, lane = layout[element]
        assert element_position(element, numel, SMALL, 40, dtype) == (subsequence, offset + 40, lane)
    assert advance(numel, SMALL, 40, dtype) == 40 + 4 * calls


def by_lane(numel: int, device: GpuProperties, lanes: int) -> tuple[dict[int, tuple[int, int, int]], int]:
    """`kernel` as changed by pull request 194828."""
    resident = device.multi_processor_count * (device.max_threads_per_multi_processor // 256)
    threads = 256 * min(resident, -(-numel // (256 * lanes)))
    layout = {e: (e % threads, 4 * (e // threads // lanes), e // threads % lanes) for e in range(numel)}
    return layout, -(-numel // (threads * lanes))


@pytest.mark.parametrize("numel", [1, 256, 257, 1024, 1025, 8191, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_proposed_layout_matches_its_kernel(numel, dtype):
    layout, calls = by_lane(numel, SMALL, 2 if dtype == "float64" else 4)
    for element in range(0, numel, 97):
        assert element_position(element, numel, SMALL, 8, dtype, by_lane=True) == (
            layout[element][0],
            layout[element][1] + 8,
            layout[element][2],
        )
    assert advance(numel, SMALL, 8, dtype, by_lane=True) == 8 + 4 * calls


@given(st.integers(1, 1 << 40), st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(1, 200))
def test_both_layouts_advance_the_generator_equally(numel, dtype, processors):
    """So a fill can be recorded before it is known which layout this PyTorch uses."""
    device = GpuProperties(processors, 2048)
    assert advance(numel, device, 16, dtype) == advance(numel, device, 16, dtype, by_lane=True)


def halved(begin: int, numel: int, size: int) -> list[tuple[int, int]]:
    """TensorIterator's SplitUntil32Bit: a stack, whose top is halved until it can be indexed with 32 bits."""
    stack, parts = [(begin, numel)], []
    while stack:
        begin, numel = stack.pop()
        while 1 + (numel - 1) * size > (1 << 31) - 1 or numel > (1 << 31) - 1:
            stack.append((begin + numel // 2, numel - numel // 2))
            numel //= 2
        parts.append((begin, numel))
    return parts


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float64", 8)])
@pytest.mark.parametrize("bytes", [(1 << 31) - 8, (1 << 31) - 7, 1 << 31, (1 << 31) + 8, 5 << 31, 40_000_000_008])
def test_fills_beyond_32_bits_are_split(dtype, size, bytes):
    numel = bytes // size
    parts = launches(numel, V100, 12, dtype)
    assert [(part.begin, part.numel) for part in parts] == halved(0, numel, size)
    offset = 12
    if len(parts) > 1:
        offset += 4 * -(-numel // (parts[0].threads * parts[0].lanes))
    for part in parts:
        assert part == KernelLaunch(part.begin, part.numel, offset, 80 * 8 * 256, 2 if size == 8 else 4)
        offset += 4 * -(-part.numel // (part.threads * part.lanes))
        for element in (part.begin, part.begin + part.numel - 1):
            alone = element_position(element - part.begin, part.numel, V100, part.offset, dtype)
            assert element_position(element, numel, V100, 12, dtype) == alone
    assert advance(numel, V100, 12, dtype) == offset


def uniform_block(block: np.ndarray) -> np.ndarray:
    return block.astype(np.float64) * 2.0**-32 + 2.0**-33


def test_uniforms_match_those_of_gpus():
    # torch.manual_seed(0); torch.rand(4, device="cuda"): a fill this small uses one lane of each thread.
    positions = [element_position(i, 4, V100) for i in range(4)]
    values = [uniform_block(words(0, p.subsequence, p.offset))[p.lane] for p in positions]
    assert np.allclose(values, [0.3990, 0.5167, 0.0249, 0.9401], atol=5e-5)  # as printed


def test_normals_match_those_of_gpus():
    # torch.manual_seed(0); torch.randn(4, device="cuda"). A block's first normal is the sine's.
    values = []
    for i in range(4):
        p = element_position(i, 4, V100)
        block = uniform_block(words(0, p.subsequence, p.offset))
        assert p.lane == 0
        values.append(np.sqrt(-2 * np.log(block[0])) * np.sin(2 * np.pi * block[1]))
    assert np.allclose(values, [-0.9247, -0.4253, -2.6438, 0.1452], atol=5e-5)  # as printed


def test_an_empty_fill_does_not_advance_the_generator():
    assert advance(0, V100, 12) == 12


def test_invalid_arguments_are_errors():
    with pytest.raises(IndexError, match="element 5 of a fill of 5"):
        element_position(5, 5, V100)
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        words(0, 0, 6)
