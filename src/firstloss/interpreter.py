"""The interpreter: the cores it may use, and settings that Firstloss changes temporarily.

Garbage collection is paused, and threads switch more often. The user's code sees its own settings meanwhile, and finds
them restored.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gc import disable, enable, isenabled  # a step being traced sees replaced ones

from .undo import Undo


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_handling() -> bool:
    """Whether the caller is handling an exception, which the step's Python could raise again or inspect."""
    return sys.exc_info()[0] is not None


# -- pauses of the garbage collector while many long-lived objects are created --


@contextmanager
def paused() -> Iterator[None]:
    """Context without garbage collection, whose objects count as old afterwards.

    A capture or a lowering creates tens of thousands of small objects, most of which live on. With torch and JAX
    imported a full collection takes 0.15 s, and would otherwise run as soon as collection is enabled again.
    """
    if not isenabled():
        yield
        return
    _begin()
    try:
        yield
    finally:
        _resume(_collect_again)


def pause(undo: Undo) -> None:
    """Disable garbage collection until `undo` runs: for blocks that may be interrupted, and free what they create.

    A call of a compiled step creates an array for each weight and frees the previous one. Counting only creations, the
    collector would run several times per step, which takes a seventh of the step's host time.
    """
    if isenabled():
        undo(_resume, enable)
        _begin()


def paused_until(undo: Undo) -> None:
    """Like `paused`, until `undo` runs."""
    if isenabled():
        undo(_resume, _collect_again)
        _begin()


_unwanted: bool | None = None  # during a pause: whether the user's code has disabled collection; else None


def is_collecting() -> bool:
    """Whether collection is enabled, or will be after the pause: the result of `gc.isenabled` for the user's code."""
    return isenabled() if _unwanted is None else not _unwanted


def set_collecting(on: bool) -> None:
    """`gc.enable` and `gc.disable` for the user's code; during a pause, they take effect after it."""
    global _unwanted
    if _unwanted is not None:
        _unwanted = not on
    elif on:
        enable()
    else:
        disable()


def _begin() -> None:
    global _unwanted
    _unwanted = False  # first: other threads may call is_wanted
    disable()


def _resume(again: Callable[[], None]) -> None:
    global _unwanted
    if not _unwanted:
        again()
    _unwanted = None


_others_freeze = False  # someone uses gc.freeze, so do not unfreeze; asking takes as long as collecting


def _collect_again() -> None:
    global _others_freeze
    if not isenabled():
        _others_freeze = _others_freeze or gc.get_freeze_count() > 0
        if not _others_freeze:
            gc.freeze()  # freeze and unfreeze move all objects
            gc.unfreeze()  # into the oldest generation
    enable()


# -- a shorter GIL switch interval while a background thread works beside the user's --

_SECONDS = 3e-4  # Python's default is 5 ms, 20 times as long as a chunk of a fill takes

_blocks_lock = threading.Lock()
_blocks = 0
_interval = 0.0  # the user's interval, during such blocks


@contextmanager
def switch_often() -> Iterator[None]:
    """Context with a short switch interval; it may be entered by several threads at a time."""
    global _blocks, _interval
    with _blocks_lock:
        if not _blocks:
            _interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval, _SECONDS))
        _blocks += 1
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks -= 1
            if not _blocks:
                sys.setswitchinterval(_interval)


def switch_interval() -> float:
    """The user's interval, which is set or will be restored."""
    with _blocks_lock:
        return _interval if _blocks else sys.getswitchinterval()


def set_switch_interval(seconds: float) -> None:
    """Set the user's interval; inside a block, for the time after it."""
    global _interval
    with _blocks_lock:
        if _blocks:
            _interval = seconds
        else:
            sys.setswitchinterval(seconds)
