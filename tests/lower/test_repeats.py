"""Finding repeated runs in sequences."""

from hypothesis import given
from hypothesis import strategies as st

from firstloss.lower.repeats import find_runs

keys = st.lists(st.integers(0, 3), max_size=60)


@given(keys, st.integers(1, 10))
def test_found_repeats_do_not_overlap(sequence, least):
    runs = find_runs(sequence, least)
    assert all(a.stop <= b.start for a, b in zip(runs, runs[1:], strict=False))
    for start, stop, period in runs:
        assert 0 <= start and stop <= len(sequence) and stop - start >= 2 * period
        assert stop - start - period >= least
        assert all(sequence[i] == sequence[i + period] for i in range(start, stop - period))


@given(st.permutations(range(12)), st.integers(2, 6), st.integers(0, 5), st.integers(0, 5))
def test_a_repeated_sequence_is_found_completely(stretch, times, before, after):
    sequence = [*range(100, 100 + before), *(stretch * times), *range(200, 200 + after)]
    assert find_runs(sequence, 1) == [(before, before + len(stretch) * times, len(stretch))]


def test_both_of_two_runs_are_found():
    forward, backward = [1, 2, 3, 1, 4] * 6, [9, 8, 7] * 6
    assert find_runs([0, *forward, 5, 6, *backward], 3) == [(1, 31, 5), (33, 51, 3)]


def test_sequences_without_repeats_give_none():
    assert find_runs(range(50), 1) == []
    assert find_runs([], 1) == []
