"""Settings of the C library under which a step's scratch memory is quick to get.

A training step asks for gigabytes of scratch memory and frees them at its end. By default glibc maps each such request
anew and unmaps it when it is freed, so every step touches its memory for the first time, and the kernel clears it page
by page, 4 KiB at a time: 262,144 page faults for a gigabyte, against some 500 in huge pages, and none where the memory
is kept. Measured on 2 cores: half a second of every step of a Llama of half a billion parameters, and several seconds
of the first. The C library reads its settings when a process starts, so they have to be in the environment by then:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python train.py

One setting can be made later, and the XLA backend makes it (`map_arrays`): from which size on a request is mapped by
itself. Left alone, glibc raises that to 32 MiB once arrays of that size have been freed, keeps them in heaps between
what lives longer, and a step's peak is 5 to 15% higher. Measured in turns in one process, Llama of 0.1 billion
parameters: 1.59 s a step with the limit at 1 MiB, 1.61 s with 32 MiB, the peak 5 to 10% lower.

Elsewhere than on Linux with glibc they do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"
# One heap for all threads, no mappings beside it, and nothing that is freed goes back to the system.
KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=1099511627776"


def environment(*settings: str) -> dict[str, str]:
    """The environment for a child process with `settings` (default huge pages); what the user has set stays."""
    tunables = ":".join(settings or (HUGE_PAGES,))
    return {"GLIBC_TUNABLES": tunables, **os.environ}


_M_MMAP_THRESHOLD = -3  # of malloc.h
_MAPPED_BYTES = 1 << 20


def map_arrays() -> bool:
    """Have malloc map requests of 1 MiB and more by themselves, so that what is freed goes back to the system.

    Whoever has set malloc up by the environment (`MALLOC_..._`, `glibc.malloc...` in `GLIBC_TUNABLES`), for instance
    with glibc's own limit, `MALLOC_MMAP_THRESHOLD_=33554432`, keeps that. Returns whether the setting was made.
    """
    set_up = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or set_up or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "gnu_get_libc_version") and library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES) == 1
