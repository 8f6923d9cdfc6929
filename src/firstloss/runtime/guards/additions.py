"""What a step adds to and does not otherwise read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .bytecode import Collect, ItemCollect, Use
from .kind import kind_of

_HOLDERS = (dict, list, defaultdict)


def may_be_added_to(before: Any) -> bool:
    """Whether a step may add to a value, or to what it holds, without depending on it."""
    return type(before) in _HOLDERS or kind_of(type(before)).collects


class Additions:
    """The collections that a step adds to and does not otherwise read."""

    def __init__(self, looked_at: set[int]) -> None:
        """`looked_at` has the ids of the objects that the step is known to read."""
        self._collected: dict[int, Any] = {}
        self._looked_at = looked_at

    def collects(self, before: Any, uses: list[Use]) -> bool:
        """Whether these uses of a collection only add to it."""
        if not all(isinstance(use, Collect) for use in uses) or not kind_of(type(before)).collects:
            return False
        self._collected[id(before)] = before
        return True

    def collects_in_items(self, before: Any, uses: list[Use]) -> bool:
        """Whether these uses of a dict or a list only add to the collections that it holds."""
        if not all(isinstance(use, ItemCollect) for use in uses) or type(before) not in _HOLDERS:
            return False
        for item in before.values() if isinstance(before, dict) else before:
            if kind_of(type(item)).collects:
                self._collected[id(item)] = item
        return True

    def includes(self, container: Any) -> bool:
        """Whether the step only adds to a collection."""
        return id(container) in self._collected and id(container) not in self._looked_at
