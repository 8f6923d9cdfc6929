"""The pool of XLA's scratch memory; each test in a process of its own, which begins without one."""

import os
import sys
import textwrap

import pytest

from firstloss.runtime.device import scratch_pool
from tests import forked

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not scratch_pool.IS_AVAILABLE,
    reason="the pool is not built (python setup.py build_ext --inplace), or not for this system",
)

MIB = 1 << 20
BEGIN = f"""
import resource, time
import jax, numpy as np, torch
from firstloss.runtime.device import scratch_pool
MIB = {MIB}
def array(mib, value=0):
    return jax.numpy.full(mib * MIB // 4, value, np.int32).block_until_ready()
"""


def run(program, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = forked.run(
        ["-c", BEGIN + textwrap.dedent(program)], env={**clean, **environment}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_a_freed_block_is_used_again():
    assert run(
        """
        assert scratch_pool.use() and scratch_pool.use()
        first = array(40)
        place = first.unsafe_buffer_pointer()
        del first
        print(scratch_pool.pooled_bytes() // MIB)
        second = array(39)  # at most an eighth smaller
        assert second.unsafe_buffer_pointer() == place
        print(scratch_pool.pooled_bytes())
        third = array(20)
        del second
        fourth = array(20)
        assert fourth.unsafe_buffer_pointer() not in (place, third.unsafe_buffer_pointer())
        del third
        scratch_pool.empty()
        print(scratch_pool.pooled_bytes())
        """
    ) == ["40", "0", "0"]


@pytest.mark.parametrize("kind, rounds", [("jax", 3), ("torch", 12)])
def test_arrays_keep_their_contents_and_the_peak_does_not_rise(kind, rounds):
    """Arrays of random sizes are made and dropped; pool and arrays together are never more than arrays once were.

    Also not when a block is used again that has been given back to the system in part.
    """
    run(
        f"""
        assert scratch_pool.use()
        def make(mib, value):
            if {kind!r} == "jax":
                return array(mib, value)
            return torch.full((mib * MIB // 4,), value, dtype=torch.int32)
        for seed in range({rounds}):
            kept, arrays, most = None, [], 0
            scratch_pool.empty()
            numbers = np.random.default_rng(seed)
            for i in range(300):
                if arrays and numbers.random() < 0.5:
                    kept, value = arrays.pop(numbers.integers(len(arrays)))
                    assert (np.asarray(kept) == value).all()
                    del kept
                else:
                    arrays.append((make(int(numbers.integers(3, 24)), i), i))
                live = sum(a.nbytes for a, _ in arrays if a.nbytes >= 4 * MIB)
                most = max(most, live)
                # a block may be an eighth larger than its array; malloc rounds it up to pages
                peak = most * 9 / 8 * 33 / 32 + 8192 * 300
                assert scratch_pool.pooled_bytes() + live <= peak, (seed, i)
            for kept, value in arrays:
                assert (np.asarray(kept) == value).all()
        """
    )


def test_what_is_in_use_or_in_the_pool_for_long_is_not_kept():
    assert run(
        """
        scratch_pool._LONGEST_USE = scratch_pool._LONGEST_REST = 1
        assert scratch_pool.use()
        old = array(20)
        time.sleep(2.1)
        new = array(10)
        del old, new
        print(scratch_pool.pooled_bytes() // MIB)
        time.sleep(2.1)
        other = array(30)  # for which the pool has no block
        print(scratch_pool.pooled_bytes())
        """
    ) == ["10", "0"]


def test_a_block_that_was_freed_in_another_way_is_forgotten():
    """As by code that was compiled into XLA's library with an allocator of its own."""
    run(
        """
        import ctypes
        assert scratch_pool.use()
        malloc = ctypes.CDLL(None)
        malloc.malloc.restype, malloc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        malloc.free.argtypes = [ctypes.c_void_p]
        for size in (5, 9, 17, 33):
            malloc.free(malloc.malloc(size * MIB))  # malloc's own are not in the pool
        assert scratch_pool.pooled_bytes() == 0
        """
    )


STEPS = """
import tempfile
import firstloss as fl
backend = fl.backend("XLA", artifact_dir=tempfile.mkdtemp(), first_loss="compiled")
with backend.device:
    model = torch.nn.Linear(1 << 11, 1 << 11)
called, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), 0.1)
@fl.trace
def step(x):
    loss = (called(x).sort(-1)[0].cumsum(-1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
x = torch.randn(1 << 12, 1 << 11)
for _ in range(3):
    step(x).item()
    model.bias.detach().cpu()  # waits for the whole step, whose memory the next one is to get
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step(x).item()
    model.bias.detach().cpu()  # waits for the whole step, whose memory the next one is to get
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(50):  # the end of a step may be later than its loss
    if scratch_pool.pooled_bytes() >= 32 * MIB:
        break
    time.sleep(0.1)
print(faults, scratch_pool.pooled_bytes() // MIB)
"""


def test_steps_get_the_scratch_memory_of_those_before():
    faults, pooled = map(int, run(STEPS))
    others, none = map(int, run(STEPS, MALLOC_MMAP_THRESHOLD_=str(4 * MIB)))  # who configures malloc has no pool
    assert pooled >= 32 and none == 0
    assert faults < others / 4


def test_tensors_of_pytorch_are_pooled_and_keep_their_contents():
    assert run(
        """
        assert scratch_pool.use()
        first = torch.full((5 * MIB,), 1.0)
        place, alias = first.data_ptr(), first.numpy()
        del first
        second = torch.full((5 * MIB,), 2.0)
        assert second.data_ptr() != place and (alias == 1).all()
        del alias
        print(scratch_pool.pooled_bytes() // MIB)
        third = torch.full((5 * MIB,), 3.0)
        print(third.data_ptr() == place, bool((second == 2).all()))
        """
    ) == ["20", "True", "True"]


def test_a_forked_process_may_free_and_allocate():
    run(
        """
        import os, threading
        assert scratch_pool.use()
        array(20)
        stop = False
        def work():
            while not stop:
                array(20)
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(20):
            child = os.fork()
            if not child:
                scratch_pool.empty()  # takes the lock, which the other thread may have held
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop = True
        thread.join()
        """,
        PYTHONWARNINGS="ignore",
    )
