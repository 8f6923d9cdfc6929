"""When weights are initialized, and in what memory."""

import gc
import threading

import pytest
import torch

import firstloss as fl
from firstloss.runtime.device import placement


@pytest.fixture
def backend(tmp_path):
    for thread in making():  # created by another test, which may have ended before them
        thread.join()
    return fl.backend("XLA", artifact_dir=tmp_path)


def making():
    return [thread for thread in threading.enumerate() if thread.name == "firstloss-materialize"]


def behind(backend, *shape):
    state = fl.deferred_init(torch.zeros, *shape)
    backend.move_to_device([state], behind=True)
    return state


def test_deferred_work_waits_until_started(backend):
    state = behind(backend, 300, 200)
    assert not making() and not state._storage.resident._pending.done()
    placement.start_waiting_materializations()
    assert torch.equal(torch.Tensor(state._storage.resident.read()), torch.zeros(300, 200))


def test_a_read_starts_deferred_work(backend):
    assert torch.equal(behind(backend, 300, 200).cpu(), torch.zeros(300, 200))


def test_unreferenced_weights_are_not_made(backend):
    state = behind(backend, 300, 200)
    pending = state._storage.resident._pending
    started = []
    pending.begin = lambda: started.append(True)
    del state
    gc.collect()
    waiting = len(placement._pending_after_first_loss)
    del pending
    gc.collect()
    placement.start_waiting_materializations()
    assert waiting and not started and not placement._pending_after_first_loss


def test_a_weight_may_have_the_shape_of_its_source(backend):
    """Memory is allocated by shape, all at once; recipes may need more arrays of a shape than there are weights."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            first = torch.randn(300, 200)
            self.a = torch.nn.Parameter(first.clone())
            self.b = torch.nn.Parameter(first.exp() + self.a.detach())
            self.c = torch.nn.Parameter(torch.rand(300, 200))

    torch.manual_seed(0)
    eager = Model()
    torch.manual_seed(0)
    with backend.device:
        model = Model()
    fl.compile(model, backend)
    for name, weight in eager.named_parameters():
        assert torch.equal(getattr(model, name).cpu(), weight), name


def test_the_process_waits_for_the_thread_at_exit():
    """A daemon thread would go on drawing while the interpreter shuts down, and crash the process."""
    gate = threading.Event()
    state = placement._Materialization(lambda: gate.wait(60) and {})
    state.begin()
    assert [thread.daemon for thread in making()] == [False]
    gate.set()
    assert state.result() == {}
