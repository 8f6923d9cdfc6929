"""Arrays that are still being made: by a materialization under way, or by the rest of a first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


class LazyArray:
    """Stands for an array of the device's that something under way is to make."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], jax.Array]) -> None:
        """`wait` waits for the array and gives it, or raises why there is none; it may be called again."""
        self.wait = wait


def ready(array: Any) -> Any:
    """The array itself; waits for it, if it is lazy."""
    return array.wait() if type(array) is LazyArray else array
