"""Processes that join, each in the environment that torchrun gives it."""

import os
import socket
import time
from subprocess import PIPE

import pytest

import firstloss as fl
from firstloss.errors import BackendError
from tests import forked


def start(what, ranks, count=2):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = os.path.join(os.path.dirname(__file__), "joining.py")
    command = [script, str(port), str(count)]
    return [forked.start([*command, str(rank), what], stdout=PIPE, stderr=PIPE) for rank in ranks]


def results(processes):
    found = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, out.strip(), err) for process, (out, err) in zip(processes, found, strict=True)]


@pytest.mark.parametrize("count", [2, 4])
def test_all_come(count):
    for status, out, err in results(start("nothing", range(count), count)):
        assert status == 0 and out == f"joined {count}", err[-3000:]


def test_other_versions_are_an_error_in_all():
    for status, out, err in results(start("other version", range(2))):
        assert status == 1 and not out
        assert "the processes run other versions: process 0 has firstloss" in err
        assert "and process 1 firstloss 9, jax 9. Install the same in all of them." in err


def test_one_that_never_comes():
    ((status, out, err),) = results(start("late", [0]))
    assert status != 0 and not out
    assert "process 0 of 2 (torchrun) has waited 3 s for the others at localhost:" in err, err[-3000:]


def test_one_that_dies_ends_the_others():
    begin = time.monotonic()
    (status, _, err), (other, _, _) = results(start("dies", range(2)))
    assert other == 3 and status not in (0, 3), err[-3000:]
    assert time.monotonic() - begin < 100  # it would sleep for 120 s


def test_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert fl.distributed.initialize() == 1
    with pytest.raises(BackendError, match="takes the coordinator, the count and the index, or none"):
        fl.distributed.initialize("localhost:1234", 2)
