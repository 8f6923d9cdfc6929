"""Processes that join a cluster, each in torchrun's environment."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE
from typing import NamedTuple

import pytest

import firstloss as fl
from firstloss.errors import BackendError
from tests import forked

AT_ONCE = 3
_starting = threading.Lock()


class Group(NamedTuple):
    """Processes that are started together; `what` they do is in initialize_ranks.py."""

    what: str
    count: int = 2
    started: int = 2


class Outcome(NamedTuple):
    """Each process's exit status, output and errors, and how long all of it took."""

    processes: list
    seconds: float


def start(what, count, started, folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = os.path.join(os.path.dirname(__file__), "initialize_ranks.py")
    command = [script, str(port), str(count)]
    with _starting:
        ranks = range(started)
        return [forked.start([*command, str(rank), what, str(folder)], stdout=PIPE, stderr=PIPE) for rank in ranks]


def run(group, folder):
    begin = time.monotonic()
    processes = start(*group, folder)
    awaited = processes[:1] if group.what == "hangs in training" else processes
    try:
        outputs = [process.communicate(timeout=200) for process in awaited]
    finally:
        for process in processes:
            process.kill()
    for process in processes[len(awaited) :]:  # the one that hangs
        process.communicate()
    ends = [(process.returncode, out.strip(), err) for process, (out, err) in zip(awaited, outputs, strict=True)]
    return Outcome(ends, time.monotonic() - begin)


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """What the tests that are to run need, some groups at a time: most of the time their processes wait."""
    tests = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    groups = dict.fromkeys(item.callspec.params["group"] for item in tests)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {group: pool.submit(run, group, tmp_path_factory.mktemp("group")) for group in groups}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def group(request, running):
    return running[request.param].result()


def of(*groups):
    return pytest.mark.parametrize("group", groups, indirect=True, ids=lambda group: f"{group.what}-{group.count}")


@of(Group("nothing"), Group("nothing", 4, 4))
def test_processes_join(group):
    for status, out, err in group.processes:
        assert status == 0 and out == f"joined {len(group.processes)}", err[-3000:]


@of(Group("other version"))
def test_different_versions_are_an_error_in_all_processes(group):
    for status, out, err in group.processes:
        assert status == 1 and not out
        assert "the processes run different versions: process 0 has firstloss" in err
        assert "but process 1 has firstloss 9, jax 9. Install the same versions for all of them." in err


@of(Group("late", started=1))
def test_a_process_that_never_joins_is_reported(group):
    ((status, out, err),) = group.processes
    assert status != 0 and not out
    assert "process 0 of 2 (torchrun) has waited 3 s for the others at localhost:" in err, err[-3000:]


@of(Group("dies"))
def test_a_process_that_dies_ends_the_others(group):
    (status, _, err), (other, _, _) = group.processes
    assert other == 3 and status not in (0, 3), err[-3000:]
    assert group.seconds < 100  # it would sleep for 120 s


# -- in training ------------------------------------------------------------------------------------------------------


OTHERS = {
    "other shapes": "other operations, shapes or numbers in it",
    "other numbers": "other operations, shapes or numbers in it",
    "other step": "evaluation",
}


@pytest.mark.parametrize(
    "group, other", [(Group(what), other) for what, other in OTHERS.items()], indirect=["group"], ids=OTHERS
)
def test_different_programs_are_an_error_in_all_processes(group, other):
    words = f"process 0 has reached the step training, and process 1 has {other}"

    for status, out, err in group.processes:
        assert status not in (0, None) and "loss" not in out
        assert "BackendError" in err and words in err, err[-3000:]


@of(Group("is late"))
def test_a_late_process_is_waited_for_with_a_message(group):
    (status, out, err), (other, others_out, _) = group.processes
    assert (status, other) == (0, 0), err[-3000:]
    assert [line for line in out.splitlines() if "loss" in line] == [
        line for line in others_out.splitlines() if "loss" in line
    ]
    assert "firstloss: process 0 of 2 has waited 1 s for training" in err


# JAX's message about process 1.
GONE = ("tasks are unhealthy (stopped sending heartbeats):\n1\n", "Task 1 heartbeat timeout")


@of(Group("dies in training"), Group("dies in training", 4, 4))
def test_a_process_that_dies_in_training_is_an_error_in_the_others(group):
    count = len(group.processes)
    for number, (status, out, err) in enumerate(group.processes):
        assert "loss 2" in out
        if number == 1:
            assert status == 3
        else:
            assert status not in (0, None)
            # A process that has computed with it is told by Firstloss; otherwise by JAX, whichever is earlier.
            message = f"ProcessLostError: process {number} of {count}: another process has ended or can no longer be"
            assert any(words in err for words in (message, *GONE)), err[-3000:]
    assert group.seconds < 100  # everything before takes about 10 s; 1,000 steps would take longer


@of(Group("hangs in training"))
def test_a_process_that_hangs_in_training_ends_the_others(group):
    ((status, out, err),) = group.processes
    assert status not in (0, None) and "loss 2" in out
    assert any(words in err for words in GONE), err[-3000:]


def test_without_a_launcher_nothing_is_done(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert fl.distributed.initialize() == 1
    with pytest.raises(BackendError, match="takes the coordinator, the count and the index together, or none"):
        fl.distributed.initialize("localhost:1234", 2)
