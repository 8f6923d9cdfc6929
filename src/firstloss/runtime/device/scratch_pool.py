"""A pool of the scratch memory that XLA and PyTorch allocate and free at each step on a CPU device.

A step's scratch memory is one or a few large blocks: 334 MB for a ResNet-50 on eight images of 128 x 128. malloc maps
such a block anew at each step and unmaps it afterwards (the largest that it would keep have 32 MiB), so that the kernel
clears each of its pages again: a sixth of a step's processor time. From the pool (`_scratch_pool.c`) the next step gets
the same block. PyTorch's allocator uses it, too: its convolutions allocate their results. Milliseconds per step on two
cores, without and with the pool: ResNet-18 on 32 images of 224 x 224 2516 and 1795; on eight images, ResNet-50 625 and
496, Swin-T 799 and 685, ViT-B 4343 and 3702, ConvNeXt-T 704 and 610.

The peak of memory rises by a thirty-second at most: what is in the pool and in use is together never more than that
above what once was in use. Only what has been in use for two minutes at most is kept, unlike weights, and for ten
seconds, or until a large block is allocated or freed the next time.

With another allocator, or if malloc is configured (`malloc_settings`), and on other systems than Linux with glibc,
there is no pool.
"""

from __future__ import annotations

import ctypes
import sys

from ... import c_library, malloc_settings

# XLA's, which importing JAX has loaded; and that with PyTorch's allocator.
_LIBRARIES = "libjax_common.so", "libc10.so"
_LONGEST_USE, _LONGEST_REST = 120, 10  # seconds

_library = (
    c_library.load(
        __file__,
        "_scratch_pool",
        {
            "firstloss_use_pool": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)),
            "firstloss_pooled": (ctypes.c_size_t, ()),
            "firstloss_empty_pool": (None, ()),
        },
    )
    if sys.platform == "linux"
    else None
)

# Whether it is built, for this system.
IS_AVAILABLE = _library is not None


def use() -> bool:
    """Let XLA and PyTorch use the pool from now on. Returns whether they do."""
    if _library is None or malloc_settings.is_configured():
        return False
    failures = [_library.firstloss_use_pool(name.encode(), _LONGEST_USE, _LONGEST_REST) for name in _LIBRARIES]
    return not any(failures)


def pooled_bytes() -> int:
    """The bytes in the pool."""
    return 0 if _library is None else int(_library.firstloss_pooled())


def empty() -> None:
    """Return the memory in the pool to the system."""
    if _library is not None:
        _library.firstloss_empty_pool()
