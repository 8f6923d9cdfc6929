"""Processes that join a cluster, each in torchrun's environment."""

import os
import socket
import time
from subprocess import PIPE

import pytest

import firstloss as fl
from firstloss.errors import BackendError
from tests import forked


def start(what, ranks, count=2, folder=""):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = os.path.join(os.path.dirname(__file__), "initialize_ranks.py")
    command = [script, str(port), str(count)]
    return [forked.start([*command, str(rank), what, str(folder)], stdout=PIPE, stderr=PIPE) for rank in ranks]


def results(processes):
    outputs = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, out.strip(), err) for process, (out, err) in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_join(count):
    for status, out, err in results(start("nothing", range(count), count)):
        assert status == 0 and out == f"joined {count}", err[-3000:]


def test_different_versions_are_an_error_in_all_processes():
    for status, out, err in results(start("other version", range(2))):
        assert status == 1 and not out
        assert "the processes run different versions: process 0 has firstloss" in err
        assert "but process 1 has firstloss 9, jax 9. Install the same versions for all of them." in err


def test_a_process_that_never_joins_is_reported():
    ((status, out, err),) = results(start("late", [0]))
    assert status != 0 and not out
    assert "process 0 of 2 (torchrun) has waited 3 s for the others at localhost:" in err, err[-3000:]


def test_a_process_that_dies_ends_the_others():
    begin = time.monotonic()
    (status, _, err), (other, _, _) = results(start("dies", range(2)))
    assert other == 3 and status not in (0, 3), err[-3000:]
    assert time.monotonic() - begin < 100  # it would sleep for 120 s


# -- in training ------------------------------------------------------------------------------------------------------


OTHERS = {
    "other shapes": "other operations, shapes or numbers in it",
    "other numbers": "other operations, shapes or numbers in it",
    "other step": "evaluation",
}


@pytest.mark.parametrize("what", OTHERS)
def test_different_programs_are_an_error_in_all_processes(what, tmp_path):
    words = f"process 0 has reached the step training, and process 1 has {OTHERS[what]}"

    for status, out, err in results(start(what, range(2), folder=tmp_path)):
        assert status not in (0, None) and "loss" not in out
        assert "BackendError" in err and words in err, err[-3000:]


def test_a_late_process_is_waited_for_with_a_message(tmp_path):
    (status, out, err), (other, others_out, _) = results(start("is late", range(2), folder=tmp_path))
    assert (status, other) == (0, 0), err[-3000:]
    assert [line for line in out.splitlines() if "loss" in line] == [
        line for line in others_out.splitlines() if "loss" in line
    ]
    assert "firstloss: process 0 of 2 has waited 1 s for training" in err


# JAX's message about process 1.
GONE = ("tasks are unhealthy (stopped sending heartbeats):\n1\n", "Task 1 heartbeat timeout")


@pytest.mark.parametrize("count", [2, 4])
def test_a_process_that_dies_in_training_is_an_error_in_the_others(count, tmp_path):
    begin = time.monotonic()
    processes = results(start("dies in training", range(count), count, folder=tmp_path))
    for number, (status, out, err) in enumerate(processes):
        assert "loss 2" in out
        if number == 1:
            assert status == 3
        else:
            assert status not in (0, None)
            # A process that has computed with it is told by Firstloss; otherwise by JAX, whichever is earlier.
            message = f"ProcessLostError: process {number} of {count}: another process has ended or can no longer be"
            assert any(words in err for words in (message, *GONE)), err[-3000:]
    assert time.monotonic() - begin < 100  # everything before takes about 10 s; 1,000 steps would take longer


def test_a_process_that_hangs_in_training_ends_the_others(tmp_path):
    first, second = start("hangs in training", range(2), folder=tmp_path)
    try:
        out, err = first.communicate(timeout=100)
        assert first.returncode not in (0, None) and "loss 2" in out
        assert any(words in err for words in GONE), err[-3000:]
    finally:
        os.kill(second.pid, 9)
        second.communicate()


def test_without_a_launcher_nothing_is_done(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert fl.distributed.initialize() == 1
    with pytest.raises(BackendError, match="takes the coordinator, the count and the index together, or none"):
        fl.distributed.initialize("localhost:1234", 2)
