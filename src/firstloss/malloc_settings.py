"""Settings of the C library's malloc that make a step's scratch memory fast to allocate.

A training step allocates gigabytes of scratch memory and frees them at its end. By default glibc maps each such request
anew and unmaps it when it is freed, so every step touches its memory for the first time, and the kernel clears it page
by page, 4 KiB at a time: 262,144 page faults for a gigabyte, against some 500 with huge pages, and none if the memory
is kept. Measured on 2 cores: half a second of every step of a Llama of half a billion parameters, and several seconds
of the first. `runtime/device/scratch_pool.py` keeps large blocks from one step to the next. For huge pages, the C
library reads its settings when a process starts, so they must be in the environment by then:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python train.py

Two settings can be made later, and the XLA backend makes them (`map_arrays`). One is the size from which requests are
mapped separately: by default glibc raises it to 32 MiB once arrays of that size have been freed, and keeps them in
heaps between objects that live longer, so that a step's peak is 5 to 15% higher. The other is how much freed memory at
the end of a heap is kept: 128 KiB by default, so that matrix products request their scratch memory from the system each
time. Measured over the first step of a Llama of 1.1 billion parameters with weights in huge pages: 530,000 page faults
with limits of 1 MiB and 128 KiB, 276,000 with those below, and a tenth less time; a step's peak is the same within 1%.

On other systems than Linux with glibc they have no effect.
"""

from __future__ import annotations

import ctypes
import os
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"
# No separate mappings, and freed memory is not returned to the system.
KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
# One heap for all threads, so that any of them can reuse what another has freed; they also contend for it.
ONE_HEAP = "glibc.malloc.arena_max=1"


def environment(*settings: str) -> dict[str, str]:
    """The environment of a child process with `settings` (by default huge pages); the user's settings are kept."""
    tunables = ":".join(settings or (HUGE_PAGES,))
    return {"GLIBC_TUNABLES": tunables, **os.environ}


# From malloc.h, with our values.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES = 4 << 20
_KEPT_BYTES = 32 << 20


def is_configured() -> bool:
    """Whether the environment configures malloc, other than by huge pages."""
    tunables = {setting.partition("=")[0] for setting in os.environ.get("GLIBC_TUNABLES", "").split(":")}
    configured = tunables - {HUGE_PAGES.partition("=")[0]} | set(os.environ)
    return any(name.startswith(("MALLOC_", "glibc.malloc.")) for name in configured)


def map_arrays() -> bool:
    """Make malloc map requests of 4 MiB and more separately, so that freed memory is returned to the system, and keep
    the scratch memory of smaller ones.

    If the environment configures malloc (`MALLOC_..._`, `glibc.malloc...` in `GLIBC_TUNABLES`), for example with
    glibc's own limit, `MALLOC_MMAP_THRESHOLD_=33554432`, nothing is changed; huge pages are compatible. Returns whether
    the settings were made.
    """
    if sys.platform != "linux" or is_configured():
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    results = [library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES), library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)]
    return results == [1, 1]


def release_freed() -> None:
    """Return freed memory to the system, from within heaps too: what a large compilation has left, for example."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
