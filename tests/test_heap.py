"""The C library's heap: arrays are mapped by themselves, unless the user has set it up otherwise."""

import ctypes
import os
import subprocess
import sys

import pytest

from firstloss import heap

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc"
)

# How many bytes are mapped by themselves for 2 MiB, after 16 MiB have been freed: glibc then keeps such in its heaps.
PROGRAM = """
import ctypes, sys
from firstloss import heap

class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd usm fsm uord ford keep".split()]

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes, library.mallinfo2.restype = [ctypes.c_void_p], Info
library.free(library.malloc(16 << 20))
made = heap.map_arrays() if "map" in sys.argv else None
before = library.mallinfo2().hblkhd
library.malloc(2 << 20)
print(made, library.mallinfo2().hblkhd - before)
"""


def mapped(*arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    made, count = done.stdout.split()
    return made, int(count)


def test_arrays_are_mapped_by_themselves():
    assert mapped() == ("None", 0)
    made, count = mapped("map")
    assert made == "True" and count >= 2 << 20


@pytest.mark.parametrize(
    "environment", [{"MALLOC_MMAP_THRESHOLD_": "33554432"}, heap.environment()], ids=["MALLOC_", "GLIBC_TUNABLES"]
)
def test_what_the_user_has_set_stays(environment):
    assert mapped("map", **{k: v for k, v in environment.items() if k.startswith(("MALLOC_", "GLIBC_"))}) == (
        "False",
        0,
    )
