"""malloc maps arrays separately, unless the user has configured it otherwise."""

import ctypes
import mmap
import os
import subprocess
import sys

import pytest

from firstloss import malloc_settings

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc"
)

# The number of bytes mapped separately for 5 MiB after freeing 16 MiB, which makes glibc serve such sizes from its
# heaps.
PROGRAM = """
import ctypes, sys
from firstloss import malloc_settings

class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd usm fsm uord ford keep".split()]

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes, library.mallinfo2.restype = [ctypes.c_void_p], Info
library.free(library.malloc(16 << 20))
made = malloc_settings.map_arrays() if "map" in sys.argv else None
before = library.mallinfo2().hblkhd
library.malloc(5 << 20)
print(made, library.mallinfo2().hblkhd - before)
"""


def mapped(*arguments, program=PROGRAM, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    is_mapped, count = done.stdout.split()
    return is_mapped, int(count)


def test_arrays_are_mapped_separately():
    assert mapped() == ("None", 0)
    is_mapped, count = mapped("map")
    assert is_mapped == "True" and count >= 5 << 20


FREED = """
import resource, sys
import ctypes
from firstloss import malloc_settings

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
if "map" in sys.argv:
    malloc_settings.map_arrays()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    memory = library.malloc(2 << 20)
    ctypes.memset(memory, 1, 2 << 20)
    library.free(memory)
print(None, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_scratch_memory_is_kept_for_the_next_request():
    """Requested eight times, 2 MiB are touched for the first time only once."""
    _, faults = mapped("map", program=FREED)
    assert faults < 1.5 * (2 << 20) / mmap.PAGESIZE


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_MMAP_THRESHOLD_": "33554432"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432"},
    ],
    ids=["MALLOC_", "GLIBC_TUNABLES"],
)
def test_the_users_settings_are_kept(environment):
    assert mapped("map", **environment) == ("False", 0)


def test_huge_pages_work_with_the_settings():
    is_mapped, count = mapped("map", GLIBC_TUNABLES=malloc_settings.environment()["GLIBC_TUNABLES"])
    assert is_mapped == "True" and count >= 5 << 20
