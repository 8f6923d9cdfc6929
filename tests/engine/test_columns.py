"""Columns drawn directly are bit-identical to a slice of the whole weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstloss as fl
from firstloss.engine.reader import Reader
from firstloss.engine.sampler import bfloat16_trusted, trusted
from firstloss.engine.splits import Box, cut_dimension

needs_kernel = pytest.mark.skipif(
    not trusted(),
    reason="no native kernels (python setup.py build_ext --inplace), or none with the bits of this PyTorch",
)
KINDS = {"normal": lambda t: t.normal_(0.5, 0.02), "uniform": lambda t: t.uniform_(-1, 3)}


def recipe(make, seed):
    """A recipe of the captured result of `make`, and the eager result."""
    torch.manual_seed(seed)
    torch.rand(5)
    with fl.deferred():
        tensor = make()
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(tensor)
    torch.manual_seed(seed)
    torch.rand(5)
    return fl.init_program(module).recipes["weight"].ref, make()


def drawn(ref, dim, rows, widths, reader=None):
    size = list(ref.size)
    parts = [
        torch.full([rows[1] - rows[0], *size[1:dim], w, *size[dim + 1 :]], torch.nan, dtype=ref.dtype) for w in widths
    ]
    reader = reader or Reader(lambda value: pytest.fail("made whole"))
    return reader.fill_columns(ref, dim, rows, parts), parts


@needs_kernel
@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 99),
    outer=st.integers(1, 4),
    widths=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    rows=st.integers(1, 4).map(lambda n: 16 * n),
    first=st.integers(0, 3).map(lambda n: 16 * n),
)
def test_column_parts_match_the_whole(kind, seed, outer, widths, rows, first):
    size = (first + rows + 16, outer, sum(widths))
    ref, eager = recipe(lambda: KINDS[kind](torch.empty(size)), seed)
    done, parts = drawn(ref, 2, (first, first + rows), widths)
    assert done
    for part, expected in zip(parts, eager[first : first + rows].split(widths, 2), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.skipif(not bfloat16_trusted(), reason="PyTorch's bfloat16 kernels are others")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_column_parts_match_the_whole_in_bfloat16(kind):
    ref, eager = recipe(lambda: KINDS[kind](torch.empty(64, 3, 96, dtype=torch.bfloat16)), 1)
    done, parts = drawn(ref, 2, (16, 48), [33, 63])
    assert done and torch.equal(torch.cat(parts, 2), eager[16:48])


@needs_kernel
def test_a_range_continues_where_the_last_ended():
    ref, eager = recipe(lambda: torch.empty(64, 96).normal_(), 1)
    reader = Reader(lambda value: pytest.fail("made whole"))
    for rows in ((0, 16), (16, 48), (48, 64)):
        done, parts = drawn(ref, 1, rows, [48, 48], reader)
        assert done and torch.equal(torch.cat(parts, 1), eager[slice(*rows)])


@pytest.mark.parametrize(
    "make, rows",
    [
        (lambda: torch.empty(33, 33).normal_(), (16, 33)),  # ends in a ragged fill, whose last 16 elements are redrawn
        (lambda: torch.empty(33, 33).normal_(), (1, 17)),  # begins within a group of 16
        (lambda: torch.empty(32, 32).normal_().mul_(2), (0, 16)),  # larger than a fill
        (lambda: torch.empty(32, 32, dtype=torch.float64).normal_(), (0, 16)),
        (lambda: torch.nn.init.trunc_normal_(torch.empty(32, 32)), (0, 16)),
        (lambda: torch.zeros(32, 32), (0, 16)),
    ],
)
def test_unsupported_columns_are_left_to_the_reader(make, rows):
    ref, _ = recipe(make, 2)
    done, parts = drawn(ref, 1, rows, [16, ref.size[1] - 16])
    assert not done and all(part.isnan().all() for part in parts)


def test_adjacent_boxes_match_the_whole():
    assert cut_dimension((4, 6, 8), [Box((0, 0, 0), (2, 2, 8)), Box((0, 2, 0), (2, 4, 8))]) == 1
    assert cut_dimension((4, 6, 8), [Box((0, 0, 0), (2, 6, 4)), Box((0, 0, 4), (2, 6, 4))]) == 2
    assert cut_dimension((4, 6, 8), [Box((0, 0, 0), (2, 2, 8))]) is None  # the rest of the row must stay unwritten
    # split along two dimensions
    assert cut_dimension((4, 6, 8), [Box((0, 0, 0), (4, 3, 4)), Box((0, 3, 4), (4, 3, 4))]) is None
    assert cut_dimension((4, 6, 8), [Box((0, 0, 0), (2, 6, 8))]) is None  # split along none
