"""Data loaders and the loop over their batches."""

import gc
import multiprocessing
import random
import traceback
import warnings

import jax
import numpy as np
import pytest
import torch
from torch.utils import data

import firstloss as fl
from firstloss.capture.recorder import DeferredTensor
from firstloss.utils.data import DataExecutor, DataLoader

LoaderError = fl.errors.LoaderError


@pytest.fixture(autouse=True)
def backend():
    return fl.backend("CPU")


class Noisy(data.Dataset):
    """Its samples draw from all three global generators, like augmentations."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()).item(), random.random(), np.random.rand(), random.gauss(0, 1)])


def shuffled(**options):
    return data.DataLoader(Noisy(), batch_size=3, shuffle=True, **options)


def test_workers_are_forked_without_warnings():
    """JAX warns of each fork, in case the child uses JAX; a loader forks workers in each epoch."""
    jax.devices()
    loader = shuffled(num_workers=1)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        list(DataExecutor(loader)), list(DataExecutor(loader))
        assert not [w for w in record if "fork" in str(w.message)]
        list(loader)
    assert [w for w in record if "fork" in str(w.message)]  # otherwise there is no warning to suppress any more


def seeded(seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def rows(batches):
    return [batch.tolist() for batch in batches]


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_without_num_steps_it_is_one_epoch():
    executor = DataExecutor([1, 2, 3])
    assert list(executor) == [1, 2, 3] and len(executor) == 3
    assert list(executor) == [1, 2, 3]


def test_a_finite_loader_is_restarted():
    assert list(DataExecutor([1, 2, 3], num_steps=7)) == [1, 2, 3, 1, 2, 3, 1]
    assert list(DataExecutor([1, 2, 3], num_steps=2)) == [1, 2]


def test_no_more_batches_are_read_than_steps_are_run():
    read = []

    def endless():
        while True:
            read.append(1)
            yield len(read)

    fl.backend("CPU")
    step = fl.trace(lambda x: x)
    for x in DataExecutor(DataLoader(endless), num_steps=4):
        step(x)
    assert len(read) == 4


def test_input_fn_is_called_when_a_batch_is_needed_and_for_each_epoch_of_an_iterator():
    calls = []

    def input_fn(count, begin=0):
        calls.append(1)
        yield from range(begin, begin + count)

    def make(*args, **kwargs):
        calls.append(0)
        return input_fn(*args, **kwargs)

    loader = DataLoader(make, 2, begin=5)
    assert not calls
    assert list(DataExecutor(loader, num_steps=5)) == [5, 6, 5, 6, 5]
    assert calls == [0, 1] * 3


def test_each_epoch_shuffles_as_in_eager():
    seeded()
    loader = shuffled()
    expected = rows(b for _ in range(2) for b in loader)
    seeded()
    assert rows(DataExecutor(DataLoader(shuffled), num_steps=8)) == expected


def test_samplers_are_told_the_epoch():
    class Sampler(data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    epochs = []
    loader = data.DataLoader(range(4), batch_size=2, sampler=Sampler(range(4)))
    list(DataExecutor(loader, num_steps=5))
    assert epochs == [0, 1, 2]


def test_worker_processes_give_the_same_batches():
    seeded()
    expected = rows(shuffled(num_workers=2))
    seeded()
    assert rows(DataExecutor(DataLoader(shuffled, num_workers=2))) == expected


class Noise(data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.randn(1)


@pytest.mark.parametrize("epoch", [0, 1])
def test_workers_that_are_kept_are_seeded_once(epoch, recwarn):
    """So the random numbers of a later epoch cannot be reproduced, and a warning says so."""

    def loader():
        seeded()
        return DataLoader(lambda: data.DataLoader(Noise(), batch_size=1, num_workers=1, persistent_workers=True))

    whole = loader()
    for _ in range(epoch + 1):
        expected, position = [], None
        for batch in whole:
            expected.append(batch.item())
            position = position or whole.state_dict()
    again = loader()
    again.load_state_dict(position)
    numbers = [batch.item() for batch in again]
    warned = ["persistent_workers=False" in str(warning.message) for warning in recwarn]
    assert (numbers != expected[1:]) == any(warned) == (epoch > 0)


@pytest.mark.parametrize("batches_of", [iter, DataExecutor], ids=["loader", "executor"])
@pytest.mark.parametrize("kept", [False, True])
def test_workers_end_with_the_last_reference_to_their_loop(batches_of, kept, monkeypatch):
    """They do not wait for the garbage collector, in which torch would wait 5 s for each."""

    def part_of_an_epoch():
        loader = DataLoader(lambda: data.DataLoader(Noise(), batch_size=1, num_workers=1, persistent_workers=kept))
        for _ in batches_of(loader):
            break
        return loader.state_dict()

    started = []
    start = multiprocessing.Process.start
    monkeypatch.setattr(multiprocessing.Process, "start", lambda worker: (started.append(worker), start(worker)))
    gc.disable()
    try:
        assert part_of_an_epoch()["batch"] == 1
        DataLoader(list)  # the last one created is referred to as such
        assert [worker.exitcode for worker in started] == [0]
    finally:
        gc.enable()


# -- errors ------------------------------------------------------------------------------------------------------------


def failing(at):
    for i in range(10):
        if i == at:
            raise KeyError("no such file")
        yield i


def test_a_loader_that_fails_is_named_with_the_batch():
    actual = []
    with pytest.raises(LoaderError, match="failing.*batch 3 of epoch 0.*KeyError: 'no such file'") as caught:
        for batch in DataExecutor(DataLoader(failing, 3), num_steps=20):
            actual.append(batch)
    assert actual == [0, 1, 2]
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_worker_that_fails_is_named_too():
    class Broken(Noisy):
        def __getitem__(self, i):
            raise OSError("disk")

    with pytest.raises(LoaderError, match="batch 0 of epoch 0.*disk") as caught:
        list(DataExecutor(data.DataLoader(Broken(), num_workers=1)))
    # PyTorch's frame, which refers to the worker, and its error refer to each other.
    traceback.clear_frames(caught.value.__cause__.__traceback__)


def test_an_error_of_the_input_function_is_raised():
    def missing():
        raise FileNotFoundError("train.bin")

    with pytest.raises(LoaderError, match="missing.*FileNotFoundError: train.bin"):
        list(DataExecutor(DataLoader(missing), num_steps=1))


def test_an_exhausted_iterator_is_an_error():
    with pytest.raises(LoaderError, match="ended after 3 batches"):
        list(DataExecutor(iter([1, 2, 3]), num_steps=5))
    once = iter([1, 2])
    with pytest.raises(LoaderError, match="ended after 2 batches.*at each call"):
        list(DataExecutor(DataLoader(lambda: once), num_steps=5))


def test_a_loader_without_batches_is_an_error():
    with pytest.raises(LoaderError, match="no batch in epoch 0"):
        list(DataExecutor([], num_steps=1))
    assert list(DataExecutor([])) == []


@pytest.mark.parametrize("what", [3, [1, 2]])
def test_invalid_input_functions_and_loaders_are_refused(what):
    with pytest.raises(LoaderError, match="function"):
        DataLoader(what)
    with pytest.raises(LoaderError, match="is not iterable"):
        list(DataLoader(lambda: 3))


@pytest.mark.parametrize("numbers", [{"num_steps": 0}, {"num_steps": 1.5}, {"checkpoint_steps": -1},
                                     {"activation_steps": 0}, {"num_steps": True}])  # fmt: skip
def test_invalid_numbers_of_steps_are_refused(numbers):
    with pytest.raises(fl.errors.ExecutorError, match=next(iter(numbers))):
        DataExecutor([1], **numbers)


# -- restart -----------------------------------------------------------------------------------------------------------


def resumed(state, steps, make=shuffled, **options):
    """Simulates a new process for loaders: other seeds, another loader, and the position from a checkpoint."""
    seeded(99)
    loader = DataLoader(make, **options)
    loader.load_state_dict(state)
    return rows(DataExecutor(loader, num_steps=steps))


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_restarted_loader_continues_exactly(stop, ahead, own):
    def make():
        return shuffled(generator=torch.Generator().manual_seed(5) if own else None)

    seeded()
    loader = DataLoader(make)
    executor = DataExecutor(loader, num_steps=12)
    actual, state = [], loader.state_dict()
    for step, batch in enumerate(executor, 1):
        actual.append(batch)
        if step == stop:
            if ahead:
                executor._reader.read_ahead()
            state = loader.state_dict()
    assert resumed(state, 12 - stop, make) == rows(actual[stop:]) or stop == 0
    assert state["batch"] == stop % 4 or stop in (4, 8)


def test_after_a_whole_epoch_the_next_one_follows():
    loader = DataLoader(lambda: [1, 2, 3])
    assert list(DataExecutor(loader)) == [1, 2, 3]
    again = DataLoader(lambda: [1, 2, 3])
    again.load_state_dict(loader.state_dict())
    assert again.state_dict()["epoch"] == 1
    assert list(DataExecutor(again)) == [1, 2, 3]


class Stateful:
    """A loader that knows its own position."""

    def __init__(self):
        self.at = 0
        self.read = []

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            self.read.append(self.at)
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_loader_with_a_position_of_its_own_is_not_read_from_its_beginning():
    loader = DataLoader(Stateful)
    executor = DataExecutor(loader, num_steps=4)
    for step, _ in enumerate(executor, 1):
        if step == 3:
            executor._reader.read_ahead()
            state = loader.state_dict()
    again = DataLoader(Stateful)
    again.load_state_dict(state)
    assert list(DataExecutor(again, num_steps=4)) == [4, 5, 1, 2]
    assert again.loader.read == [4, 5, 1, 2]


def test_another_loaders_position_is_refused():
    with pytest.raises(LoaderError, match="not the state of a DataLoader"):
        DataLoader(list).load_state_dict({"model": 1})


# -- on a backend ------------------------------------------------------------------------------------------------------


def test_batches_arrive_on_the_device_in_memory_of_their_own(tmp_path):
    fl.backend("XLA", artifact_dir=tmp_path)
    memory = torch.zeros(2)

    def reuses():
        for i in range(3):
            yield {"x": [memory.fill_(i)], "name": "a"}

    sums = []
    step = fl.trace(lambda batch: batch["x"][0].sum())
    for batch in DataExecutor(DataLoader(reuses)):
        assert type(batch["x"][0]) is DeferredTensor and batch["name"] == "a"
        assert torch.equal(batch["x"][0].clone(), torch.full((2,), float(len(sums))))
        sums.append(step(batch))
    assert [s.item() for s in sums] == [0.0, 2.0, 4.0]


def test_the_next_batch_is_read_while_the_device_works(tmp_path):
    fl.backend("XLA", artifact_dir=tmp_path)
    order = []

    def reads():
        for i in range(3):
            order.append(f"read {i}")
            yield torch.full((2,), float(i))

    step = fl.trace(lambda x: x.sum())
    for i, x in enumerate(DataExecutor(DataLoader(reads), num_steps=3)):
        order.append(f"step {i}")
        step(x)
        order.append(f"stepped {i}")
    assert order == ["read 0", "step 0", "read 1", "stepped 0", "step 1", "read 2", "stepped 1", "step 2", "stepped 2"]


def test_an_executor_uses_the_last_loader():
    DataLoader(lambda: [7, 8])
    assert list(DataExecutor(num_steps=3)) == [7, 8, 7]


def test_batches_of_a_tokenizer_keep_their_type(tmp_path):
    from transformers import BatchEncoding

    fl.backend("XLA", artifact_dir=tmp_path)
    step = fl.trace(lambda batch: batch.input_ids.sum() + batch["mask"].sum())
    loader = [BatchEncoding({"input_ids": torch.full((2,), i), "mask": torch.ones(2)}) for i in range(3)]
    seen = []
    for batch in DataExecutor(loader):
        assert type(batch) is BatchEncoding
        seen.append(step(batch))
    assert [value.item() for value in seen] == [2.0, 4.0, 6.0]
