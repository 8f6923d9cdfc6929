import json
import os
import resource
import signal
import subprocess
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM

import firstloss as fl
from firstloss.init.disk import save
from firstloss.init.disk import state_dict as saved_tensors
from tests import forked, tiny_llama

# Rows of 250 elements: weights begin and end within blocks, and within the granules of their draws.
FIELDS = {
    "vocab_size": 999,
    "hidden_size": 250,
    "intermediate_size": 700,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}


def llama(**fields):
    return tiny_llama.llama(**{**FIELDS, **fields})


def both(make):
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    return eager, fl.deferred_init(make)


def tensors(folder):
    tensors_by_name = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors_by_name.update(load_file(path))
    return tensors_by_name


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith(".")) if folder.exists() else []


@pytest.mark.parametrize("size", ["5GB", "2MB", "900KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_saved_as_save_pretrained_saves_it(tmp_path, size, tied):
    eager, deferred = both(lambda: llama(tie_word_embeddings=tied))
    fl.save_initialized(deferred, tmp_path / "firstloss", max_shard_size=size)
    eager.save_pretrained(tmp_path / "transformers", max_shard_size=size)
    assert sorted(os.listdir(tmp_path / "firstloss")) == sorted(os.listdir(tmp_path / "transformers"))
    assert_same(tensors(tmp_path / "firstloss"), tensors(tmp_path / "transformers"))
    for path in (tmp_path / "transformers").glob("*.json"):
        assert (tmp_path / "firstloss" / path.name).read_text() == path.read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "firstloss")
    assert_same(loaded.state_dict(), eager.state_dict())
    assert fl.is_deferred(deferred)


def test_dtypes_are_kept(tmp_path):
    eager, deferred = both(lambda: llama().to(torch.bfloat16))
    fl.save_initialized(deferred, tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), dict(eager.state_dict()))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


class Various(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(37)
        self.embedding = nn.Embedding(1000, 33, padding_idx=7)
        self.lstm = nn.LSTM(9, 11)
        self.head = nn.Linear(33, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(70, 301).t())
        self.halves = nn.Parameter(torch.randn(1001).to(torch.float16))
        self.register_buffer("kept", torch.arange(5))
        self.register_buffer("left", torch.ones(4), persistent=False)
        self.register_buffer("mask", torch.ones(7, 7).tril().bool())
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        nn.init.orthogonal_(self.lstm.weight_hh_l0)


def test_any_module_can_be_saved(tmp_path):
    eager, deferred = both(Various)
    fl.save_initialized(deferred, tmp_path)
    expected = dict(eager.state_dict())
    del expected["head.weight"]
    assert_same(load_file(tmp_path / "model.safetensors"), expected)
    assert visible(tmp_path) == ["model.safetensors"]
    again = Various()
    load_model(again, tmp_path / "model.safetensors")
    assert_same(again.state_dict(), eager.state_dict())


def test_real_and_partly_real_modules_can_be_saved(tmp_path):
    eager, deferred = both(Various)
    fl.save_initialized(eager, tmp_path / "real")
    fl.materialize_module(deferred.lstm)
    fl.save_initialized(deferred, tmp_path / "half")
    assert (tmp_path / "real/model.safetensors").read_bytes() == (tmp_path / "half/model.safetensors").read_bytes()


VIEWS = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: z.conj().imag,
    "negative_of_conjugate": lambda z: z.conj().imag.neg(),
    "imaginary": lambda z: z.imag,
    "transposed": lambda z: z.t(),
    "part": lambda z: z[1:],
    "again": lambda z: z,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("captured", [False, True])
def test_views_of_one_buffer_are_saved_by_value(view, captured, tmp_path):
    real = torch.randn(6, 6, dtype=torch.complex64)

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5))
            z = torch.randn(6, 6, dtype=torch.complex64) if captured else real
            self.register_buffer("z", z)
            self.register_buffer("view", view(z))

    eager, deferred = both(Views)
    fl.save_initialized(deferred, tmp_path)
    result = load_file(tmp_path / "model.safetensors")
    if torch.equal(eager.view, eager.z):  # tied weights are listed in the metadata
        result["view"] = result["z"]
    assert_same(result, {name: tensor.resolve_conj().resolve_neg() for name, tensor in eager.state_dict().items()})


def test_the_bytes_do_not_depend_on_pieces_and_runs(tmp_path, monkeypatch):
    _, deferred = both(llama)
    fl.save_initialized(deferred, tmp_path / "large")
    monkeypatch.setattr(save, "_PIECE", 4096)
    monkeypatch.setattr(save, "_RUN", 40 * 4096)
    reports = []
    fl.save_initialized(deferred, tmp_path / "small", progress=lambda *at: reports.append(at))
    large, small = (tmp_path / name / "model.safetensors" for name in ("large", "small"))
    assert large.read_bytes() == small.read_bytes()
    assert reports == sorted(reports) and reports[-1][0] == reports[-1][1] == sum(
        t.nbytes for t in deferred.state_dict().values()
    )


def test_buffered_writes_give_the_same_bytes(tmp_path, monkeypatch):
    _, deferred = both(llama)
    fl.save_initialized(deferred, tmp_path / "direct")
    monkeypatch.setattr("firstloss.init.disk.direct_file._DIRECT", 0)
    fl.save_initialized(deferred, tmp_path / "buffered")
    direct, buffered = (tmp_path / name / "model.safetensors" for name in ("direct", "buffered"))
    assert direct.read_bytes() == buffered.read_bytes()


