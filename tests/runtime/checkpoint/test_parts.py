"""Tensors saved as shards, and slices of tensors read separately."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from firstloss.errors import CheckpointError
from firstloss.runtime.checkpoint import file as checkpoint_file
from firstloss.runtime.checkpoint import tensors as checkpoint_tensors
from firstloss.runtime.checkpoint.file import TensorFile, TensorPart, write
from firstloss.runtime.checkpoint.tensors import Tensors


@pytest.fixture
def small_pieces(monkeypatch):
    """Many checksums per tensor, and no tensor too small to stay on disk."""
    monkeypatch.setattr(checkpoint_file, "PIECE", 64)
    monkeypatch.setattr(checkpoint_tensors, "SMALL_BYTES", 0)


def parts_of(tensor, cuts):
    """`tensor` split into `cuts[d]` equal parts along each dimension d."""
    shape = tuple(n // c for n, c in zip(tensor.shape, cuts, strict=True))
    out = []
    for place in itertools.product(*map(range, cuts)):
        begin = tuple(p * n for p, n in zip(place, shape, strict=True))
        box = tensor[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]
        out.append(TensorPart("w", tensor.dtype, tuple(tensor.shape), begin, shape, lambda box=box: box))
    return out


@st.composite
def cut_tensors(draw):
    """A shape, how it is split, and a box in it."""
    cuts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = [c * draw(st.integers(1, 4)) for c in cuts]
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, cuts, ends, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))


@settings(max_examples=60)
@given(case=cut_tensors())
def test_any_slice_can_be_read_from_any_parts(case, tmp_path_factory, request):
    request.getfixturevalue("small_pieces")
    shape, cuts, ends, dtype = case
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    folder = tmp_path_factory.mktemp("parts")
    parts = parts_of(tensor, cuts)
    for number in range(2):  # two owners
        write(str(folder / str(number)), parts[number::2])
    loaded = Tensors([TensorFile(str(folder / str(number))) for number in range(2)]).get("w")
    begin, size = tuple(a for a, _ in ends), tuple(b - a for a, b in ends)
    assert torch.equal(loaded._storage.value.box(begin, size), tensor[tuple(slice(a, b) for a, b in ends)])
    assert torch.equal(loaded.clone(), tensor)


def test_a_slice_reads_only_the_parts_it_needs(small_pieces, tmp_path, monkeypatch):
    tensor = torch.arange(1600.0).reshape(100, 16)  # a row is a piece
    write(str(tmp_path / "x"), parts_of(tensor, (1, 1)))
    file, read = TensorFile(str(tmp_path / "x")), []
    original = TensorFile._read_into
    monkeypatch.setattr(TensorFile, "_read_into", lambda *args: (read.append(args[2].nbytes), original(*args))[1])
    value = Tensors([file]).get("w")._storage.value
    assert torch.equal(value.box((7, 2), (3, 5)), tensor[7:10, 2:7])
    assert read == [64, 64, 64]


def test_damage_is_found_when_read(small_pieces, tmp_path):
    tensor = torch.arange(1600.0).reshape(100, 16)
    write(str(tmp_path / "x"), parts_of(tensor, (1, 1)))
    raw = bytearray((tmp_path / "x").read_bytes())
    raw[-1] ^= 4
    (tmp_path / "x").write_bytes(raw)
    value = Tensors([TensorFile(str(tmp_path / "x"))]).get("w")._storage.value
    assert torch.equal(value.box((0, 0), (99, 16)), tensor[:99])
    with pytest.raises(CheckpointError, match="x: w is damaged"):
        value.box((99, 0), (1, 1))


def test_missing_parts_are_an_error(tmp_path):
    write(str(tmp_path / "x"), parts_of(torch.zeros(8, 8), (2, 2))[1:])
    with pytest.raises(CheckpointError, match="only parts of the tensor w"):
        Tensors([TensorFile(str(tmp_path / "x"))]).get("w")
