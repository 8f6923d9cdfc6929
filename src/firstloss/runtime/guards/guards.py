"""The kinds of guards. Each stores what the step saw when it was traced, and reports what has changed since."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import torch

from .access import MISSING, cell_content, class_table, definition, items_of, table_of
from .equality import same, same_items
from .packages import PACKAGE
from .places import Place, place_of

_NAMESPACES = (torch, torch.nn.functional, torch.functional, torch.linalg, torch.special, torch.fft, torch.Tensor)


class Namespace:
    """A snapshot of the functions of one of PyTorch's modules, or of the methods of `torch.Tensor`.

    Shared by all guard sets until something is replaced: it has thousands of entries.
    """

    __slots__ = ("table", "expected", "owner", "_all")

    def __init__(self, table: dict[Any, Any], owner: str) -> None:
        self.table: dict[Any, Any] = table
        self.owner: str = owner
        self._all = dict(table)
        self.expected: dict[str, Any] = _functions(table)

    def describe(self, name: str) -> str:
        """A description of the function `name`."""
        return f"{self.owner}.{name}"

    def current(self) -> Namespace:
        """This namespace if nothing has changed, else a new one."""
        now = dict(self.table)
        if _identical(now, self._all):
            return self
        functions = _functions(now)
        same = len(functions) == len(self.expected) and all(self.expected.get(k) is v for k, v in functions.items())
        if not same:
            return Namespace(self.table, self.owner)
        self._all = now  # only imports have changed
        return self


def _identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both hold the same objects under the same names in the same order, without a Python loop."""
    return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))


