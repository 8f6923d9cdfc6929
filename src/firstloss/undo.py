"""An undo stack that restores what a block has changed, even if it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Undo:
    """A stack of undo actions, to be entered twice: `with Undo() as undo, undo:`.

    KeyboardInterrupt may be raised between any two instructions, also between the last one of a block and the first one
    of its cleanup, which would leave the garbage collector disabled, a mode open, or a function replaced. So there are
    two nested cleanups, and if one of them is interrupted, the other does the rest. Actions may therefore run twice,
    and are registered before the change that they undo is made.
    """

    __slots__ = ("_actions",)

    def __init__(self) -> None:
        self._actions: list[tuple[Callable[..., Any], tuple]] = []

    def __call__(self, action: Callable[..., Any], *args: Any) -> None:
        """Call `action(*args)` at the end of the block, in reverse order of registration."""
        self._actions.append((action, args))

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *exception: object) -> None:
        actions = self._actions
        while actions:
            action, args = actions[-1]
            action(*args)
            actions.pop()
