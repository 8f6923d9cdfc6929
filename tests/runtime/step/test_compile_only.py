"""Backends that only compile or only lower, and properties of backends."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import BackendError, LoweringError

pytestmark = pytest.mark.own_compile_cache
DEPTH = 6  # enough identical layers for a step to be split into segments


class Model(nn.Module):
    def __init__(self, constructed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))
        constructed.append(self)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


def train(batches, closures, **options):
    backend = fl.backend("CSX", **options)
    torch.manual_seed(0)
    constructed = []
    with backend.device:
        model = Model(constructed)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @fl.step_closure
    def report(loss):
        closures.append(float(loss))

    @fl.trace
    def step(x):
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(loss)
        return loss

    losses = [step(batch) for batch in fl.utils.data.DataExecutor(batches, num_steps=3)]
    return losses, model


def files(folder):
    return {name for name in os.listdir(folder) if name.endswith("-cache")}


@pytest.mark.parametrize("mesh", [None, {"data": 1}])
def test_a_later_run_finds_the_compiled_steps(mesh, tmp_path):
    from firstloss.runtime.device import placement

    folder, closures = tmp_path / "kept", []
    batches = fl.utils.data.SyntheticDataset(torch.zeros(4, 8))
    losses, model = train(batches, closures, artifact_dir=tmp_path, compile_dir=folder, compile_only=True, mesh=mesh)
    assert len(losses) == 1 and losses[0].shape == () and not closures
    with pytest.raises(BackendError, match="compile_only"):
        float(losses[0])
    cells = [p._storage.resident for p in model.parameters()]
    assert not any(cell._pending._begun for cell in cells) and not placement._in_progress
    kept = files(folder)
    assert kept
    losses, _ = train([torch.ones(4, 8)] * 3, closures, artifact_dir=tmp_path, compile_dir=folder, mesh=mesh)
    assert len([float(loss) for loss in losses]) == len(closures) == 3
    assert {name for name in files(folder) - kept if name.startswith("jit_step")} == set()


def test_validate_only_lowers_without_running(tmp_path):
    losses, _ = train([torch.zeros(4, 8)], [], artifact_dir=tmp_path, validate_only=True)
    with pytest.raises(BackendError, match="validate_only"):
        losses[0].item()
    assert not {name for name in files(tmp_path / "compiled") if name.startswith("jit_step")}


def test_weights_are_made_on_first_read(tmp_path):
    _, model = train([torch.zeros(4, 8)], [], artifact_dir=tmp_path, compile_only=True)
    torch.manual_seed(0)
    for traced, eager in zip(model.parameters(), Model([]).parameters(), strict=True):
        assert torch.equal(traced.detach(), eager.detach())


def test_an_operation_without_lowering_is_found(tmp_path):
    fl.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    with pytest.raises((LoweringError, fl.errors.ValueReadError)):
        fl.trace(lambda x: x.nonzero())(torch.zeros(3))


WRONG = {
    "eager": {"name": "CPU", "compile_only": True},
    "eager, a folder": {"name": "CPU", "compile_dir": "x"},
    "both": {"name": "CSX", "compile_only": True, "validate_only": True},
    "a word": {"name": "CSX", "compile_only": "yes"},
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused(case):
    with pytest.raises(BackendError):
        fl.backend(**WRONG[case])


@pytest.mark.parametrize("name, which", [("CSX", "is_csx"), ("XLA", "is_csx"), ("CPU", "is_cpu")])
def test_a_backend_says_which_it_is(name, which, tmp_path):
    config = fl.distributed.ClusterConfig(num_csx=1)
    backend = fl.backend(name, artifact_dir=tmp_path, cluster_config=config)
    assert [w for w in ("is_csx", "is_cpu", "is_gpu") if getattr(backend, w)] == [which]
    assert backend.cluster_config is config and backend.is_e2e_execution
    tensor = torch.ones(2)
    assert torch.equal(backend.to_cpu(tensor), tensor) and backend.to_cpu(tensor) is not tensor
    tracing = []
    fl.trace(lambda x: tracing.append(backend.is_tracing) or x)(tensor)
    assert tracing == [name != "CPU"] and not backend.is_tracing
    with pytest.raises(BackendError, match="compile_only cannot be changed once"):
        backend.compile_only = True


def test_current_backend_is_the_last_one_made(monkeypatch):
    from firstloss.runtime import backend

    monkeypatch.setattr(backend, "_current", None)
    assert fl.current_backend(raise_exception=False) is None
    with pytest.raises(BackendError, match="no backend yet"):
        fl.current_backend()
    latest = fl.backend("CPU")
    assert fl.current_backend(raise_exception=False) is fl.current_backend() is latest


# -- the executor --


def test_the_executor_counts_iterations(backend):
    seen = []
    executor = fl.utils.data.DataExecutor([torch.zeros(1)] * 3, num_steps=3)
    assert (executor.iteration, executor.user_iteration) == (-1, 0)
    for _ in executor:
        numbers = executor.iteration, executor.user_iteration
        seen.append((*numbers, executor.is_initial_step, executor.on_final_iteration))
    assert seen == [(0, 1, True, False), (1, 2, False, False), (2, 3, False, True)]


def test_each_executor_has_its_folder(tmp_path):
    fl.backend("CPU", artifact_dir=tmp_path)
    folders = set()
    for _ in range(2):
        for _ in (executor := fl.utils.data.DataExecutor([torch.zeros(1)])):
            folders.add(executor.artifact_dir)
            assert executor.artifact_dir.is_dir()
    assert folders == {tmp_path / "executors" / "000001", tmp_path / "executors" / "000002"}


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu"), "meta"])
def test_load_moves_to_a_device(place, tmp_path):
    weights = {"a": torch.randn(300, 300), "b": [torch.ones(2)], "c": 3}
    fl.save(weights, tmp_path / "saved")
    loaded = fl.load(tmp_path / "saved", map_location=place)
    assert loaded["c"] == 3 and loaded["a"].device.type == torch.device(place).type
    assert not fl.is_deferred(loaded["a"])
    if torch.device(place).type == "cpu":
        assert torch.equal(loaded["a"], weights["a"]) and torch.equal(loaded["b"][0], weights["b"][0])


@pytest.mark.parametrize("place", ["nowhere", {"cpu": "cpu"}, lambda storage, location: storage])
def test_an_invalid_map_location_is_refused(place, tmp_path):
    fl.save({"a": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(fl.errors.CheckpointError, match="map_location"):
        fl.load(tmp_path / "saved", map_location=place)
