"""Counters that are read only to be updated (`n += 1`), and collections that are only appended to: changes of these
need no retrace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .bytecode import Collect, ItemUpdate, Update, Use
from .equality import same_items
from .object_kinds import ObjectKind, kind_of

_NUMBERS = (int, float)


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

    def is_only_updated(self, place: tuple, before: Any, uses: list[Use]) -> bool:
        """Whether a number is read only by its own update, as in `n += 1`."""
        if type(before) not in _NUMBERS or not uses:
            return False
        if not all(isinstance(use, Update) for use in uses):
            return False
        self.numbers[place] = (before, [use for use in uses if isinstance(use, Update)], len(uses) == 1)
        return True

    def collects(self, before: Any, uses: list[Use] | None) -> bool:
        """Whether a collection is only appended to, or only has numbers updated in it."""
        kind = kind_of(type(before))
        if (
            uses
            and all(isinstance(use, Collect) for use in uses)
            and kind in (ObjectKind.LIST, ObjectKind.SET, ObjectKind.DEQUE)
        ):
            self._collected[id(before)] = before
            return True
        if uses and all(isinstance(use, ItemUpdate) for use in uses) and type(before) in (dict, list, defaultdict):
            known = self._counted.setdefault(id(before), (before, {}))[1]
            for use in uses:
                if isinstance(use, ItemUpdate):
                    known.setdefault(use.key, []).append(use.update)
            return True
        return False

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
