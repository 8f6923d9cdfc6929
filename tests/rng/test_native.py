"""The native kernels are bit-identical to torch's, generator state included."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firstloss.compat.cpu_fills import uniform_leaves_out_end
from firstloss.engine import sampler
from firstloss.rng import Position, Stream, mt19937, native

# PyTorch has a kernel for each kind of CPU; ours match the AVX2 one, and are not used with another.
pytestmark = [
    pytest.mark.skipif(
        not native.available(), reason="no native kernels: build them with python setup.py build_ext --inplace"
    ),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason=f"PyTorch's kernels are those for {torch.backends.cpu.get_cpu_capability()} here",
    ),
]
WIDTHS = [width for width in (8, 16) if width <= native.lanes()]


def seeded(seed: int, words_drawn: int = 0) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words_drawn, dtype=torch.int32).random_(generator=generator)
    return generator


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def both(kind, generator, counts, first, second, width=None, misaligned=0):
    """Fills of `counts` elements one after another, natively and by torch: two lists of tensors, two states."""
    cursor = native.Cursor(generator.get_state().numpy(), width)
    actual = [torch.full((count + misaligned,), torch.nan)[misaligned:] for count in counts]
    for tensor in actual:
        getattr(cursor, kind)(tensor.data_ptr(), tensor.numel(), first, second)
    expected = [getattr(torch.empty(count), f"{kind}_")(first, second, generator=generator) for count in counts]
    return actual, expected, cursor.state(), generator.get_state().numpy()


def same(actual, expected, our_state, their_state) -> bool:
    return (
        all(map(torch.equal, map(bits, actual), map(bits, expected))) and our_state.tobytes() == their_state.tobytes()
    )


# What matters: where in a block of 624 words a fill begins and ends, and the remainder modulo 16.
places = st.integers(0, 2000)
normal_counts = st.one_of(st.integers(16, 700), st.integers(16, 20_000))
uniform_counts = st.one_of(st.integers(1, 700), st.integers(1, 20_000))
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150)
@given(st.integers(0, 2**63), places, st.lists(normal_counts, min_size=1, max_size=3), st.sampled_from(WIDTHS))
def test_normals_match_torch(seed, drawn, counts, width):
    assert same(*both("normal", seeded(seed, drawn), counts, 0.0, 1.0, width))


@settings(max_examples=150)
@given(st.integers(0, 2**63), places, st.lists(uniform_counts, min_size=1, max_size=3), st.sampled_from(WIDTHS))
def test_uniforms_match_torch(seed, drawn, counts, width):
    assert same(*both("uniform", seeded(seed, drawn), counts, 0.0, 1.0, width))


@settings(max_examples=150)
@given(
    st.one_of(st.floats(-1e3, 1e3), floats),
    st.one_of(st.floats(0, 1e3), floats.map(abs)),
    st.sampled_from(WIDTHS),
)
def test_any_mean_and_deviation_match_torch(mean, std, width):
    assert same(*both("normal", seeded(5), [1003], mean, std, width))


@settings(max_examples=150)
@given(
    st.one_of(st.floats(-1e3, 1e3), floats),
    st.one_of(st.floats(0, 10), st.floats(0, 1e38), st.sampled_from([0.0, 1e-45, 1e-40, 1.0])),
    st.sampled_from(WIDTHS),
)
def test_any_interval_matches_torch(low, length, width):
    high = max(low, min(low + length, 3e38))
    # Before PyTorch 2.12 the end stays where uniforms round up to it; there the engine does not use the kernel.
    assume(high - low <= 3.4e38 and (uniform_leaves_out_end() or not native.may_round_to_end(low, high)))
    assert same(*both("uniform", seeded(5), [1003], low, high, width))


@pytest.mark.skipif(not uniform_leaves_out_end(), reason="in this PyTorch the end stays")
def test_uniforms_that_round_up_to_the_end_match_torch():
    actual, expected, *states = both("uniform", seeded(1), [100_000], 2.0**23, 2.0**23 + 4)
    assert same(actual, expected, *states)
    # The interval holds four floats; an eighth of all uniforms round to its end, which wraps to its beginning.
    assert actual[0].max() == 2.0**23 + 3
    assert 0.24 < (actual[0] == 2.0**23).float().mean() < 0.26


@given(st.integers(-1000, 1000), st.integers(0, 1000), st.integers(-30, 30))
def test_intervals_whose_end_may_be_reached(low, length, exponent):
    low, high = (np.float32(number * 2.0**exponent) for number in (low, low + length))
    largest = np.float32(np.longdouble(1 - 2.0**-24) * np.longdouble(high - low) + np.longdouble(low))  # 64 bits: exact
    assert native.may_round_to_end(low, high) == (largest == high)


def test_the_end_of_usual_intervals_is_not_reached():
    assert not native.may_round_to_end(0.0, 1.0)
    assert not any(native.may_round_to_end(-bound, bound) for bound in (1 / 3**0.5, 0.1, 0.02, 1 / 768**0.5))
    assert native.may_round_to_end(2.0**23, 2.0**23 + 4)


@pytest.mark.parametrize("width", WIDTHS)
def test_large_fills_match_torch(width):
    assert same(*both("normal", seeded(0), [(1 << 22) + 5], 0.0, 1.0, width))


def untempered(words):
    """The state words that temper to these outputs."""
    y = words ^ words >> np.uint32(18)
    y ^= y << np.uint32(15) & np.uint32(0xEFC60000)
    low = y
    for _ in range(4):  # each round recovers seven more bits
        low = y ^ low << np.uint32(7) & np.uint32(0x9D2C5680)
    high = low
    for _ in range(2):
        high = low ^ high >> np.uint32(11)
    return high


def test_every_radius_and_angle_match_torch():
    """All 2^24 uniforms, each as radius and as angle, from generator states set for them."""
    groups = (mt19937.N - 1) // 16
    uniforms = np.random.default_rng(0).permutation(np.arange(1 << 24, dtype=np.uint32))
    calls = -(-len(uniforms) // (8 * groups))
    uniforms = np.resize(uniforms, (calls, groups, 8))
    words = untempered(np.concatenate([uniforms, uniforms[:, :, ::-1]], axis=2).reshape(calls, -1))
    generator = seeded(0, 1)
    record = mt19937.parse_state(generator.get_state().numpy())
    expected, *results = torch.empty(1 + len(WIDTHS), calls, 16 * groups)
    for call in range(calls):
        record["words"][1 : 1 + 16 * groups] = words[call]
        state = mt19937.build_state(record)
        generator.set_state(torch.from_numpy(state))
        expected[call].normal_(generator=generator)
        for width, out in zip(WIDTHS, results, strict=True):
            native.Cursor(state, width).normal(out[call].data_ptr(), 16 * groups, 0.0, 1.0)
    for out in results:
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("misaligned", [1, 3, 8])
def test_any_alignment_is_supported(misaligned):
    assert same(*both("normal", seeded(2), [5000, 777], 0.1, 2.0, misaligned=misaligned))
    assert same(*both("uniform", seeded(2), [5000, 777], 0.1, 2.0, misaligned=misaligned))


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_nothing_outside_of_the_tensor_is_written(kind):
    for count in (16, 17, 31, 100, 2496, 2500):
        memory = torch.full((count + 32,), torch.nan)
        getattr(native.Cursor(seeded(3).get_state().numpy()), kind)(memory[16:].data_ptr(), count, 0.0, 1.0)
        assert memory[:16].isnan().all() and memory[16 + count :].isnan().all()
        assert not memory[16 : 16 + count].isnan().any()


@settings(max_examples=40)
@given(st.integers(0, 3000), st.integers(0, 300_000), st.booleans())
def test_fills_can_start_at_any_position(before, ahead, spare):
    generator = seeded(7, before)
    if spare:
        torch.empty(1).normal_(generator=generator)
    stream = Stream.from_state(generator.get_state().numpy())
    torch.empty(ahead, dtype=torch.int32).random_(generator=generator)
    cursor = native.Cursor(stream.state_at(Position(ahead, stream.start.spare)))
    actual, expected = torch.empty(500), torch.empty(500)
    cursor.normal(actual.data_ptr(), 500, 1.0, 2.0)
    expected.normal_(1.0, 2.0, generator=generator)
    assert same([actual], [expected], cursor.state(), generator.get_state().numpy())


def test_few_normals_are_refused():
    with pytest.raises(ValueError, match="at least 16 normals"):
        native.Cursor(seeded(0).get_state().numpy()).normal(ctypes.addressof(ctypes.c_float()), 15, 0.0, 1.0)


def test_a_width_that_the_machine_lacks_is_refused():
    with pytest.raises(RuntimeError, match="no native kernels"):
        native.Cursor(seeded(0).get_state().numpy(), width=32)


@settings(max_examples=150)
@given(
    st.sampled_from(["normal", "uniform"]),
    st.integers(0, 2000),
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(WIDTHS),
)
def test_columns_match_torch(kind, drawn, widths, rows, dtype, width):
    if dtype == torch.bfloat16 and not sampler.bfloat16_trusted():
        return
    rows *= 16
    generator = seeded(3, drawn)
    cursor = native.Cursor(generator.get_state().numpy(), width)
    actual = [torch.full((rows, w), torch.nan, dtype=dtype) for w in widths]
    addresses = [part.data_ptr() for part in actual]
    cursor.columns(kind, addresses, widths, rows, 0.25, 2.0, bfloat16=dtype == torch.bfloat16)
    whole = getattr(torch.empty(rows, sum(widths), dtype=dtype), f"{kind}_")(0.25, 2.0, generator=generator)
    assert all(map(torch.equal, map(bits, actual), map(bits, (p.contiguous() for p in whole.split(widths, 1)))))
    assert cursor.state().tobytes() == generator.get_state().numpy().tobytes()


# PyTorch before 2.12 drew other bfloat16 normals; there ours are not used.
in_bfloat16 = pytest.mark.skipif(
    not sampler.bfloat16_trusted(), reason="PyTorch's bfloat16 kernels are not those that ours repeat"
)


def both_in_bfloat16(kind, generator, counts, first, second, width=None, misaligned=0):
    """Like `both`."""
    cursor = native.Cursor(generator.get_state().numpy(), width)
    actual = [torch.full((n + misaligned,), torch.nan, dtype=torch.bfloat16)[misaligned:] for n in counts]
    eager = [torch.empty(n, dtype=torch.bfloat16) for n in counts]
    for tensor, expected in zip(actual, eager, strict=True):
        getattr(cursor, f"{kind}_bfloat16")(tensor.data_ptr(), tensor.numel(), first, second)
        getattr(expected, f"{kind}_")(first, second, generator=generator)
    return actual, eager, cursor.state(), generator.get_state().numpy()


@in_bfloat16
@settings(max_examples=150)
@given(
    st.sampled_from(["normal", "uniform"]),
    st.integers(0, 2**63),
    places,
    st.lists(normal_counts, min_size=1, max_size=3),
    st.sampled_from(WIDTHS),
)
def test_bfloat16_matches_torch(kind, seed, drawn, counts, width):
    assert same(*both_in_bfloat16(kind, seeded(seed, drawn), counts, 0.0, 1.0, width))


@in_bfloat16
@settings(max_examples=150)
@given(st.floats(-1e38, 1e38), st.one_of(st.floats(0, 10), st.floats(0, 1e38)), st.sampled_from(WIDTHS))
def test_any_numbers_in_bfloat16_match_torch(first, second, width):
    assert same(*both_in_bfloat16("normal", seeded(5), [1003], first, second, width))
    assert same(*both_in_bfloat16("uniform", seeded(5), [1003], first, first + second, width))


@in_bfloat16
@pytest.mark.parametrize("width", WIDTHS)
def test_large_bfloat16_fills_match_torch(width):
    """A few million elements, some of which round up to the end of the interval."""
    assert same(*both_in_bfloat16("normal", seeded(1), [(1 << 22) + 5], 0.0, 1.0, width, misaligned=3))
    actual, expected, *states = both_in_bfloat16("uniform", seeded(1), [(1 << 22) + 5], 0.0, 1.0, width, misaligned=3)
    assert same(actual, expected, *states)
    assert (actual[0] == 0).float().mean() > 1e-3  # the zeros of the 24 bits alone would be 6e-8
    before = torch.full((48,), 7, dtype=torch.int16)
    native.Cursor(seeded(3).get_state().numpy()).normal_bfloat16(before[16:].data_ptr(), 17, 0.0, 1.0)
    assert before[:16].eq(7).all() and before[33:].eq(7).all()  # nothing outside the tensor is written


@settings(max_examples=80)
@given(
    st.integers(0, 2**63),
    places,
    st.integers(1, 700).map(lambda blocks: 16 * blocks),
    st.sampled_from([(0.0, 1.0), (0.5, 0.02)]),
    st.sampled_from([(-2.0, 2.0), (0.0, 0.1), (-9.0, 9.0), (3.0, 2.0)]),
    st.sampled_from(WIDTHS),
)
def test_selected_normals_match_torch(seed, drawn, count, numbers, bounds, width):
    """Normals outside the bounds, found by one cursor and computed by another; the rest of the draw is skipped."""
    actual, eager, after, expected_after = both("normal", seeded(seed, drawn), [count], *numbers, width)
    low, high = (float(torch.tensor(numbers[0] + numbers[1] * bound)) for bound in bounds)
    expected = ((eager[0] < low) | (eager[0] > high)).nonzero().view(-1)
    state = seeded(seed, drawn).get_state().numpy()
    finder, maker = native.Cursor(state, width), native.Cursor(state, width)
    where = finder.normals_outside(count, *numbers, low, high)
    assert where.tolist() == expected.tolist()
    selected = torch.from_numpy(maker.normals_at(count, *numbers, where))
    assert torch.equal(bits(selected), bits(eager[0][expected]))
    assert finder.state().tobytes() == maker.state().tobytes() == expected_after.tobytes()
    for wrong in (count + 1, 1 << 31):
        with pytest.raises(ValueError, match="multiple of 16"):
            finder.normals_at(wrong, 0.0, 1.0, where)
