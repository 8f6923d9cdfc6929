import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int
from hypothesis import given
from hypothesis import strategies as st

from firstloss.init.disk import layout


@pytest.mark.parametrize("size", ["200MB", "5GB", "1.5 KB", "0.1tb", " 3 mb "])
def test_sizes_are_read_as_hugging_face_reads_them(size):
    assert layout.parse_size(size) == parse_size_to_int(size)


def test_sizes_may_be_integers_and_binary_units():
    assert layout.parse_size(17) == 17
    assert layout.parse_size("2GiB") == 2 << 30


@pytest.mark.parametrize("size", ["", "5", "five GB", "5XB", "-1GB", 0, "0KB"])
def test_an_invalid_size_is_an_error(size):
    with pytest.raises(ValueError, match="size|at least one byte"):
        layout.parse_size(size)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_tensors_are_split_as_hugging_face_splits_them(sizes, limit):
    state = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    expected = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    files = layout.split(sizes, limit)
    actual = dict(zip(layout.file_names(len(files)), files, strict=True))
    assert {name: [f"t{i}" for i in group] for name, group in actual.items()} == expected.filename_to_tensors


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 50)), max_size=20))
def test_tensors_are_packed_and_aligned(tensors):
    sizes = [item * count for item, count in tensors]
    places = layout.layout(sizes, [item for item, _ in tensors], 32)
    at = 0
    for place in places:
        assert (place.begin, place.end) == (at, at + sizes[place.which])
        assert place.begin % tensors[place.which][0] == 0
        at = place.end
    assert sorted(place.which for place in places) == list(range(len(sizes)))
