"""Two processes save together, each half of every tensor, and one of them is killed, at any system call. The last
complete checkpoint loads, and the next save is complete and leaves nothing else behind.

The kills are done by a separate process without threads: `python test_killed_together.py FOLDER`.
"""

import mmap
import os
import signal
import struct
import sys
import time

import pytest
import torch

import firstloss as fl
from firstloss.runtime.checkpoint import checkpoint, sources
from firstloss.runtime.checkpoint.file import TensorPart
from tests import forked

SIZES = [10, 30_000]


def content(number):
    return {"number": number, "tensors": [torch.full((n,), float(number)) for n in SIZES]}


def number_of(path):
    """The number of the checkpoint at `path`, after reading all of it."""
    state = fl.load(path)
    for tensor, count in zip(state["tensors"], SIZES, strict=True):
        assert torch.equal(tensor, torch.full((count,), float(state["number"])))
    return state["number"]


class Pair:
    """Two processes with a barrier in shared memory; one that waits for a dead one waits until it is killed too, as in
    JAX."""

    count = 2

    def __init__(self, index, shared):
        self.index, self._shared, self._waits = index, shared, 0

    def wait(self, what=""):
        self._waits += 1
        struct.pack_into("i", self._shared, 4 * self.index, self._waits)
        while struct.unpack_from("i", self._shared, 4 * (1 - self.index))[0] < self._waits:
            time.sleep(0.0002)

    def agree(self, text):
        if self.index == 0:
            self._shared[64:128] = text.encode().ljust(64)
        self.wait()
        agreed = self._shared[64:128].decode().strip()
        self.wait()
        return agreed


def halves(name, tensor):
    """Each process has one half."""
    size, half = len(tensor), len(tensor) // 2
    for owner, (begin, end) in enumerate(((0, half), (half, size))):
        read = lambda begin=begin, end=end: tensor[begin:end]  # noqa: E731
        yield sources._Owned(owner, TensorPart(name, tensor.dtype, (size,), (begin,), (end - begin,), read))


def save_in(pair, path, number, moment):
    """In one of the two processes: save, and die at the `moment`th system call."""
    checkpoint.processes = lambda backend=None: pair
    sources._parts = halves
    state, calls, sync = content(number), 0, os.fsync

    def ask(*_):
        nonlocal calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment:
        os.fsync = lambda descriptor: (ask(), sync(descriptor))[1]
        sys.addaudithook(lambda event, _: ask() if event.startswith(("open", "os.", "fcntl")) else None)
    fl.save(state, path)


def save_together(path, number, victim=None, moment=0):
    """Save; if `victim` is one of them, it is killed at that moment. Returns whether it was."""
    shared = mmap.mmap(-1, 4096)
    children = []
    for index in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            save_in(Pair(index, shared), path, number, moment if index == victim else 0)
            os._exit(0)
        finally:
            os._exit(1)
    if victim is None:
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
        return False
    status = os.waitpid(children[victim], 0)[1]
    died = os.WIFSIGNALED(status)
    assert died or status == 0
    if died:
        time.sleep(0.01)  # the other process continues for a while
        os.kill(children[1 - victim], signal.SIGKILL)
    os.waitpid(children[1 - victim], 0)
    return died


def kill_each(folder, victim, new):
    path, number, moment, outcomes = os.path.join(folder, f"of {victim} {new}"), 0, 0, set()
    save_together(path, 0)
    while True:
        moment += 1
        if new and os.path.exists(path):
            os.rename(path, f"{path} {number}")
        died = save_together(path, number + 1, victim, moment)
        if not died:
            break
        present = number_of(path) if os.path.exists(path) else None
        assert present in ((None, number + 1) if new else (number, number + 1)), (moment, present, number)
        outcomes.add(present == number + 1)
        number += 2
        fl.save(content(number), path)  # in one process: without two forks
        assert number_of(path) == number and len(os.listdir(path)) == 2
        assert not any(name.endswith(".part") for name in os.listdir(folder))
    assert number_of(path) == number + 1 and len(os.listdir(path)) == 3  # the index, and two files of tensors
    # Process 0 opens, renames and removes; the other one only writes its file.
    assert moment > (20 if victim == 0 else 3) and outcomes >= ({True, False} if victim == 0 else {False}), moment
    print(f"process {victim} of 2, {'a new folder' if new else 'in place'}: killed at {moment - 1} moments")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes by fork")
def test_the_last_complete_checkpoint_loads_whichever_process_dies(tmp_path):
    forked.run([__file__, str(tmp_path)], check=True, timeout=250)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for which in range(2):
        for new in (False, True):
            kill_each(sys.argv[1], which, new)
