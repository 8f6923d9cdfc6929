"""Locks that a forked process finds free, although a thread held them that is not there any more.

They use two private methods of Python's `threading.RLock`, as the standard library does for locks of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe_lock(*, delays_forks: bool = False) -> Any:
    """A `threading.RLock` that is free in a forked process, unless the thread that forked holds it.

    Args:
        delays_forks: whether a fork waits, for at most 10 s, until the lock is free, so that the new process finds
            complete what it protects.
    """
    lock: Any = threading.RLock()
    _locks.add(lock)
    if delays_forks:

        def release() -> None:
            if lock._is_owned():
                lock.release()

        os.register_at_fork(before=lambda: lock.acquire(timeout=10), after_in_parent=release, after_in_child=release)
    return lock


def _free() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free)
