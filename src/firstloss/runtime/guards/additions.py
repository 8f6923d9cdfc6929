"""What a step adds to and does not otherwise read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from .bytecode import Collect, ItemCollect, Load, Passed, Use, call_with
from .kind import kind_of

_HOLDERS = (dict, list, defaultdict)


class Additions:
    """The collections that a step adds to, or passes to step closures, and does not otherwise read."""

    def __init__(self, looked_at: set[int], passed: Collection[Passed]) -> None:
        """
        Args:
            looked_at: the ids of the objects that the step is known to read.
            passed: the ids of the objects that are passed to closures themselves, with the places of these calls.
        """
        self._passed = passed
        self._ids = {passed_id for passed_id, _, _ in passed}
        self._collected: dict[int, Any] = {}
        self._looked_at = looked_at

    def may_include(self, before: Any) -> bool:
        """Whether a step may use a value without depending on it."""
        return type(before) in _HOLDERS or kind_of(type(before)).collects or id(before) in self._ids

    def collects(self, before: Any, uses: list[Use]) -> bool:
        """Whether these uses of a collection only add to it, or pass it to closures, to which they may do anything."""
        others = [use for use in uses if not self._is_passed(before, use)] if id(before) in self._ids else uses
        if uses and not others:
            return True
        if not all(isinstance(use, Collect) for use in others) or not kind_of(type(before)).collects:
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

    def _is_passed(self, value: Any, use: Use) -> bool:
        return isinstance(use, Load) and (id(value), use.code, call_with(use)) in self._passed

    def includes(self, container: Any) -> bool:
        """Whether the step only adds to a collection."""
        return id(container) in self._collected and id(container) not in self._looked_at
