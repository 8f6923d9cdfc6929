"""A shorter GIL switch interval while a background thread works beside the user's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 3e-4  # Python's default is 5 ms, 20 times as long as a chunk of a fill takes

_lock = threading.Lock()
_blocks = 0
_wanted = 0.0  # the user's interval, during such blocks


@contextmanager
def shortened() -> Iterator[None]:
    """Context with a short switch interval; it may be entered by several threads at a time."""
    global _blocks, _wanted
    with _lock:
        if not _blocks:
            _wanted = sys.getswitchinterval()
            sys.setswitchinterval(min(_wanted, _SECONDS))
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                sys.setswitchinterval(_wanted)


def interval() -> float:
    """The user's interval, which is set or will be restored."""
    with _lock:
        return _wanted if _blocks else sys.getswitchinterval()


def want(seconds: float) -> None:
    """Set the user's interval; inside a block, for the time after it."""
    global _wanted
    with _lock:
        if _blocks:
            _wanted = seconds
        else:
            sys.setswitchinterval(seconds)
