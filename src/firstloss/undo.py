"""Undo stack: what a block has changed is restored when it ends, even when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Undo:
    """A list of what is to be undone, to be entered twice: `with Undo() as undo, undo:`.

    Python raises KeyboardInterrupt between any two of its instructions, also between the last one of a block and the
    first one of what was to tidy up behind it, and there it would stay untidy: the garbage collector off, a mode open,
    a function replaced. So tidying is done twice, one around the other, and whichever of them is interrupted, the other
    does what is left. What undoes may therefore be run twice, and is registered before what it undoes is done.
    """

    __slots__ = ("_actions",)

    def __init__(self) -> None:
        self._actions: list[tuple[Callable[..., Any], tuple]] = []

    def __call__(self, action: Callable[..., Any], *args: Any) -> None:
        """Call `action(*args)` at the end of the block: the last registered first."""
        self._actions.append((action, args))

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *exception: object) -> None:
        actions = self._actions
        while actions:
            action, args = actions[-1]
            action(*args)
            actions.pop()
