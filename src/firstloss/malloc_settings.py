"""Settings of the C library's malloc that make a step's scratch memory quick to allocate.

A training step asks for gigabytes of scratch memory and frees them at its end. By default glibc maps each such request
anew and unmaps it when it is freed, so every step touches its memory for the first time, and the kernel clears it page
by page, 4 KiB at a time: 262,144 page faults for a gigabyte, against some 500 in huge pages, and none where the memory
is kept. Measured on 2 cores: half a second of every step of a Llama of half a billion parameters, and several seconds
of the first. The C library reads its settings when a process starts, so they have to be in the environment by then:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python train.py

Two settings can be made later, and the XLA backend makes them (`map_arrays`). From which size on a request is mapped by
itself: left alone, glibc raises that to 32 MiB once arrays of that size have been freed, keeps them in heaps between
what lives longer, and a step's peak is 5 to 15% higher. And how much that is freed at a heap's end is kept for the next
request: 128 KiB, so that a product of matrices asks the system for its scratch memory again each time. Measured over
the first step of a Llama of 1.1 billion parameters, its weights in huge pages: 530,000 page faults with limits of 1 MiB
and 128 KiB, 276,000 with those below, and a tenth of the time less; the peak of a step is the same within its noise of
1%.

Elsewhere than on Linux with glibc they do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"
# No mappings beside the heaps, and nothing that is freed goes back to the system.
KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
# One heap for all threads: what one has freed, any of them gets. They wait for each other at each small request, too.
ONE_HEAP = "glibc.malloc.arena_max=1"


def environment(*settings: str) -> dict[str, str]:
    """The environment for a child process with `settings` (default huge pages); what the user has set stays."""
    tunables = ":".join(settings or (HUGE_PAGES,))
    return {"GLIBC_TUNABLES": tunables, **os.environ}


# Of malloc.h, and what they are set to.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES = 4 << 20
_KEPT_BYTES = 32 << 20


def map_arrays() -> bool:
    """Have malloc map requests of 4 MiB and more by themselves, so that what is freed goes back to the system, and keep
    the scratch memory of smaller ones.

    Whoever has set malloc up by the environment (`MALLOC_..._`, `glibc.malloc...` in `GLIBC_TUNABLES`), for instance
    with glibc's own limit, `MALLOC_MMAP_THRESHOLD_=33554432`, keeps that; huge pages go with both. Returns whether the
    settings were made.
    """
    tunables = {setting.partition("=")[0] for setting in os.environ.get("GLIBC_TUNABLES", "").split(":")}
    theirs = tunables - {HUGE_PAGES.partition("=")[0]} | set(os.environ)
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "glibc.malloc.")) for name in theirs):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    made = [library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES), library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)]
    return made == [1, 1]
