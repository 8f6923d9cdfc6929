"""Settings of the C library under which a step's scratch memory is quick to get.

A training step asks for gigabytes of scratch memory and frees them at its end. By default glibc maps each such request
anew and unmaps it when it is freed, so every step touches its memory for the first time, and the kernel clears it page
by page, 4 KiB at a time: 262,144 page faults for a gigabyte, against some 500 in huge pages, and none where the memory
is kept. Measured on 2 cores: half a second of every step of a Llama of half a billion parameters, and several seconds
of the first. The C library reads its settings when a process starts, so they have to be in the environment by then:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python train.py

Elsewhere than on Linux with glibc they do nothing.
"""

from __future__ import annotations

import os

HUGE_PAGES = "glibc.malloc.hugetlb=1"
# One heap for all threads, no mappings beside it, and nothing that is freed goes back to the system.
KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=1099511627776"


def environment(*settings: str) -> dict[str, str]:
    """The environment for a child process with `settings` (default huge pages); what the user has set stays."""
    tunables = ":".join(settings or (HUGE_PAGES,))
    return {"GLIBC_TUNABLES": tunables, **os.environ}
