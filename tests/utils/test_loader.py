"""Worker processes, synthetic samples, resumable loaders, and batches of all kinds."""

import dataclasses
import os
import typing

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import firstloss as fl
from firstloss.errors import BackendError, ExecutorError, LoaderError
from firstloss.utils.data import RestartableDataLoader, SyntheticDataset, compute_num_steps, infer_batch_size
from tests.compiled_steps import compilations


class Which(Dataset):
    """Samples that identify the process that read them."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])


def processes_of(loader):
    samples = torch.cat([batch.clone() for batch in fl.utils.data.DataExecutor(loader)])
    assert samples[:, 0].tolist() == list(range(24))
    return set(samples[:, 1].tolist())


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("name", ["CSX", "CPU"])
@pytest.mark.parametrize("count", [None, 0, 2])
def test_the_number_of_workers_is_chosen(own, name, count, tmp_path):
    """The backend's number, otherwise the loader's; 0 is this process."""
    fl.backend(name, artifact_dir=tmp_path, cluster_config=fl.distributed.ClusterConfig(num_workers_per_csx=count))
    loader = DataLoader(Which(), batch_size=4, num_workers=own, prefetch_factor=4 if own else None)
    processes = processes_of(fl.utils.data.DataLoader(lambda: loader))
    expected_count = own if count is None else count
    assert (
        processes == {os.getpid()}
        if expected_count == 0
        else len(processes) == expected_count and os.getpid() not in processes
    )


def test_workers_are_counted_per_device(monkeypatch):
    from firstloss.utils.data import loader

    config = fl.distributed.ClusterConfig(num_csx=4, num_workers_per_csx=2)
    backend = type("Backend", (), {"cluster_config": config, "is_xla": False})()
    monkeypatch.setattr(loader, "current_backend", lambda raise_exception: backend)
    for count, expected in ((1, 8), (3, 3), (8, 1)):
        monkeypatch.setattr(loader, "processes", lambda backend, count=count: type("P", (), {"count": count}))
        assert loader.num_workers_setting() == expected


def test_a_loader_without_worker_support_is_refused(tmp_path):
    fl.backend("CPU", artifact_dir=tmp_path, cluster_config=fl.distributed.ClusterConfig(num_workers_per_csx=1))
    with pytest.raises(LoaderError, match="num_workers_per_csx"):
        list(fl.utils.data.DataExecutor([torch.zeros(1)]))


# -- processes, and how many rows they read --


def test_one_process_reads_all_rows(backend):
    from firstloss import distributed

    assert distributed.get_streaming_batch_size(12) == 12
    assert (distributed.get_ordinal(), distributed.num_tasks(), distributed.num_streamers()) == (0, 1, 1)
    assert distributed.is_streamer() and distributed.is_master_ordinal() and distributed.get_streaming_rank() == 0


def test_several_processes_share_a_batch(monkeypatch):
    from firstloss import distributed
    from firstloss.runtime.mesh.processes import Processes

    monkeypatch.setattr(distributed, "_processes", lambda: Processes(2, 4))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert distributed.get_streaming_batch_size(12) == distributed.get_streaming_batch_size(12, 3) == 3
    assert distributed.get_ordinal() == distributed.get_streaming_rank() == 2
    assert not distributed.is_master_ordinal() and distributed.is_master_ordinal(local=True)
    for size, rank in ((13, None), (0, None), (12.0, None), (12, 4)):
        with pytest.raises(BackendError):
            distributed.get_streaming_batch_size(size, rank)


# -- samples without data --


def test_synthetic_samples_follow_their_spec():
    dataset = SyntheticDataset({"x": torch.ones(3), "y": (lambda i: torch.tensor(i),)}, num_samples=5)
    samples = list(dataset)
    assert len(dataset) == len(samples) == 5
    assert [int(sample["y"][0]) for sample in samples] == list(range(5))
    samples[0]["x"].zero_()
    assert torch.equal(samples[1]["x"], torch.ones(3))  # copies


def test_workers_give_the_same_synthetic_samples():
    dataset = SyntheticDataset(lambda i: torch.tensor(i), num_samples=9)
    samples = torch.cat(list(DataLoader(dataset, batch_size=2, num_workers=2))).tolist()
    assert sorted(samples) == list(range(9))


def test_synthetic_samples_can_be_endless():
    dataset = SyntheticDataset(torch.ones(1))
    with pytest.raises(TypeError, match="no length"):
        len(dataset)
    assert next(iter(dataset)) == 1


@pytest.mark.parametrize("spec, count", [({}, None), ([3], None), (torch.ones(1), 0), (torch.ones(1), True)])
def test_invalid_synthetic_specs_are_refused(spec, count):
    with pytest.raises(LoaderError):
        SyntheticDataset(spec, count)


# -- a loader that knows its position --


class Counting:
    """Yields 0, 1, 2 and so on, and resumes without reading earlier items."""

    def __init__(self):
        self.next, self.begun = 0, []

    def __iter__(self):
        self.begun.append(self.next)
        while self.next < 6:
            self.next += 1
            yield torch.tensor([self.next - 1])
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state_dict):
        self.next = state_dict["next"]


def test_a_restartable_loader_keeps_its_position(backend):
    own = Counting()
    loader = fl.utils.data.DataLoader(lambda: own)
    assert isinstance(own, RestartableDataLoader) and loader.is_restartable and loader.dataloader is own
    assert not fl.utils.data.DataLoader(lambda: [torch.zeros(1)]).is_restartable
    for batch in fl.utils.data.DataExecutor(loader, num_steps=4):
        last = int(batch)
    position = loader.state_dict()
    assert last == 3
    again = Counting()
    rest = fl.utils.data.DataLoader(lambda: again)
    rest.load_state_dict(position)
    assert [int(batch) for batch in fl.utils.data.DataExecutor(rest)] == [4, 5]
    assert again.begun == [4]


# -- how many steps --

STEPS = {
    "steps": ({"num_steps": 7}, 7),
    "the rest": ({"max_steps": 10, "initial_step": 4}, 6),
    "the fewer": ({"num_steps": 7, "max_steps": 10, "initial_step": 4}, 6),
    "epochs": ({"num_epochs": 2}, 20),
    "short epochs": ({"num_epochs": 2, "steps_per_epoch": 3}, 6),
    "accumulated": ({"num_epochs": 2, "grad_accum_steps": 3}, 6),
    "nothing": ({}, None),
    "both": ({"num_steps": 2, "num_epochs": 2}, None),
    "none left": ({"max_steps": 4, "initial_step": 4}, None),
    "a long epoch": ({"num_epochs": 1, "steps_per_epoch": 11}, None),
    "a long update": ({"num_epochs": 1, "grad_accum_steps": 11}, None),
    "zero": ({"num_steps": 0}, None),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_number_of_steps_is_computed(case):
    options, expected = STEPS[case]
    if expected is None:
        with pytest.raises(ExecutorError):
            compute_num_steps(range(10), **options)
    else:
        assert compute_num_steps(range(10), **options) == expected


def test_epochs_need_a_length():
    with pytest.raises(ExecutorError, match="num_steps"):
        compute_num_steps(iter([]), num_epochs=1)
    assert compute_num_steps(iter([]), num_steps=3) == 3


def test_the_batch_size_is_inferred():
    assert infer_batch_size({"x": torch.zeros(4, 2), "y": [torch.zeros(4)]}, 4) == 4
    assert infer_batch_size((torch.zeros(4), torch.zeros(3))) is None
    for wrong, size in (({}, None), (torch.zeros(4), 3)):
        with pytest.raises(ExecutorError):
            infer_batch_size(wrong, size)


# -- batches of all kinds --


@dataclasses.dataclass
class Inner:
    y: typing.Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Batch:
    x: typing.Any
    inner: Inner
    count: int = 3


@dataclasses.dataclass(slots=True)
class Slots:
    x: typing.Any
    y: typing.Any


class Named(typing.NamedTuple):
    x: typing.Any
    y: typing.Any


def encoding(x, y):
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


KINDS = {
    "dataclass": (lambda x, y: Batch(x, Inner(y)), lambda b: (b.x, b.inner.y)),
    "slots": (Slots, lambda b: (b.x, b.y)),
    "encoding": (encoding, lambda b: (b["x"], b["y"])),
    "named tuple": (Named, lambda b: (b.x, b.y)),
    "nested": (lambda x, y: {"a": [(x, {"b": Inner({"y": y})})]}, lambda b: (b["a"][0][0], b["a"][0][1]["b"].y["y"])),
    "in an encoding": (lambda x, y: encoding({"x": x}, [y]), lambda b: (b["x"]["x"], b["y"][0])),
}


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["CSX", "CPU"])
def test_batches_keep_their_type(kind, arrays, name, tmp_path, traced):
    """From a loader to a step each keeps its type, and the step is traced once for all of them."""
    make, parts = KINDS[kind]
    backend = fl.backend(name, artifact_dir=tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    start = model.weight.detach().clone()
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch):
        x, y = parts(batch)
        loss = (compiled(x) - y).square().mean()
        loss.backward()
        with torch.no_grad():
            model.weight.sub_(0.1 * model.weight.grad)
        model.zero_grad()
        return loss

    xs, ys = torch.randn(5, 4, 3), torch.randn(5, 4, 1)
    inputs = [make(x.numpy(), y.numpy()) if arrays else make(x, y) for x, y in zip(xs, ys, strict=True)]
    losses = []
    for batch in fl.utils.data.DataExecutor(inputs):
        assert type(batch) is type(inputs[0]) and all(isinstance(part, torch.Tensor) for part in parts(batch))
        losses.append(float(step(batch)))
    assert len(traced) <= (2 if name == "CSX" else 0)  # once, and once more for verification
    weight, bias = start.clone().requires_grad_(), model.bias.detach().clone()
    for x, y, loss in zip(xs, ys, losses, strict=True):
        expected = (x @ weight.T + bias - y).square().mean()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)  # float32, another order of sums
        (gradient,) = torch.autograd.grad(expected, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()


def test_changes_of_a_dataclass_batch_are_kept(backend):
    """As in eager PyTorch: attributes set and lists extended in the step are there after each call; shared objects stay
    one."""

    @fl.trace
    def step(batch, other):
        batch.y = batch.x * 2
        batch.note = "seen"
        return other.y + 1

    for value in (1.0, 2.0, 3.0):
        batch = Inner(None)
        batch.x = torch.tensor(value)
        out = step(batch, batch)
        assert float(out) == value * 2 + 1 and float(batch.y) == value * 2 and batch.note == "seen"


def test_nonnumeric_arrays_are_unchanged():
    fl.backend("CPU")
    words = np.array(["a", "b"])
    (batch,) = fl.utils.data.DataExecutor([{"words": words, "x": np.ones(2, np.float32)}])
    assert batch["words"] is words and torch.equal(batch["x"], torch.ones(2))


def test_a_dataclass_without_tensors_is_not_a_batch(backend):
    """It is a constant of the step."""
    config = Inner(3.0)
    step = fl.trace(lambda x, config: x * config.y)
    assert float(step(torch.tensor(2.0), config)) == 6
    for config.y in (4.0, 5.0, 6.0):
        assert float(step(torch.tensor(2.0), config)) == 2 * config.y
    assert compilations(step) == 2


@pytest.mark.parametrize("seed", [0, 99], ids=["the same seed", "another seed"])
def test_a_resumed_loader_leaves_the_steps_random_numbers_alone(seed, tmp_path):
    """It restores the position of PyTorch's generator, even in a process with another seed."""

    def batches():
        data = torch.arange(24.0).view(12, 2)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 2, shuffle=True)

    def train(loader, steps, position=None):
        drawn_numbers = []
        for number, (x,) in enumerate(fl.utils.data.DataExecutor(loader, num_steps=steps), 1):
            drawn_numbers.append(step(x))
            if position is not None and number == 4:
                position += [loader.state_dict(), backend.state_dict()]
        return [drawn.tolist() for drawn in drawn_numbers]

    @fl.trace
    def step(x):
        return x + torch.rand(2)

    backend = fl.backend("XLA", artifact_dir=tmp_path)
    torch.manual_seed(0)
    position = []
    whole = train(fl.utils.data.DataLoader(batches), 9, position)
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    torch.manual_seed(seed)
    backend.load_state_dict(position[1])
    again = fl.utils.data.DataLoader(batches)
    again.load_state_dict(position[0])
    assert train(again, 5) == whole[4:]
