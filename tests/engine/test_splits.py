from hypothesis import given
from hypothesis import strategies as st

from firstloss.engine.splits import MIN_PIECE, cover, row_blocks
from firstloss.program.graph import span


@given(st.data(), st.integers(16, 5000), st.sampled_from([1, 8, 16]), st.sampled_from([16, 64, 256]))
def test_pieces_cover_what_is_wanted_and_obey_the_kernel(data, count, unit, piece):
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    pieces = cover(first, last, count, unit, piece)
    if first == last:
        assert pieces == []
        return
    assert pieces[0][0] <= first and pieces[-1][1] >= last
    assert [end for _, end in pieces[:-1]] == [begin for begin, _ in pieces[1:]]
    for begin, end in pieces:
        assert begin % unit == 0 and end - begin >= MIN_PIECE
    if last > (count - MIN_PIECE) // MIN_PIECE * MIN_PIECE:
        assert pieces[-1][1] == count
    elif unit > 1:
        assert pieces[-1][1] % unit == 0
    assert pieces[-1][1] - last < 2 * MIN_PIECE and first - pieces[0][0] < 2 * MIN_PIECE


@given(st.lists(st.integers(0, 7), min_size=0, max_size=3), st.randoms(), st.integers(1, 60))
def test_blocks_cover_each_index_once_within_the_limit(size, random, limit):
    order = list(range(len(size)))
    random.shuffle(order)
    stride, extent = [0] * len(size), 1
    for dim in order:
        stride[dim] = extent * random.choice([1, 2])
        extent = stride[dim] * max(size[dim], 1)
    seen = []
    for block in row_blocks(size, stride, limit):
        assert block.span == span(block.size, stride)
        assert block.span <= limit or sum(n > 1 for n in block.size) <= 1
        indices = [()]
        for begin, length in zip(block.begin, block.size, strict=True):
            indices = [(*index, begin + i) for index in indices for i in range(length)]
        seen += indices
    expected = [()]
    for n in size:
        expected = [(*index, i) for index in expected for i in range(n)]
    assert sorted(seen) == expected


def test_rows_far_apart_are_taken_one_by_one():
    blocks = list(row_blocks((3, 10), (1 << 22, 1), 1 << 30))
    assert [block.span for block in blocks] == [10, 10, 10]
