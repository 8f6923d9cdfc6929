"""Reading and writing files of PyTorch and Hugging Face."""

import os
import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

import firstloss as fl
from tests.tiny_llama import llama


def model_of_two(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.Linear(300, 10))


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[k].clone(), b[k].clone()) for k in b)


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_round_trip(tmp_path, legacy):
    model = model_of_two()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    loaded = fl.load(tmp_path / "x.pt")
    assert fl.is_deferred(loaded["model"]["0.weight"]) == (not legacy)
    assert loaded["epoch"] == 3 and loaded["model"]._metadata == state["model"]._metadata
    assert equal(loaded["model"], state["model"])
    other = model_of_two(1)
    optimizer = torch.optim.Adam(other.parameters())
    other.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for entries, expected in zip(
        optimizer.state_dict()["state"].values(), state["optimizer"]["state"].values(), strict=True
    ):
        assert equal(entries, expected)


def test_sharing_in_a_torch_file_is_kept(tmp_path):
    w = torch.randn(200, 200)
    half = torch.randn(300, 300, dtype=torch.bfloat16)
    torch.save({"w": w, "t": w.t(), "rows": w[3:9], "half": half[:, ::2], "none": torch.zeros(0, 3)}, tmp_path / "x.pt")
    loaded = fl.load(tmp_path / "x.pt")
    assert torch.equal(loaded["t"], w.t()) and torch.equal(loaded["rows"], w[3:9])
    assert torch.equal(loaded["half"].clone(), half[:, ::2]) and loaded["none"].shape == (0, 3)
    loaded["w"].zero_()
    assert not loaded["t"].any() and not loaded["rows"].any()  # as in eager PyTorch: shared memory


def test_loaded_tensors_can_be_saved_for_torch(tmp_path):
    model = model_of_two()
    fl.save({"model": model.state_dict(), "n": (1, None)}, tmp_path / "it")
    fl.save(fl.load(tmp_path / "it"), tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["model"]._metadata == model.state_dict()._metadata
    assert equal(loaded["model"], model.state_dict()) and loaded["n"] == (1, None)


def test_safetensors_files_round_trip(tmp_path):
    state = dict(model_of_two().state_dict())
    fl.save(state, tmp_path / "x.safetensors")
    written = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert equal(dict(sorted(written.items())), dict(sorted(state.items())))
    safetensors.torch.save_file(state, tmp_path / "y.safetensors")
    loaded = fl.load(tmp_path / "y.safetensors")
    assert equal(dict(sorted(loaded.items())), dict(sorted(state.items())))
    with pytest.raises(fl.errors.UnsavableError, match="one flat dict"):
        fl.save({"model": state}, tmp_path / "x.safetensors")


def test_ties_in_a_safetensors_file_are_kept(tmp_path):
    model = model_of_two()
    model.tied = model[0]
    fl.save(model.state_dict(), tmp_path / "x.safetensors")
    other = model_of_two(1)
    other.tied = other[0]
    other.load_state_dict(fl.load(tmp_path / "x.safetensors"))
    assert equal(other.state_dict(), model.state_dict())
    safetensors.torch.load_model(other, tmp_path / "x.safetensors")


def test_hugging_face_folders_can_be_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = llama(hidden_size=64, intermediate_size=128)  # several shards of 100 KB
    for name, size in (("one", "5GB"), ("many", "100KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        loaded = fl.load(tmp_path / name)
        assert equal(dict(sorted(loaded.items())), dict(sorted(model.state_dict().items())))
    (shard, *_) = sorted((tmp_path / "many").glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(fl.errors.CheckpointError, match=f"{shard.name}, which .* refers to, is missing"):
        fl.load(tmp_path / "many")
    # and from Firstloss's, by from_pretrained
    fl.save(model.state_dict(), tmp_path / "ours")
    model.config.save_pretrained(tmp_path / "ours")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    assert equal(back.state_dict(), model.state_dict())


def test_files_of_save_initialized_can_be_loaded(tmp_path):
    torch.manual_seed(0)
    fl.save_initialized(fl.deferred_init(model_of_two), tmp_path / "it")
    assert equal(dict(sorted(fl.load(tmp_path / "it").items())), dict(sorted(model_of_two().state_dict().items())))


def test_tensors_larger_than_one_read_are_read(tmp_path, monkeypatch):
    content = {"weight": torch.arange(50_000.0)}
    torch.save(content, tmp_path / "it.pt")
    real = os.preadv  # which Linux limits to 2 GiB
    monkeypatch.setattr(os, "preadv", lambda file, views, at: real(file, [view[:70_000] for view in views], at))
    assert torch.equal(fl.load(tmp_path / "it.pt", map_location="cpu")["weight"], content["weight"])


@pytest.mark.parametrize("alignment", [b"00", b"-1", b"xy"])
def test_an_alignment_by_which_pytorchs_reader_would_crash_is_an_error(tmp_path, alignment):
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "bad.pt", "w") as bad:
        for member in good.namelist():
            bad.writestr(member, alignment if member.endswith(".storage_alignment") else good.read(member))
    with pytest.raises(fl.errors.CheckpointError, match="damaged"):
        fl.load(tmp_path / "bad.pt")