def _functions(table: dict[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if callable(value) and not _lazy(name, value)}


def _lazy(name: str, value: Any) -> bool:
    """Modules and classes come and go with imports; they are not replaced to change a computation."""
    return name.startswith("_firstloss") or isinstance(value, (type, types.ModuleType)) or name == "__getattribute__"


def undisguised(value: Any) -> Any:
    """The original function behind one of the runtime's replacements, which another thread's trace may have installed;
    any other value itself."""
    while isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(PACKAGE):
        original = getattr(value, "__wrapped__", None)
        if original is None:
            break
        value = original
    return value


_namespaces: dict[int, Namespace] = {}


def is_shared(expected: dict[Any, Any]) -> bool:
    """Whether it is a dict that a namespace has held: functions, none of which is a tensor."""
    return any(expected is namespace.expected for namespace in _namespaces.values())


def namespaces() -> list[Namespace]:
    """All namespaces in their present state."""
    for scope in _NAMESPACES:
        table, owner = (
            (class_table(scope), "torch.Tensor") if isinstance(scope, type) else (vars(scope), scope.__name__)
        )
        namespace = _namespaces.get(id(scope))
        _namespaces[id(scope)] = Namespace(table, owner) if namespace is None else namespace.current()
    return list(_namespaces.values())


class Change(NamedTuple):
    """A change of something that a step reads."""

    description: str  # for messages
    name: str  # as mentioned in the code
    old: Any
    new: Any
    container_id: int = 0  # the id of the dict, list, variable or object that holds it
    place: Place | None = None  # of a number, which may become an input of the step
    of_gradients: bool = False  # whether a tensor requires a gradient, or has one


class Guard:
    """Guards the content of an object, which it expects to be the same.

    Attributes:
        held: the object.
        expected: its content, by key.
    """

    __slots__ = ("held", "expected", "description", "name")

    def __init__(self, held: Any, expected: Any, description: str, name: str) -> None:
        """
        Args:
            description: of the content, for messages.
            name: by which the code mentions it.
        """
        self.held: Any = held
        self.expected: Any = expected
        self.description: str = description
        self.name: str = name

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yields key, old and new value of each change; the key is MISSING for the object as a whole."""
        raise NotImplementedError

    def change(self, key: Any, old: Any, new: Any) -> Change:
        """The change, with a description."""
        place = None if key is MISSING else place_of(self.held, key, self.description, self.name, old, new)
        return Change(self.description, self.name, old, new, id(self.held), place)


class TableGuard(Guard):
    """Guards names in a dict: all of them in order (`whole`), or some.

    Attributes:
        absent: sets of names; those of them that are not expected are not in the dict.
        of_class: the class whose attributes it has.
    """

    __slots__ = ("whole", "absent", "_describe", "of_class")

    def __init__(self, table: dict[Any, Any], describe: Callable[[Any], str], name: str | None = None) -> None:
        """`name`: of the dict in the code, if its keys are not names themselves."""
        super().__init__(table, {}, "", name or "")
        self.whole: bool = False
        self.absent: list[Set[str]] = []
        self._describe = describe
        self.of_class: type | None = None
        self.name = name  # type: ignore[assignment]

    def expect_absent(self, *names: Set[str]) -> None:
        """Expect none of these names but those that are expected."""
        self.absent += [more for more in names if not any(more is known for known in self.absent)]

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        plain = type(self.held) is dict
        get = self.held.get if plain else lambda key, default: dict.get(self.held, key, default)
        current = map(get, self.expected, itertools.repeat(MISSING))
        if plain and all(map(operator.is_, current, self.expected.values())):
            entries: Iterable[tuple[Any, Any]] = ()  # skips a loop over thousands of names, as in PyTorch's modules
        else:
            entries = self.expected.items()
        for key, old in entries:
            new = get(key, MISSING)
            if new is not old and not same(old, new) and undisguised(new) is not undisguised(old):
                yield key, old, new
        for names in self.absent:
            for key in (names & dict.keys(self.held)) - self.expected.keys():
                yield key, MISSING, get(key, MISSING)
        if self.whole:
            before = [key for key, value in self.expected.items() if value is not MISSING]
            now = list(table_of(self.held))
            if not same_items(now, before):
                yield MISSING, before, now

    def change(self, key: Any, old: Any, new: Any) -> Change:
        name = self.name if self.name is not None else str(key)
        text = self._describe(key)
        place = None if key is MISSING else place_of(self.of_class or self.held, key, text, name, old, new)
        return Change(text, name, old, new, id(self.held), place)


class ListGuard(Guard):
    """Guards the items of a list or deque."""

    __slots__ = ()

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        now = items_of(self.held)
        if len(now) != len(self.expected):
            yield MISSING, self.expected, now
            return
        for i, (old, new) in enumerate(zip(self.expected, now, strict=True)):
            if new is not old and not same(old, new):
                yield i, old, new


class CellGuard(Guard):
    """Guards a variable of an enclosing function."""

    __slots__ = ()

    def __init__(self, cell: types.CellType, expected: Any, description: str, name: str) -> None:
        super().__init__(cell, {None: expected}, description, name)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        now = cell_content(self.held)
        if now is not self.expected[None] and not same(self.expected[None], now):
            yield None, self.expected[None], now


class FunctionGuard(Guard):
    """Guards the code of a function, and its default arguments."""

    __slots__ = ()

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        now = definition(self.held)
        if not same(self.expected, now):
            yield MISSING, self.expected, now


class ClassGuard(Guard):
    """Guards the class of an object."""

    __slots__ = ()

    def __init__(self, held: Any) -> None:
        super().__init__(held, type(held), f"the class of {with_article(type(held).__qualname__)}", "__class__")

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        if type(self.held) is not self.expected:
            yield MISSING, self.expected, type(self.held)

    def change(self, key: Any, old: Any, new: Any) -> Change:
        return Change(self.description, self.name, old, new)


class ReadGuard(NamedTuple):
    """Compares the result of a function with its result when the step was traced."""

    read: Callable[[], Any]
    expected: Any
    description: str
    name: str
    container_id: int
    owner: Any = None  # the object whose slot is read

    def change(self, now: Any) -> Change:
        """The change, with a description."""
        args = self.description, self.name, self.expected, now
        place = None if self.owner is None else place_of(self.owner, self.name, *args)
        return Change(*args, self.container_id, place)


def describe_global(table: dict[Any, Any]) -> Callable[[Any], str]:
    """Returns a function that describes a name among a module's globals."""
    return lambda name: f"the global {name} of {table.get('__name__', '?')}"


def describe_attribute(owner: Any) -> Callable[[Any], str]:
    """Returns a function that describes a name among an object's attributes."""
    if isinstance(owner, type):
        return lambda name: f"the attribute {name} of the class {owner.__qualname__}"
    if isinstance(owner, types.FunctionType):
        return lambda name: f"the attribute {name} of the function {owner.__qualname__}"
    cls = type(owner)
    return lambda name: f"the attribute {name} of {with_article(cls.__qualname__)}"


def with_article(name: str) -> str:
    """`name` with "a" or "an" before it."""
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
