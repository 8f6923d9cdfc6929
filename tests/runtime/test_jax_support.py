"""Memory shared by torch and XLA."""

import mmap
import os
import re
import resource
import threading
import time
import weakref

import jax
import pytest
import torch

from firstloss.engine import huge_pages as engine_pages
from firstloss.runtime import jax_support

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_arrays_are_the_same_memory(dtype):
    tensor = torch.arange(-100, 100).to(dtype)
    array = jax_support.share_memory(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert torch.equal(jax_support.to_host(array), tensor)
    transposed = jax_support.share_memory(tensor.view(20, 10).t())
    assert torch.equal(jax_support.to_host(transposed), tensor.view(20, 10).t())


def test_shared_memory_is_released_in_python(monkeypatch):
    """XLA releases it in a thread of its own; if that needs the interpreter's lock at exit, the process aborts."""
    given_back = []

    def watched(tensor):
        array = lent(tensor)
        weakref.finalize(array, lambda: given_back.append(threading.current_thread()))
        return array

    lent = jax_support.as_numpy
    monkeypatch.setattr(jax_support, "as_numpy", watched)
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, y: y @ x / 1e3, x))
    result = long(jax_support.share_memory(torch.randn(256, 256)))  # the array has no other owner here
    assert not given_back
    result.block_until_ready()
    until = time.monotonic() + 60
    while not given_back and time.monotonic() < until:
        long(jax_support.share_memory(torch.randn(2, 2)))  # JAX releases buffers in calls like this one
    assert given_back and set(given_back) == {threading.main_thread()}


def test_weights_are_allocated_in_huge_pages(monkeypatch):
    """Touching it for the first time takes few page faults, not one per 4 KiB."""
    monkeypatch.setattr(engine_pages, "_is_fast", lambda address: True)  # wherever the test runs
    monkeypatch.setattr(engine_pages, "_to_skip", 0)
    if not re.search(r"\[(always|madvise)\]", huge_pages()):
        pytest.skip("this system has no huge pages for who asks")
    array, memory = jax_support.empty((16 << 20,), torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.fill_(1.0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # The parts at both ends are smaller than a huge page, and a system short of huge pages may use a few small ones.
    assert faults < array.nbytes / mmap.PAGESIZE / 4


def huge_pages():
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()
