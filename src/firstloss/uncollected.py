"""Making many objects that live on, without a garbage collector that looks through them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .undo import Undo


class Paused:
    """No garbage collection in the block, which frees as many objects as it makes.

    A call of a compiled step makes an array for each weight and frees the one before. Counting what is made alone, the
    collector would look through all of them several times a step, a seventh of the time that the host spends on it.
    """

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        if self._enabled:
            gc.enable()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in the block. What it has made counts as old afterwards.

    A capture or a lowering makes tens of thousands of small objects, nearly all of which live on. With torch and JAX
    imported a full collection takes 0.15 s, and one would follow at once when collection is allowed again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _collect_again()


def pause(undo: Undo) -> None:
    """As `Paused`, until `undo` is through: for blocks that are interrupted."""
    if gc.isenabled():
        undo(gc.enable)
        gc.disable()


def put_off(undo: Undo) -> None:
    """As `uncollected`, until `undo` is through."""
    if gc.isenabled():
        undo(_collect_again)
        gc.disable()


_others_freeze = False  # somebody has frozen objects, which are to stay so; counting them takes as long as collecting


def _collect_again() -> None:
    global _others_freeze
    if not gc.isenabled():
        _others_freeze = _others_freeze or gc.get_freeze_count() > 0
        if not _others_freeze:
            gc.freeze()  # moves all objects out of the generations, and
            gc.unfreeze()  # puts them into the oldest
    gc.enable()
