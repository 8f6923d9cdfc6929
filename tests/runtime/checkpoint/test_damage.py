"""Damaged, truncated and foreign files: an error that names the file, never a wrong value."""

import json
import os
import pickle
import random
import shutil
import zipfile

import pytest
import safetensors.torch
import torch

import firstloss as fl
from firstloss.errors import CheckpointError

SMALL = {"a": torch.arange(100.0), "b": {"c": torch.ones(3, 5, dtype=torch.bfloat16)}, "n": [1, 2.5, "x", None]}


def read_all(path):
    """Load, and read every tensor."""
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, fl.load(path))


def flipped(path, at, bit=1):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


@pytest.fixture
def saved(tmp_path):
    fl.save({**SMALL, "big": torch.randn(300, 300)}, tmp_path / "it")
    return tmp_path / "it"


def tensors_of(folder):
    (path,) = folder.glob("tensors-*.safetensors")
    return path


def test_a_flipped_bit_is_an_error_that_names_the_tensor(saved):
    path = tensors_of(saved)
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {"a", "b.c", "big"}
    # the remainder after whole 4 KiB pages comes last; before it, the end of `big`
    flipped(path, path.stat().st_size - 400 - 30 - 10)
    with pytest.raises(CheckpointError, match=f"{path.name}: (a|big|b.c) is damaged"):
        read_all(saved)


def test_any_flipped_bit_is_found_or_changes_nothing(saved, tmp_path):
    """Padding is the only place where a flipped bit may go unnoticed."""
    expected = read_all(saved)
    chance = random.Random(0)
    refused = 0
    for trial in range(150):
        shutil.copytree(saved, tmp_path / "copy")
        path = chance.choice(sorted((tmp_path / "copy").glob("*")))
        at = chance.randrange(path.stat().st_size)
        flipped(path, at, 1 << chance.randrange(8))
        try:
            actual = read_all(tmp_path / "copy")
        except CheckpointError as error:
            refused += 1
            assert str(tmp_path / "copy") in str(error), trial
        else:
            assert torch.equal(actual["big"], expected["big"]) and actual["n"] == expected["n"], (path, at)
            assert torch.equal(actual["a"], expected["a"]) and torch.equal(actual["b"]["c"], expected["b"]["c"])
        shutil.rmtree(tmp_path / "copy")
    assert refused > 80


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 5000, 0.5, -1])
def test_a_truncated_file_is_an_error_on_loading(saved, keep):
    truncated = 0
    for path in (tensors_of(saved), saved / "checkpoint.json"):
        size = path.stat().st_size
        length = int(size * keep) if isinstance(keep, float) else keep if keep >= 0 else size + keep
        if length < size - (path.suffix == ".json"):  # the last byte of the JSON is a newline
            os.truncate(path, length)
            truncated += 1
            with pytest.raises(CheckpointError, match=path.name):
                fl.load(saved)
    assert truncated == (1 if keep in (5000, -1) else 2)  # the JSON is shorter than 5000 bytes


def test_a_file_truncated_after_loading_is_an_error(saved):
    state = fl.load(saved)
    os.truncate(tensors_of(saved), 10_000)
    with pytest.raises(CheckpointError, match="truncated while it was open: big"):
        state["big"].sum()


def test_a_missing_file_is_an_error(saved):
    path = tensors_of(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name}, which .* refers to, is missing"):
        fl.load(saved)


def test_another_checkpoints_file_is_an_error(saved, tmp_path):
    fl.save({"a": torch.zeros(4)}, tmp_path / "other")
    shutil.copy(tensors_of(tmp_path / "other"), tensors_of(saved))
    with pytest.raises(CheckpointError, match="bytes instead of"):
        fl.load(saved)


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", b"\0" * 100, b"PK\x03\x04 no zip", b"\x80\x02no pickle"])
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
def test_foreign_files_are_an_error(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is "):
        fl.load(tmp_path / name)


def test_a_newer_format_is_an_error(saved):
    (saved / "checkpoint.json").write_text(json.dumps({"format": "firstloss checkpoint 9", "crc32": 0}))
    with pytest.raises(CheckpointError, match="is of format 'firstloss checkpoint 9'"):
        fl.load(saved)


class Evil:
    def __reduce__(self):
        return os.mkdir, (Evil.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_never_run(tmp_path, zipped):
    Evil.path = str(tmp_path / "made")
    if zipped:
        torch.save({"x": Evil()}, tmp_path / "evil.pt")
    else:
        (tmp_path / "evil.pt").write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(CheckpointError, match="holds code, which is never run"):
        fl.load(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_damage_in_a_torch_file_is_an_error(tmp_path):
    torch.save({"w": torch.randn(200, 200), "v": torch.ones(3)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        info = archive.getinfo("x/data/0")
    flipped(tmp_path / "x.pt", info.header_offset + 5000)
    state = fl.load(tmp_path / "x.pt")
    assert torch.equal(state["v"], torch.ones(3))
    with pytest.raises(CheckpointError, match="x.pt: w is damaged: x/data/0"):
        state["w"].clone()


def test_a_truncated_torch_file_is_an_error(tmp_path):
    torch.save({"w": torch.randn(200, 200)}, tmp_path / "x.pt")
    for size in (100_000, 300, 5):
        os.truncate(tmp_path / "x.pt", size)
        with pytest.raises(CheckpointError, match="x.pt is "):
            fl.load(tmp_path / "x.pt")
