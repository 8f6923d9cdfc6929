"""Streams against torch's own generator."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.rng import Position, Stream
from firstloss.rng.mt19937 import build_state, parse_state


def state(generator: torch.Generator) -> np.ndarray:
    return generator.get_state().numpy()


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, words: int) -> torch.Tensor:
    """Raw 32-bit draws, each of which takes one word of the stream (31 bits are visible)."""
    return torch.empty(words, dtype=torch.int32).random_(generator=generator)


def test_the_states_layout_is_torchs():
    generator = seeded(1234)
    torch.empty(3).normal_(generator=generator)
    record = parse_state(state(generator))
    assert (record["seed"], record["left"], record["next"], record["has_normal"]) == (1234, 617, 8, 1)
    assert record["normal"] != 0
    # The words before the first twist are those of the reference seeding.
    words = parse_state(state(seeded(1234)))["words"]
    expected = [1234]
    for i in range(1, 624):
        expected.append((1812433253 * (expected[-1] ^ expected[-1] >> 30) + i) & 0xFFFFFFFF)
    assert words.tolist() == expected
    assert np.array_equal(build_state(record), state(generator))


@pytest.mark.parametrize("drawn_before", [0, 1, 3, 100, 623, 624, 625, 5000])
def test_states_match_those_after_drawing(drawn_before):
    generator = seeded()
    draw(generator, drawn_before)
    stream = Stream.from_state(state(generator))
    assert stream.start == Position(0, None)
    position = 0
    for step in [0, 1, 1, 620, 1, 1, 1, 623, 624, 625, 17, 90_000, 110_000, 1_000_000, 3]:
        draw(generator, step)
        position += step
        assert np.array_equal(stream.state_at(Position(position)), state(generator)), position


@settings(max_examples=40)
@given(st.integers(0, 2**63), st.integers(0, 3000), st.integers(0, 400_000), st.booleans())
def test_any_seed_origin_and_position_match_torch(seed, before, ahead, origin_has_spare):
    generator = seeded(seed)
    draw(generator, before)
    if origin_has_spare:
        torch.empty(1).normal_(generator=generator)
    stream = Stream.from_state(state(generator))
    assert stream.start == Position(0, -1 if origin_has_spare else None)
    draw(generator, ahead)
    assert np.array_equal(stream.state_at(Position(ahead, stream.start.spare)), state(generator))
    assert generator.initial_seed() == seed


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 100_000), st.integers(0, 3000))
def test_the_cached_normal_is_exact(seed, before, after):
    generator = seeded(seed)
    stream = Stream.from_state(state(generator))
    draw(generator, before)
    torch.empty(1, dtype=torch.float64).normal_(generator=generator)
    draw(generator, after)
    assert np.array_equal(stream.state_at(Position(before + 4 + after, before)), state(generator))


def test_the_cached_normal_is_exact_at_many_positions():
    # Fills of fewer than 16 doubles, so that every pair goes through the generator's cache.
    generator = seeded(9)
    stream = Stream.from_state(state(generator))
    expected = []
    for _ in range(20_000):
        torch.empty(1).normal_(generator=generator)
        expected.append(float(parse_state(state(generator))["normal"]))
        torch.empty(1).normal_(generator=generator)
    assert [stream._second_normal(4 * i) for i in range(20_000)] == expected


def test_torch_continues_from_a_state():
    reference, jumped = seeded(), torch.Generator()
    stream = Stream.from_state(state(reference))
    torch.empty(100_001).normal_(generator=reference)
    torch.empty(5).normal_(generator=reference)
    jumped.set_state(torch.from_numpy(stream.state_at(Position(100_001 + 16 + 12, 100_001 + 16 + 8))))
    assert jumped.initial_seed() == 5
    for _ in range(3):
        assert torch.equal(torch.empty(7).normal_(generator=jumped), torch.empty(7).normal_(generator=reference))
        assert torch.equal(torch.rand(1000, generator=jumped), torch.rand(1000, generator=reference))


def test_random_words_match_torch():
    generator = seeded()
    draw(generator, 1000)
    stream = Stream.from_state(state(generator))
    all_words = stream.words_at(0, 5000)
    assert np.array_equal(all_words & 0x7FFFFFFF, draw(generator, 5000).numpy())
    for begin, count in [(0, 1), (3, 1), (247, 3), (248, 700), (4000, 1000), (10, 0)]:
        assert np.array_equal(stream.words_at(begin, count), all_words[begin : begin + count])


def test_positions_can_be_visited_in_any_order():
    stream = Stream.from_state(state(seeded()))
    positions = [Position(n) for n in (5_000_000, 3, 700_000, 5_000_000, 0, 1_400_000)]
    for position in positions:
        generator = seeded()
        draw(generator, position.words)
        assert np.array_equal(stream.state_at(position), state(generator))


def test_memory_is_bounded():
    stream = Stream.from_state(state(seeded()))
    for i in range(200):
        stream.state_at(Position(700 * i))
    assert len(stream._blocks) == 64 and 0 in stream._blocks


def test_streams_can_be_used_by_several_threads():
    positions = [Position(123_457 * i) for i in range(40)]
    alone = Stream.from_state(state(seeded()))
    expected = [alone.state_at(position) for position in positions]
    stream = Stream.from_state(state(seeded()))
    wrong = []

    def check(order):
        for i in order:
            if not np.array_equal(stream.state_at(positions[i]), expected[i]):
                wrong.append(i)

    orders = [np.random.default_rng(seed).permutation(40) for seed in range(4)]
    threads = [threading.Thread(target=check, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_invalid_arguments_are_errors():
    stream = Stream.from_state(state(seeded()))
    with pytest.raises(ValueError, match="before the stream's origin"):
        stream.state_at(Position(-1))
    with pytest.raises(ValueError, match="the origin has none"):
        stream.state_at(Position(0, -1))
    with pytest.raises(ValueError, match="at least 4 below"):
        stream.state_at(Position(10, 7))
    with pytest.raises(ValueError, match="5056 bytes"):
        Stream.from_state(np.zeros(16, np.uint8))
    with pytest.raises(ValueError, match="left=0"):
        Stream.from_state(np.zeros(5056, np.uint8))
