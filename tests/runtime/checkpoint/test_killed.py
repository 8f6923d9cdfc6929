"""If a process is killed at any moment, the last complete checkpoint loads.

The kills are done by a separate process that has imported what its children need and started no threads, so that they
start within milliseconds: `python test_killed.py FOLDER`.
"""

import os
import random
import signal
import sys
import time

import pytest
import torch

import firstloss as fl
from tests import forked

KILLS = 60
SIZES = [10, 300_000, 20_000]


def content(number):
    """A checkpoint in which every value identifies the checkpoint."""
    return {"number": number, "tensors": [torch.full((n,), float(number)) for n in SIZES]}


def number_of(path):
    """The number of the checkpoint at `path`, after reading all of it."""
    state = fl.load(path)
    number = state["number"]
    for tensor, count in zip(state["tensors"], SIZES, strict=True):
        assert torch.equal(tensor, torch.full((count,), float(number))), (number, count)
    return number


def killed(work, delay):
    """Run `work(tell)` in a child, and kill it `delay` seconds after it first told something; returns what it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            work(lambda number: os.write(writer, number.to_bytes(4, "little")))
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        numbers = [int.from_bytes(pipe.read(4), "little")]
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status)
        rest = pipe.read()
    return numbers + [int.from_bytes(rest[i : i + 4], "little") for i in range(0, len(rest), 4)]


def kill_savers(path, chance):
    """Kill processes that save to one folder, repeatedly, until enough of them were killed during a save."""
    last, kills, amid = 0, 0, 0
    fl.save(content(0), path)
    while kills < KILLS or amid < KILLS // 4:
        kills += 1

        def work(tell, first=last):
            tell(first)
            for number in range(first + 1, first + 10_000):
                fl.save(content(number), path)
                tell(number)

        numbers = killed(work, chance.random() * 0.03)
        amid += len(os.listdir(path)) > 2
        last = number_of(path)
        assert last in (
            numbers[-1],
            numbers[-1] + 1,
        )  # the one that was told, or one killed between the rename and telling
    fl.save(content(1), path)
    assert len(os.listdir(path)) == 2  # temporary files of killed processes have been removed


def kill_first_savers(folder, chance):
    """Kill processes that save to new folders, until some were killed before the checkpoint was complete, and some
    after."""
    path, number, outcomes = os.path.join(folder, "new"), 0, []
    while number < 20 or len(set(outcomes)) < 2:
        number += 1

        def work(tell, number=number):
            tell(number)
            fl.save(content(number), path)
            time.sleep(60)

        killed(work, chance.random() * 0.02)
        outcomes.append(os.path.exists(path))
        if outcomes[-1]:
            assert number_of(path) == number
            os.rename(path, f"{path}{number}")
    fl.save(content(1), path)
    assert not any(name.endswith(".part") for name in os.listdir(folder))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes by fork")
def test_the_last_complete_checkpoint_loads(tmp_path):
    forked.run([__file__, str(tmp_path)], check=True, timeout=250)


def test_two_processes_do_not_write_concurrently(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    fl.save({}, tmp_path / "it")
    descriptor = os.open(tmp_path / "it", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(fl.errors.SaveError, match="being written by another process"):
        fl.save({"x": 1}, tmp_path / "it")
    os.close(descriptor)
    assert fl.load(tmp_path / "it") == {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_savers(os.path.join(sys.argv[1], "it"), random.Random(0))
    kill_first_savers(sys.argv[1], random.Random(1))
