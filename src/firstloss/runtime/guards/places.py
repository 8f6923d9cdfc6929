"""Places of numbers that a step reads: an entry of a dict, an item of a list, a variable, an attribute."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...capture.input_numbers import InputNumbers, Source, is_input_number, is_plain_number
from ...interpreter import Undo
from .access import MISSING, cell_content, class_table, slot_value
from .equality import AnyNumber


class Place(NamedTuple):
    """A place that holds a number.

    Attributes:
        container: the dict, list or cell; the class, or the object with `__slots__`.
        key: of the entry or item, or the attribute's name; None for a cell.
        description, name: of the number, as of `Change`.
    """

    container: Any
    key: Any
    description: str
    name: str

    @property
    def id(self) -> tuple[int, Any]:
        """Equal for the same place."""
        return id(class_table(self.container) if isinstance(self.container, type) else self.container), self.key

    def get(self) -> Any:
        """Its content; MISSING if it has none."""
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, MISSING)
        if isinstance(self.container, list):
            return list.__getitem__(self.container, self.key) if self.key < len(self.container) else MISSING
        if isinstance(self.container, types.CellType):
            return cell_content(self.container)
        if isinstance(self.container, type):
            return self.container.__dict__.get(self.key, MISSING)
        return slot_value(self.container, self.key)

    def set(self, value: Any) -> None:
        """Replace its content."""
        if isinstance(self.container, dict):
            dict.__setitem__(self.container, self.key, value)
        elif isinstance(self.container, list):
            list.__setitem__(self.container, self.key, value)
        elif isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        elif isinstance(self.container, type):
            type.__setattr__(self.container, self.key, value)
        else:
            object.__setattr__(self.container, self.key, value)

    def read(self, arguments: Sequence[Any]) -> Any:
        """As `get`, for a call with these `arguments`."""
        return self.get()


def place_of(container: Any, key: Any, description: str, name: str, old: Any, new: Any) -> Place | None:
    """The place of a number that has changed to another of its type; None if it cannot be an input of the step."""
    if not is_plain_number(old) or type(old) is not type(new):
        return None
    return Place(container, key, description, name)


class Varying:
    """The numbers of some places, while input numbers take their places during a trace."""

    def __init__(self, places: Iterable[Place], numbers: InputNumbers) -> None:
        self._held: list[tuple[Place, Any, Any]] = []
        self._stored: set[tuple[int, Any]] = set()  # places in which the step has left other values
        for place in places:
            value = place.get()
            if is_plain_number(value):
                source = Source(place.read, type(value), place.description, place.name)
                self._held.append((place, value, numbers.number(value, source)))

    def begin(self, undo: Undo) -> None:
        """Put the input numbers in their places, until `undo` runs; those that the step has replaced stay as it has
        left them."""
        undo(self._restore)
        for place, _, number in self._held:
            place.set(number)

    def _restore(self) -> None:
        for place, value, number in self._held:
            now = place.get()
            if now is number:
                place.set(value)
            elif not is_input_number(now):
                self._stored.add(place.id)

    def number_for(self, container: Any, key: Any) -> Any:
        """The input number that was put in a place, where the step may have put something else since; or None."""
        return next((number for place, _, number in self._held if place.id == (id(container), key)), None)

    def expected(self) -> dict[tuple[int, Any], Any]:
        """For guards: any number of its type, by place. Where the step stores a constant, later calls do so only if
        they find the same value."""
        held = [(place, value) for place, value, _ in self._held if place.id not in self._stored]
        return {place.id: AnyNumber(type(value)) for place, value in held}
