import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstloss.rng import jump as jumps
from firstloss.rng import stream as streams
from firstloss.rng.mt19937 import N, consistent, extend

pytestmark = pytest.mark.skipif(not jumps.has_kernel(), reason="no C compiler was there when it was built")


@given(st.integers(0, (1 << 32) - 1), st.integers(32, 1 << 60))
def test_the_kernel_matches_numpy(seed, n):
    window = consistent(np.random.default_rng(seed).integers(0, 1 << 32, N, dtype=np.uint32))
    offsets = jumps._selection(n - 32)
    actual = jumps.native_jump(window, offsets)
    rows = jumps._combinations(window).reshape(-1)
    expected = np.zeros(N, np.uint32)
    for offset in offsets:
        expected ^= rows[offset : offset + N]
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("n", [0, 1, 226, 227, 228, 623, 624, 625, 1000, 1247, 1248, 1249, 50_000])
def test_the_kernel_generates_the_words_of_the_recurrence(n):
    window = consistent(np.random.default_rng(n).integers(0, 1 << 32, N, dtype=np.uint32))
    assert np.array_equal(jumps.native_generate(window, n), extend(window, n)[n:])


def test_numpy_is_used_without_the_kernel(monkeypatch):
    window = consistent(np.random.default_rng(1).integers(0, 1 << 32, N, dtype=np.uint32))
    native = [jumps.jump(window, 1_000_003), streams.advance(window, 1003)]
    for module in (jumps, streams):
        monkeypatch.setattr(module, "has_kernel", lambda: False)
        for name in ("native_jump", "native_generate"):
            monkeypatch.delattr(module, name, raising=False)
    assert np.array_equal(jumps.jump(window, 1_000_003), native[0])
    assert np.array_equal(streams.advance(window, 1003), native[1])


def test_a_state_can_lie_within_a_larger_array():
    words = np.random.default_rng(1).integers(0, 1 << 32, 2 * N, dtype=np.uint32)
    window = consistent(words[5 : 5 + N])
    for move in (jumps.jump, jumps.native_generate):
        assert np.array_equal(move(np.repeat(window, 2)[::2], 10_000), move(window, 10_000))
