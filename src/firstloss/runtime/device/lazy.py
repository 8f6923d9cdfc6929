"""Arrays that are still being computed, by a pending materialization or the rest of a first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


class LazyArray:
    """Stands for a device array that is still being computed."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], jax.Array]) -> None:
        """`wait` returns the array, or raises the error that prevented it; it may be called again."""
        self.wait = wait


def ready(array: Any) -> Any:
    """The array itself; waits for a lazy one."""
    return array.wait() if type(array) is LazyArray else array
