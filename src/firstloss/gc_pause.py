"""Pauses of the garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gc import disable, enable, isenabled  # a step being traced sees replaced ones

from .undo import Undo


class Paused:
    """Context without garbage collection, for blocks that free as many objects as they create.

    A call of a compiled step creates an array for each weight and frees the previous one. Counting only creations, the
    collector would run several times per step, which takes a seventh of the step's host time.
    """

    def __enter__(self) -> None:
        self._pauses = isenabled()
        if self._pauses:
            _begin()

    def __exit__(self, *exception: object) -> None:
        if self._pauses:
            _resume(enable)


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
    """Like `Paused`, until `undo` runs: for blocks that may be interrupted."""
    if isenabled():
        undo(_resume, enable)
        _begin()


def paused_until(undo: Undo) -> None:
    """Like `paused`, until `undo` runs."""
    if isenabled():
        undo(_resume, _collect_again)
        _begin()


_unwanted: bool | None = None  # during a pause: whether the user's code has disabled collection; else None


def is_wanted() -> bool:
    """Whether collection is enabled, or will be after the pause: the result of `gc.isenabled` for the user's code."""
    return isenabled() if _unwanted is None else not _unwanted


def want(on: bool) -> None:
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
    if not isenabled():
        _count_as_old()
    enable()


def _count_as_old() -> None:
    """All objects that there are."""
    global _others_freeze
    _others_freeze = _others_freeze or gc.get_freeze_count() > 0
    if not _others_freeze:
        gc.freeze()  # moves all objects out of the generations, and
        gc.unfreeze()  # puts them into the oldest


_NEVER = 1 << 30  # collections of the middle generation before one of all objects

_lock = threading.Lock()
_blocks = 0
_users: tuple[int, int, int] = gc.get_threshold()  # while there are blocks


@contextmanager
def no_full_collections() -> Iterator[None]:
    """As `paused`, for a thread beside the user's, which may switch collection off and on meanwhile: young objects are
    collected. Several threads may be in such a block at a time."""
    global _blocks, _users
    with _lock:
        if not _blocks:
            _users = gc.get_threshold()
            gc.set_threshold(*_users[:2], _NEVER)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and _is_ours():
                _count_as_old()
                gc.set_threshold(*_users)


def _is_ours() -> bool:
    """Whether the thresholds are those that a block has set, and not the user's since."""
    return gc.get_threshold() == (*_users[:2], _NEVER)


def thresholds() -> tuple[int, int, int]:
    """The user's: what is set, or will be when the blocks have ended."""
    with _lock:
        return _users if _blocks and _is_ours() else gc.get_threshold()


def want_thresholds(numbers: tuple[int, int, int]) -> None:
    """Set the user's; in a block, for the time after it."""
    global _users
    with _lock:
        if _blocks and _is_ours():
            _users = numbers
            gc.set_threshold(*_users[:2], _NEVER)
        else:
            gc.set_threshold(*numbers)
