"""`Kind`: how a step's Python code may depend on the objects of some classes, and change them.

The files in `kinds/` define the kinds. To add one, write a class there, decorated with the classes of its objects:

- `visit` copies an object's state before the step, as `State`s, and finds what is reached through it;
- `guard` makes the checks of later calls, if the step has read it;
- `make` recreates it at each call, if the step has created it.

A `State` compares the object with its copy after the trace, and says how the difference is undone, and repeated.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


class Kind:
    """What guards do with the objects of some classes.

    Attributes:
        is_leaf: immutable, and refers to no other objects.
        collects: a collection that can be added to.
        has_only_attributes: has attributes, and no other content.
        hides_content: has content whose changes cannot be detected, or undone.
        refers: a class, or refers to other objects that cannot be exchanged, as a method does.
    """

    is_leaf = False
    collects = False
    has_only_attributes = False
    hides_content = False
    refers = False

    def of_class(self, cls: type) -> Kind:
        """The kind of instances of `cls`: this one, unless some of its subclasses are of another."""
        return self

    def visit(self, obj: Any, snapshot: Any, stack: list[Any]) -> None:
        """Keep the object's state in the `Snapshot`, and add to `stack` what is reached through it."""

    def guard(self, obj: Any, values: Any, description: str, name: str) -> None:
        """Guard the content that an object had before the step, and what is reached through it.

        Args:
            values: the guards, `Values`.
            description: of the object, for messages.
            name: by which the code mentions it.
        """

    def make(self, obj: Any, reconstructor: Any) -> Callable[[Any], Any]:
        """A function that recreates the object at each call, given the `CallFrame`."""
        make: Callable[[Any], Any] = reconstructor.cannot(obj)
        return make


class State:
    """An object, or a part of it, and its former content.

    The functions that undo and repeat a change do not refer to the state, since they outlive it.

    Attributes:
        order: states of a lower order are compared first, and restored last.
    """

    __slots__ = ("held", "before")
    order = 1

    def __init__(self, held: Any, before: Any) -> None:
        self.held: Any = held
        self.before: Any = before

    @property
    def group(self) -> type[State]:
        """The class under which a snapshot keeps it."""
        return type(self)

    def compare(self, effects: Any) -> None:
        """Record in the `Effects` what has changed."""


K = TypeVar("K", bound=type[Kind])

_kinds: dict[type, Kind] = {}  # by a base class of the objects' classes
_of_class: weakref.WeakKeyDictionary[type, Kind] = weakref.WeakKeyDictionary()


def of(*classes: type) -> Callable[[K], K]:
    """Decorates a kind: it is that of the instances of `classes` and their subclasses."""

    def decorate(kind: K) -> K:
        register(classes, kind())
        return kind

    return decorate


def register(classes: Iterable[type], kind: Kind) -> None:
    """Let `kind` be that of the instances of `classes` and their subclasses."""
    _kinds.update(dict.fromkeys(classes, kind))


def has_kind(cls: type) -> bool:
    """Whether a kind names this class, and not only a base class of it."""
    return cls in _kinds


def kind_of(cls: type) -> Kind:
    """The kind of a class's instances."""
    kind = _of_class.get(cls)
    if kind is None:
        bases = (enum.Enum,) if issubclass(cls, enum.Enum) else cls.__mro__
        kind = _of_class[cls] = next(_kinds[base] for base in bases if base in _kinds).of_class(cls)
    return kind
