"""Loading returns the saved values."""

import functools
import json
import math
import random
from collections import Counter, OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import firstloss as fl
from firstloss.runtime.checkpoint.file import DTYPES

BIG = 40_000  # elements: large enough to stay on disk


def same(a, b):
    """Whether two objects are equal, of the same types and with the same bits."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return (
            a.detach().contiguous().numpy().tobytes() == b.detach().contiguous().numpy().tobytes()
            if (a.dtype in (torch.float32, torch.int64, torch.uint8, torch.bool))
            else torch.equal(a, b)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def saved_and_loaded(obj, tmp_path):
    fl.save(obj, tmp_path / "it")
    return fl.load(tmp_path / "it")


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
keys = st.text(max_size=3) | st.integers(-3, 3) | st.booleans() | st.sampled_from(["$tensor", "$x"])
trees = st.recursive(
    leaves | st.builds(torch.tensor, st.lists(st.integers(-9, 9), max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(tree=trees)
def test_any_nesting_round_trips(tree, tmp_path_factory):
    assert same(tree, saved_and_loaded(tree, tmp_path_factory.mktemp("tree")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, BIG // 2)])
def test_every_dtype_round_trips(dtype, shape, tmp_path):
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 100, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    back = saved_and_loaded({"x": tensor}, tmp_path)["x"]
    assert fl.is_deferred(back) == (count > 1 << 16)
    assert back.shape == shape and back.dtype == dtype
    assert torch.equal(back.clone().reshape(-1).view(torch.uint8), raw)


def test_other_data_round_trips(tmp_path):
    obj = {
        "counter": Counter({3: 2, 5: 1}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "complex": 1 + 2j,
        "array": np.arange(5, dtype=np.uint32),
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "set": {1, "a"},
        "cut": torch.randn(6, 8)[1:4, ::2],
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "number": np.float64(0.1),
    }
    back = saved_and_loaded(obj, tmp_path)
    assert same({**obj, "number": 0.1}, back)
    restored = random.Random()
    restored.setstate(back["python"])
    assert restored.random() == random.Random(3).random()


def test_a_generator_state_round_trips(tmp_path):
    state = saved_and_loaded({"rng": torch.get_rng_state()}, tmp_path)["rng"]
    expected = torch.randn(3)
    torch.set_rng_state(state)
    assert torch.equal(torch.randn(3), expected)


class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(200, 400)
        self.norm = torch.nn.BatchNorm1d(400)
        self.last = torch.nn.Linear(400, 400)
        self.last.weight = torch.nn.Parameter(torch.randn(400, 400))
        self.tied = self.last.weight

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def test_a_state_dict_loads_into_an_eager_model(tmp_path):
    model, other = Big(), Big()
    state = saved_and_loaded(model.state_dict(), tmp_path)
    assert fl.is_deferred(state["last.weight"])
    assert state._metadata == model.state_dict()._metadata
    other.load_state_dict(state)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert type(other.last.weight) is torch.nn.Parameter


def test_loaded_tensors_work_in_eager_operations(tmp_path):
    x = torch.randn(BIG)
    back = saved_and_loaded([x], tmp_path)[0]
    assert torch.equal(back[3:9] * 2, x[3:9] * 2)
    assert type(back + 1) is torch.Tensor and not fl.is_deferred(back)
    a, b = saved_and_loaded([x, x + 1], tmp_path)
    a.mul_(2)
    assert torch.equal(a, x * 2) and torch.equal(torch.zeros_like(b), torch.zeros(BIG))
    assert np.array_equal(b.numpy(), (x + 1).numpy())


def test_an_eager_optimizer_resumes(tmp_path):
    torch.manual_seed(0)
    model, x = Big(), torch.randn(8, 200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])

    def step(model, optimizer, schedule):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.item()

    step(model, optimizer, schedule)
    parts = [model, optimizer, schedule]
    fl.save([part.state_dict() for part in parts], tmp_path / "it")
    expected = [step(*parts) for _ in range(3)]
    other = Big()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    for part, state in zip([other, optimizer, schedule], fl.load(tmp_path / "it"), strict=True):
        part.load_state_dict(state)
    assert [step(other, optimizer, schedule) for _ in range(3)] == expected


def test_ties_are_stored_once_and_stay_ties(tmp_path):
    model = Big()
    state = saved_and_loaded(model.state_dict(), tmp_path)
    assert state["tied"] is state["last.weight"]
    files = list((tmp_path / "it").glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) < 4 * (200 * 400 + 400 * 400 + 4000) + 8192


def test_a_deferred_model_takes_weights_from_the_file(tmp_path):
    model = Big()
    fl.save(model.state_dict(), tmp_path / "it")
    other = fl.deferred_init(Big)
    other.load_state_dict(fl.load(tmp_path / "it"))
    assert fl.is_deferred(other.first.weight)
    fl.materialize_module(other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_deferred_model_is_saved_like_an_eager_one(tmp_path):
    torch.manual_seed(5)
    deferred = fl.deferred_init(Big)
    torch.manual_seed(5)
    assert same(dict(Big().state_dict()), dict(saved_and_loaded(deferred.state_dict(), tmp_path)))


def test_saving_again_keeps_loaded_tensors_readable(tmp_path):
    old, new = torch.randn(BIG), torch.randn(BIG)
    loaded = saved_and_loaded({"x": old}, tmp_path)
    assert torch.equal(saved_and_loaded({"x": new}, tmp_path)["x"], new)
    assert torch.equal(loaded["x"], old)
    assert sorted(p.suffix for p in (tmp_path / "it").iterdir()) == [".json", ".json", ".safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


def test_a_checkpoint_can_be_loaded_and_saved_in_place(tmp_path):
    x = torch.randn(BIG)
    fl.save({"x": x, "n": 1}, tmp_path / "it")
    state = fl.load(tmp_path / "it")
    state["n"] += 1
    fl.save(state, tmp_path / "it")
    back = fl.load(tmp_path / "it")
    assert back["n"] == 2 and torch.equal(back["x"], x)


@pytest.mark.parametrize(
    "obj, place",
    [
        ({"a": [1, object()]}, "a.1 is of type builtins.object"),
        ({"model": torch.nn.Linear(1, 1)}, "model is of type torch.nn.modules.linear.Linear"),
        ({"a": {"b": torch.zeros(2).to_sparse()}}, "a.b is a torch.sparse_coo"),
        ({"g": torch.Generator()}, "g is of type torch"),
        ({"m": torch.zeros(2, device="meta")}, "m is a .* on meta"),
        ({"n": torch.nested.nested_tensor([torch.zeros(2)])}, "n is a nested tensor"),
        (functools.reduce(lambda inner, _: {"a": inner}, range(3000), 1), "a.a.* is nested more than 200 levels deep"),
    ],
)
def test_an_unsavable_object_is_named(obj, place, tmp_path):
    with pytest.raises(fl.errors.UnsavableError, match=place):
        fl.save(obj, tmp_path / "it")
    assert not list(tmp_path.iterdir())


def test_a_cycle_is_refused(tmp_path):
    obj = []
    obj.append(obj)
    with pytest.raises(fl.errors.UnsavableError, match="contains itself"):
        fl.save(obj, tmp_path / "it")


def test_a_file_in_the_way_and_a_missing_folder_are_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fl.errors.SaveError):
        fl.save({}, tmp_path / "file" / "it")
    with pytest.raises(fl.errors.CheckpointMissingError, match="no checkpoint at"):
        fl.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="neither checkpoint.json nor"):
        fl.load(tmp_path)


def test_the_structure_is_readable_json(tmp_path):
    fl.save({"step": 3, "w": torch.zeros(2)}, tmp_path / "it")
    content = json.loads((tmp_path / "it" / "checkpoint.json").read_text())
    assert content["object"] == {"step": 3, "w": {"$tensor": "w"}}


@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".bin"])
def test_a_link_to_a_file_is_written_through(ending, tmp_path):
    real, link = tmp_path / f"real{ending}", tmp_path / f"link{ending}"
    fl.save({"w": torch.zeros(2)}, real)
    link.symlink_to(real)
    fl.save({"w": torch.ones(2)}, link)
    assert link.is_symlink() and torch.equal(fl.load(real)["w"], torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([real.name, link.name])
