"""What a step updates and does not otherwise read: numbers that it counts, collections that it adds to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .bytecode import Collect, ItemCollect, ItemUpdate, Update, Use
from .equality import same_items
from .kind import kind_of

_NUMBERS = (int, float)
_WITH_NUMBERS = (dict, list, defaultdict)


def may_be_updated(before: Any) -> bool:
    """Whether a step may update a value without depending on it: a number, or a collection."""
    kind = type(before)
    return kind in _NUMBERS or kind in _WITH_NUMBERS or kind_of(kind).collects


class Updates:
    """What a step updates and does not otherwise read.

    Attributes:
        numbers: by the id of their dict or cell and their name, numbers with their updates.
    """

    def __init__(self, looked_at: set[int]) -> None:
        """`looked_at` has the ids of the objects that the step is known to read."""
        self.numbers: dict[tuple[int, Any], tuple[Any, list[Update], bool]] = {}
        self._collected: dict[int, Any] = {}  # by id, the collections that were only added to
        # By id, dicts and lists whose numbers are read only by their own updates, with these by key.
        self._counted: dict[int, tuple[Any, dict[Any, list[Update]]]] = {}
        self._looked_at = looked_at

    def is_only_updated(self, key: tuple, before: Any, uses: list[Use]) -> bool:
        """Whether a number is read only by its own update, as in `n += 1`."""
        if type(before) not in _NUMBERS or not uses:
            return False
        if not all(isinstance(use, Update) for use in uses):
            return False
        self.numbers[key] = (before, [use for use in uses if isinstance(use, Update)], len(uses) == 1)
        return True

    def collects(self, before: Any, uses: list[Use] | None) -> bool:
        """Whether a collection is only appended to, or only has numbers updated in it."""
        kind = kind_of(type(before))
        if uses and all(isinstance(use, Collect) for use in uses) and kind.collects:
            self._collected[id(before)] = before
            return True
        if uses and all(isinstance(use, ItemUpdate) for use in uses) and type(before) in _WITH_NUMBERS:
            updates_by_key = self._counted.setdefault(id(before), (before, {}))[1]
            for use in uses:
                if isinstance(use, ItemUpdate):
                    updates_by_key.setdefault(use.key, []).append(use.update)
            return True
        return False

    def collects_in_items(self, before: Any, uses: list[Use] | None) -> bool:
        """Whether the collections in a dict or a list are only appended to."""
        if not uses or not all(isinstance(use, ItemCollect) for use in uses) or type(before) not in _WITH_NUMBERS:
            return False
        for item in before.values() if isinstance(before, dict) else before:
            if kind_of(type(item)).collects:
                self._collected[id(item)] = item
        return True

    def item_updates(self, container: Any, before: Any, now: Any) -> list[tuple[Any, tuple]] | None:
        """The keys of the changed items of a dict or a list, each with what `numbers` holds of a number, if the step
        only updates numbers in it."""
        if id(container) not in self._counted or id(container) in self._looked_at:
            return None
        updates = self._counted[id(container)][1]
        if not same_items(list(_keys(now)), list(_keys(before))):
            return None
        changed = [key for key in _keys(now) if now[key] is not before[key]]
        if not all(key in updates and type(before[key]) in _NUMBERS for key in changed):
            return None
        return [(key, (before[key], updates[key], len(updates[key]) == 1)) for key in changed]

    def only_collected(self, container: Any) -> bool:
        """Whether the step only appends to a collection."""
        return id(container) in self._collected and id(container) not in self._looked_at


def _keys(container: Any) -> Iterable[Any]:
    return range(len(container)) if isinstance(container, list) else container
