"""Loading a checkpoint into a deferred model cancels its recipes: nothing is drawn; each rank reads its own bytes."""

import contextlib
import os
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import mapped_file
from firstloss.errors import ConstantChangedError, NotMaterializedWarning
from tests import forked
from tests.tiny_llama import llama

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="Linux tells what a mapping shows")

BYTES = 4 * (6 * 512 * 513 + 1000 * 256)


def build():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)], nn.Embedding(1000, 256))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and the folder with its weights as safetensors and torch.save files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    model = build()
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(model.state_dict(), folder / "model.pt")
    return model, folder


@pytest.fixture
def read(monkeypatch):
    """The number of bytes read from mapped files, one entry per read."""
    counts = []
    real = mapped_file._read

    def counting(place, dtype, begin, out):
        counts.append(out.nbytes)
        return real(place, dtype, begin, out)

    monkeypatch.setattr(mapped_file, "_read", counting)
    return counts


def read_so_far():
    """Bytes read by this process so far, all files and threads together."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def opened(folder):
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def sliced(folder):
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name)[...] for name in file.keys()}


SOURCES = {
    "safetensors.load_file": lambda folder: safetensors.torch.load_file(folder / "model.safetensors"),
    "safe_open": opened,
    "slices": sliced,
    "torch.load, mapped": lambda folder: torch.load(folder / "model.pt", mmap=True),
}


def converted(model, state):
    state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    return model.to(torch.bfloat16).load_state_dict(state, assign=True)


def stacked(model, state):
    model.load_state_dict({k: torch.stack([v, v]).unbind()[1] for k, v in state.items()}, assign=True)


LOADINGS = {
    "copied": lambda model, state: model.load_state_dict(state),
    "assigned": lambda model, state: model.load_state_dict(state, assign=True),
    "converted on the way": lambda model, state: model.to(torch.bfloat16).load_state_dict(state),
    "converted before": converted,
    "cloned": lambda model, state: model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True),
    "stacked": stacked,
    "concatenated": lambda model, state: model.load_state_dict(
        {k: torch.cat([v[: len(v) // 2], v[len(v) // 2 :]]) for k, v in state.items()}, assign=True
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("load", LOADINGS.values(), ids=LOADINGS)
def test_nothing_is_read_before_it_is_needed(saved, source, load, read):
    expected, folder = saved
    with fl.deferred():
        model = build()
        load(model, source(folder))
    assert sum(read) < BYTES // 100, "the file was read while it was captured"
    assert fl.is_deferred(model)
    assert not any(recipe.draws for recipe in fl.init_program(model).recipes.values())
    fl.materialize_module(model)
    assert BYTES * 0.98 < sum(read) < BYTES * (2.01 if "stacked" in load.__name__ else 1.01)
    for name, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.to(model[0].weight.dtype)), name


def test_a_part_of_joined_tensors_reads_its_own_bytes(saved, read):
    """As a rank of FSDP2 does with experts that a checkpoint has one by one."""
    expected, folder = saved
    with fl.deferred():
        state = opened(folder)
        matrices = [state[f"{number}.weight"] for number in range(6)]
        joined = torch.cat([torch.stack(matrices[:3]), torch.stack(matrices[3:])], dim=1)
        part = joined[1:2].clone()
    fl.materialize_tensor(part)
    assert torch.equal(part[0], torch.cat([expected[1].weight, expected[4].weight]))
    assert sum(read) == part.nbytes == 2 * expected[1].weight.nbytes


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_weights_can_be_loaded_after_the_block(saved, source, read):
    expected, folder = saved
    model = fl.deferred_init(build)
    model.load_state_dict(source(folder))
    assert sum(read) < BYTES // 100
    assert not any(recipe.draws for recipe in fl.init_program(model).recipes.values())
    with pytest.warns(NotMaterializedWarning):  # including a forgotten one
        actual = model[:6](torch.ones(2, 512))
    assert torch.equal(actual, expected[:6](torch.ones(2, 512)))


def test_missing_keys_are_drawn_as_in_eager(saved):
    _, folder = saved

    def load(construct):
        torch.manual_seed(3)
        with construct():
            model = build()
        state = safetensors.torch.load_file(folder / "model.safetensors")
        del state["2.weight"], state["6.weight"]
        assert model.load_state_dict(state, strict=False).missing_keys == ["2.weight", "6.weight"]
        return fl.materialize_module(model).state_dict()

    result = load(fl.deferred)
    for name, weight in load(lambda: torch.random.fork_rng(devices=[])).items():
        assert torch.equal(result[name], weight), name


# -- memory that does not have the file's values -----------------------------------------------------------------------


def edited_before(state, name):
    state[name].add_(1)
    return lambda: None


def edited_past_torch(state, name):
    state[name].numpy()[3, 5] = 7.0
    return lambda: None


def same_states(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def edited_after(state, name):
    return lambda: state[name].zero_()


@pytest.mark.parametrize("edit", [edited_before, edited_past_torch, edited_after])
def test_edits_of_loaded_tensors_match_eager(saved, edit):
    _, folder = saved
    expected, model = build(), fl.deferred_init(build)
    for target in (expected, model):
        state = safetensors.torch.load_file(folder / "model.safetensors")
        later = edit(state, "3.weight")
        target.load_state_dict(state)
        later()
    fl.materialize_module(model)
    assert same_states(model, expected)


def test_editing_a_parameters_source_is_an_error(saved):
    state = safetensors.torch.load_file(saved[1] / "model.safetensors")
    with fl.deferred():
        model = build()
        model.load_state_dict(state, assign=True)
    state["3.weight"].zero_()  # in eager PyTorch, it is the parameter's memory
    with pytest.raises(ConstantChangedError, match="edited after a parameter"):
        fl.materialize_module(model)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_gone_is_still_read(saved, tmp_path, how):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(saved[0].state_dict(), path)
    model = fl.deferred_init(build)
    model.load_state_dict(safetensors.torch.load_file(path))
    path.unlink()
    if how == "replaced":
        path.write_bytes(b"something else")
    fl.materialize_module(model)
    assert same_states(model, saved[0])


@pytest.mark.parametrize("how", ["rewritten", "cut short"])
def test_a_file_that_changes_is_an_error(saved, tmp_path, how):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(saved[0].state_dict(), path)
    model = fl.deferred_init(build)
    model.load_state_dict(safetensors.torch.load_file(path))
    if how == "rewritten":
        with open(path, "r+b") as file:
            file.seek(100_000)
            file.write(b"changed")
        os.utime(path, (1, 1))
    else:
        os.truncate(path, 1000)
    with pytest.raises(ConstantChangedError, match=r"test_loading.py:\d+: .*model.safetensors has been written to"):
        fl.materialize_module(model)


def test_parameters_of_one_tensor_are_tied(saved):
    state = safetensors.torch.load_file(saved[1] / "model.safetensors")
    with fl.deferred():
        first, second = nn.Parameter(state["0.weight"]), nn.Parameter(state["0.weight"])
        part = nn.Parameter(state["0.weight"][:256])  # overlaps, and is real
    with torch.no_grad():
        fl.materialize_tensor(first).add_(1)
    assert first is not second and torch.equal(first, second) and not torch.equal(part, first[:256])


def test_without_a_memory_map_tensors_are_kept_in_memory(saved, monkeypatch):
    monkeypatch.setattr(mapped_file, "_mappings", list)
    mapped_file._cached_mappings.clear()
    model = fl.deferred_init(build)
    model.load_state_dict(safetensors.torch.load_file(saved[1] / "model.safetensors"))
    fl.materialize_module(model)
    assert same_states(model, saved[0])


# -- from_pretrained ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    llama(hidden_size=256, intermediate_size=512, tie_word_embeddings=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_from_pretrained(pretrained, dtype, kind, read):
    import transformers

    def load(construct):
        torch.manual_seed(2)
        with construct():
            model = getattr(transformers, kind).from_pretrained(pretrained, dtype=dtype)
        return model, torch.get_rng_state()

    expected, state = load(contextlib.nullcontext)
    model, actual = load(fl.deferred)
    assert torch.equal(actual, state) and sum(read) < 1000 and fl.is_deferred(model)
    fl.materialize_module(model)
    assert sum(read) > 1000
    for pairs in (
        (model.named_parameters(), expected.named_parameters()),
        (model.named_buffers(), expected.named_buffers()),
    ):
        for (name, actual), (_, saved_weight) in zip(*pairs, strict=True):
            assert actual.dtype == saved_weight.dtype and torch.equal(actual, saved_weight), name
    if kind == "AutoModelForCausalLM":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.training is expected.training


# -- shards: each rank reads its own bytes -----------------------------------------------------------------------------

_RANKS = """
import os, sys, warnings, torch, torch.distributed as dist, safetensors.torch, firstloss as fl
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from firstloss.engine import cpu_engine
sys.path.insert(0, os.environ["HERE"])
from tests.init.test_loading import build, read_so_far
rank, folder, world = int(sys.argv[1]), sys.argv[2], 2
warnings.simplefilter("error", fl.errors.NotMaterializedWarning)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
path = folder + "/model.safetensors"
def shard(model):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
values, real = [], cpu_engine.materialize_values
cpu_engine.materialize_values = lambda these, **a: values.extend(these) or real(these, **a)
for kind in sys.argv[3:]:
    plain = build()
    plain.load_state_dict(safetensors.torch.load_file(path))
    expected = shard(plain)
    if kind.startswith("dcp"):
        dcp.save({"model": expected.state_dict()}, checkpoint_id=folder + "/" + kind)
    values.clear()
    load = lambda: safetensors.torch.load_file(path)
    torch.manual_seed(9)
    before = read_so_far()
    with fl.deferred():
        model = build()
        if kind in ("copied", "assigned"):
            model.load_state_dict(load(), assign=kind == "assigned")
    if kind == "after":
        model.load_state_dict(load())
    shard(model)
    if kind == "set_model_state_dict":
        set_model_state_dict(model, load(), options=StateDictOptions(full_state_dict=True))
    elif kind == "broadcast":
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, load() if rank == 0 else {}, options=whole)
    elif kind in ("dcp", "dcp, with to_empty"):
        if kind != "dcp":  # as a script for the meta device has it
            model.to_empty(device="cpu")
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder + "/" + kind)
    elif kind == "dcp, with an optimizer":
        state, _ = get_state_dict(model, torch.optim.AdamW(model.parameters()))
        dcp.load({"model": state}, checkpoint_id=folder + "/" + kind)
    fl.materialize_module(model)
    read, own = read_so_far() - before, sum(p.to_local().nbytes for p in model.parameters())
    for a, b in zip(model.parameters(), expected.parameters()):
        assert torch.equal(a.to_local(), b.to_local()), kind
    assert kind.startswith("dcp") <= (not values), f"{kind}: recipes were run"
    if kind != "broadcast":
        assert read < 1.25 * own, (kind, read, own)
dist.destroy_process_group()
"""


def test_each_rank_reads_its_own(saved):
    """With each way to load, one after another in the same two processes."""
    kinds = ["copied", "assigned", "after", "set_model_state_dict", "broadcast", "dcp"]
    kinds += ["dcp, with to_empty", "dcp, with an optimizer"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HERE": os.getcwd()}
    command = ["-c", _RANKS]
    ranks = [forked.start([*command, str(rank), str(saved[1]), *kinds], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=250) for rank in ranks] == [0, 0]
