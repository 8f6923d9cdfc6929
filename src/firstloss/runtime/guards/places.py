"""Places of numbers that a step reads: an entry of a dict, an item of a list, a variable, an attribute."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...capture.input_numbers import InputNumbers, Source, is_input_number, is_plain_number
from ...interpreter import Undo
from .access import MISSING, cell_content, class_table, items_of, slot_value
from .equality import AnyNumber, same


class Place(NamedTuple):
    """A place that holds a number.

    Attributes:
        container: the dict, list, deque or cell; the class, or the object with `__slots__`.
        key: of the entry or item, or the attribute's name; None for a cell.
        description, name: of the number, as of `Change`.
        position: of the number in a tuple that the place holds; None for the content itself.
    """

    container: Any
    key: Any
    description: str
    name: str
    position: int | None = None

    @property
    def id(self) -> tuple[int, Any]:
        """Equal for the same place."""
        return id(class_table(self.container) if isinstance(self.container, type) else self.container), self.key

    def get(self) -> Any:
        """Its content; MISSING if it has none."""
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, MISSING)
        if isinstance(self.container, (list, collections.deque)):
            items = items_of(self.container)
            return items[self.key] if self.key < len(items) else MISSING
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
        elif isinstance(self.container, collections.deque):
            collections.deque.__setitem__(self.container, self.key, value)
        elif isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        elif isinstance(self.container, type):
            type.__setattr__(self.container, self.key, value)
        else:
            object.__setattr__(self.container, self.key, value)

    def read(self, arguments: Sequence[Any]) -> Any:
        """The number at a call with these `arguments`; MISSING if there is none."""
        value = self.get()
        if self.position is None:
            return value
        return value[self.position] if isinstance(value, tuple) and self.position < len(value) else MISSING


def place_of(container: Any, key: Any, description: str, name: str, old: Any, new: Any) -> Place | None:
    """The place of a number that has changed to another of its type, or of a tuple of such; None if it cannot be an
    input of the step."""
    if not can_vary(old) or not same(any_number(old), new):
        return None
    return Place(container, key, description, name)


def can_vary(value: Any) -> bool:
    """Whether it is a number that can be an input of the step, or a tuple of such numbers."""
    return is_plain_number(value) or type(value) is tuple and bool(value) and all(map(is_plain_number, value))


def any_number(value: Any) -> Any:
    """For guards: any number of the type of `value`, or a tuple of such."""
    return tuple(map(any_number, value)) if type(value) is tuple else AnyNumber(type(value))


def inputs_at(place: Place, value: Any, numbers: InputNumbers, trusted: bool = False, count: int | None = None) -> Any:
    """The input number for the number in a place, which is read there at each call.

    Args:
        value: the present content; a tuple's items have a number each.
        trusted: see `Source`.
        count: how many of a tuple's items vary; the others stay as they are. None for all.
    """
    if type(value) is not tuple:
        return numbers.number(value, Source(place.read, type(value), place.description, place.name, trusted))
    places = [place._replace(position=i) for i in range(len(value[:count]))]
    sources = [Source(p.read, type(v), p.description, p.name, trusted) for p, v in zip(places, value, strict=False)]
    return (*map(numbers.number, value, sources), *value[len(sources) :])


class Varying:
    """The numbers of some places, while input numbers take their places during a trace."""

    def __init__(self, places: Iterable[Place], numbers: InputNumbers) -> None:
        self._held: list[tuple[Place, Any, Any]] = []
        self._stored: set[tuple[int, Any]] = set()  # places in which the step has left other values
        for place in places:
            value = place.get()
            if can_vary(value):
                self._held.append((place, value, inputs_at(place, value, numbers)))
        self._numbers = {place.id: number for place, _, number in reversed(self._held)}

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
            elif not any(map(is_input_number, now if type(now) is tuple else (now,))):
                self._stored.add(place.id)

    def number_for(self, container: Any, key: Any) -> Any:
        """The input number that was put in a place, where the step may have put something else since; or None."""
        return self._numbers.get((id(container), key))

    def expected(self) -> dict[tuple[int, Any], Any]:
        """For guards: any number of its type, by place. Where the step stores a constant, later calls do so only if
        they find the same value."""
        return {place.id: any_number(value) for place, value, _ in self._held if place.id not in self._stored}