def test_an_earlier_save_is_replaced(tmp_path):
    eager, deferred = both(llama)
    (tmp_path / "mine.txt").write_text("kept")
    for size in ("900KB", "3MB", "5GB", "900KB"):
        fl.save_initialized(deferred, tmp_path, max_shard_size=size)
        assert_same(tensors(tmp_path), dict(eager.state_dict()))
        assert ("model.safetensors" in visible(tmp_path)) == (size == "5GB")
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


CHILD = """
import sys, torch
import firstloss as fl
from firstloss.init.disk import save
from tests.init.test_save import llama
save._PIECE, save._RUN, save._SYNC = 4096, 10 * 4096, 30 * 4096
torch.manual_seed(0)
print("begin", flush=True)
def progress(done, total):
    if done * 2 > total:
        print("half", flush=True)
        import time
        time.sleep(60)
fl.save_initialized(fl.deferred_init(llama), sys.argv[1], max_shard_size="2MB", progress=progress)
"""


def test_a_killed_run_leaves_no_model_and_is_resumed(tmp_path, monkeypatch):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.join(root, "src"), root])}
    target = tmp_path / "model"
    child = forked.start(["-c", CHILD, target], stdout=subprocess.PIPE, env=environment)
    assert child.stdout.readline() == "begin\n"
    assert child.stdout.readline() == "half\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert visible(target) == []

    monkeypatch.setattr(save, "_PIECE", 4096)
    monkeypatch.setattr(save, "_RUN", 10 * 4096)
    eager, deferred = both(llama)
    reports = []
    fl.save_initialized(deferred, target, max_shard_size="2MB", progress=lambda *at: reports.append(at))
    assert reports[0][0] > reports[0][1] / 4  # files that were complete have not been rewritten
    assert_same(tensors(target), dict(eager.state_dict()))
    assert not [name for name in os.listdir(target) if name.startswith(".")]


def test_another_model_does_not_resume_it(tmp_path, monkeypatch):
    _, deferred = both(llama)
    with monkeypatch.context() as patch:
        patch.setattr(save, "_write_index", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fl.save_initialized(deferred, tmp_path)
    assert visible(tmp_path) == [] and len(os.listdir(tmp_path)) == 1
    torch.manual_seed(1)
    eager = llama()
    torch.manual_seed(1)
    fl.save_initialized(fl.deferred_init(llama), tmp_path)
    assert_same(tensors(tmp_path), dict(eager.state_dict()))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def interrupted(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moves", range(9))
def test_an_interrupt_while_moving_files_loses_nothing(tmp_path, monkeypatch, moves):
    eager, deferred = both(llama)
    fl.save_initialized(deferred, tmp_path, max_shard_size="5GB")
    left = moves
    move = save._move

    def some_moves(source, target):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(save, "_move", some_moves)
        with pytest.raises(KeyboardInterrupt):
            fl.save_initialized(deferred, tmp_path, max_shard_size="1MB")
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "model.safetensors.index.json").exists()
    fl.save_initialized(deferred, tmp_path, max_shard_size="1MB")
    assert_same(tensors(tmp_path), dict(eager.state_dict()))
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), eager.state_dict())


def test_a_full_disk_is_one_clear_error_before_anything_is_written(tmp_path, monkeypatch):
    _, deferred = both(llama)
    monkeypatch.setattr(save, "_free", lambda folder: 1000)
    with pytest.raises(fl.errors.SaveError, match=r"take [0-9,]+ bytes.*1,000 bytes are free") as raised:
        fl.save_initialized(deferred, tmp_path / "full")
    assert str(tmp_path / "full") in str(raised.value)
    assert visible(tmp_path / "full") == []


def test_a_disk_that_fills_up_is_an_error(tmp_path):
    eager, deferred = both(llama)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(fl.errors.SaveError, match="not enough space"):
            fl.save_initialized(deferred, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert visible(tmp_path / "full") == []
    fl.save_initialized(deferred, tmp_path / "full")
    assert_same(tensors(tmp_path / "full"), dict(eager.state_dict()))


def test_an_unwritable_folder_is_an_error(tmp_path):
    _, deferred = both(llama)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(fl.errors.SaveError, match="file.*cannot be written"):
        fl.save_initialized(deferred, tmp_path / "file")
    with pytest.raises(fl.errors.SaveError, match="cannot be written"):
        fl.save_initialized(deferred, tmp_path / "file" / "within")


def test_a_second_writer_is_refused(tmp_path, monkeypatch):
    _, deferred = both(llama)
    errors = []

    def second(*args):
        with pytest.raises(fl.errors.SaveError, match="being written by another"):
            fl.save_initialized(deferred, tmp_path)
        errors.append(True)

    monkeypatch.setattr(save, "write_configs", second)
    fl.save_initialized(deferred, tmp_path)
    assert errors


def test_unsupported_tensors_are_refused(tmp_path):
    with pytest.raises(fl.errors.SaveError, match="weight is a torch.strided tensor of torch.complex128"):
        fl.save_initialized(fl.deferred_init(lambda: nn.Linear(3, 3, dtype=torch.complex128)), tmp_path)
    with pytest.raises(ValueError, match="not a size"):
        fl.save_initialized(fl.deferred_init(lambda: nn.Linear(3, 3)), tmp_path, max_shard_size="huge")


def test_index_lists_every_tensor(tmp_path):
    eager, deferred = both(llama)
    fl.save_initialized(deferred, tmp_path, max_shard_size="1MB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in eager.state_dict().values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert name in opened.keys()


def test_ties_are_named():
    a = torch.zeros(3)
    state = {"first": a, "second": a, "other": torch.zeros(3)}
    assert saved_tensors._ties(state, []) == {"second": "first"}
    import re

    assert saved_tensors._ties(state, [re.compile("first")]) == {"first": "second"}
    assert saved_tensors._ties(state, [re.compile("first"), re.compile("second")]) == {"first": "second"}
