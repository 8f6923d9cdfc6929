"""The Python values that a step may read: noticed when they change.

A compiled step does what its Python did when it was traced. Whatever that Python read is a condition for the compiled
step to be right: numbers, flags, tensors and functions in globals, in variables of enclosing functions, in attributes
of modules and other objects, and in the lists, sets and dicts that these hold. Each such place is a `Slot`. Reading all
of a step's slots takes some 30 ns each, so this is done at every call.
"""

from __future__ import annotations

import itertools
import operator
import random
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ..capture.source import Source
from . import contents, reads
from .reach import Reach, Slotted, attributes, is_installed, names_by_string

_MISSING: Any = object()
_TABLES = (dict, types.MappingProxyType)  # the second: of a class
_NUMBERS = (int, float, bool, str)
_PLAIN = (int, float, bool, str, bytes, bytearray, complex, type(None), torch.dtype, torch.device, torch.Size)


class Slot:
    """One place: `table[key]`; or what the function `table` gives (`key` is None)."""

    __slots__ = ("table", "key", "name", "what", "always")

    def __init__(self, table: Any, key: Any, name: str, what: str, always: bool = False) -> None:
        self.table = table
        self.key = key
        self.name = name  # as the code mentions it
        self.what = what  # for people
        self.always = always  # it is read whatever the code says

    def get(self) -> Any:
        """What is there now."""
        if self.key is None:
            return self.table()
        if isinstance(self.table, types.CellType):
            try:
                return self.table.cell_contents
            except ValueError:
                return _MISSING
        if isinstance(self.table, list):
            return self.table[self.key] if self.key < len(self.table) else _MISSING
        return self.table.get(self.key, _MISSING)

    @property
    def writable(self) -> bool:
        """Whether `put` works."""
        return self.key is not None and isinstance(self.table, (dict, list, types.CellType, Slotted))

    def put(self, value: Any) -> None:
        """Put `value` there."""
        if isinstance(self.table, types.CellType):
            self.table.cell_contents = value
        else:
            self.table[self.key] = value


class Watch:
    """The slots of a step."""

    def __init__(self, *roots: Any) -> None:
        self.reach = Reach(*roots)
        self.slots: list[Slot] = []
        self.unwatched: list[tuple[str, str]] = []  # what is too large, by name, and as people say it
        self._seen: set[tuple[int, Any]] = set()
        self._owners: list[tuple[Any, str, set[str]]] = []
        self._everywhere: dict[int, tuple[Any, str]] = {}  # all attributes and globals, mentioned by name or not
        self._functions()
        for found in self.reach.objects.values():
            self._attributes(found)
        for held in self.reach.holders.values():  # found without a name: a default argument, what an object stands for
            self._content(held, "", _a(type(held).__qualname__), True)
        del self._seen
        self.keep(lambda slot: True)

    def keep(self, wanted: Callable[[Slot], bool]) -> None:
        """Watch only the slots that are `wanted`; what was read before does not fit any more."""
        slots = [slot for slot in self.slots if wanted(slot)]
        self._plain = [
            s for s in slots if isinstance(s.table, _TABLES) and s.key is not None and s.get() is not _MISSING
        ]
        self._tables = [s.table for s in self._plain]
        self._keys = [s.key for s in self._plain]
        plain = {id(slot) for slot in self._plain}
        self._other = [slot for slot in slots if id(slot) not in plain]
        self.slots = [*self._plain, *self._other]

    def read(self) -> list[Any]:
        """What each slot holds now."""
        try:
            values = list(map(operator.getitem, self._tables, self._keys))
        except KeyError:
            values = [slot.get() for slot in self._plain]
        return values + [slot.get() for slot in self._other]

    def unchanged(self, before: list[Any]) -> bool:
        """Whether each slot holds what it held `before`: what is asked at every call, in one pass over memory that the
        step between has pushed out of the caches."""
        try:
            if not all(map(operator.is_, map(operator.getitem, self._tables, self._keys), before)):
                return False
        except KeyError:
            return False
        others = itertools.islice(before, len(self._plain), None)
        return all(same(was, slot.get()) for was, slot in zip(others, self._other, strict=True))

    def changed(self, before: list[Any], now: list[Any]) -> list[int]:
        """The numbers of the slots that differ."""
        begin = len(self._plain) if all(map(operator.is_, before[: len(self._plain)], now)) else 0
        return [i for i in range(begin, len(now)) if not same(before[i], now[i])]

    # -- around a trace --

    def begin(self) -> None:
        """A trace begins: what it rebinds will be seen against what is there now."""
        self.before = self.read()
        self._generators = [read() for read in _GENERATORS.values()]
        self._whole = [(table, title, dict(table)) for table, title in self._everywhere.values()]

    def carry(self) -> None:
        """At the end of the traced step: where it has rebound a name from one tensor to another, the first takes over
        the content of the second, and the name is bound to it again.

        So `self.count = self.count + 1` is state from step to step as `self.count += 1` is.
        """
        now = self.read()
        moved = {
            i: self.before[i] for i in self.changed(self.before, now) if self._can_carry(i, self.before[i], now[i])
        }
        for i in self.unread(moved):  # nobody but the caller looks at it: what it is bound to now will do
            del moved[i]
        while moved:  # what is still bound under another name cannot take over anything
            held = {id(value) for i, value in enumerate(now) if i not in moved}
            blocked = [i for i, old in moved.items() if id(old) in held]
            for i in blocked:
                del moved[i]
            if not blocked:
                break
        with torch.no_grad():
            contents = [now[i].detach().clone() for i in moved]
            for (i, old), content in zip(moved.items(), contents, strict=True):
                old.copy_(content)
                self.slots[i].put(old)

    def _can_carry(self, i: int, old: Any, new: Any) -> bool:
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or not self.slots[i].writable:
            return False
        return old.shape == new.shape and old.dtype == new.dtype

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the slots."""
        return [value for value in self.read() if isinstance(value, torch.Tensor)]

    def end(self) -> None:
        """A trace has ended: what it has newly made is a slot from now on, and so is a generator that it has used."""
        for table, title, names in self._owners:
            for name in (self.reach.names & table.keys()) - names:
                self._add(Slot(table, name, name, f"the attribute {name} {title}"), _MISSING)
        known = {(id(slot.table), slot.key) for slot in self.slots}
        for table, title, before in self._whole:  # what is set by a name that is worked out
            for name, value in before.items():
                now = table.get(name)
                if now is not value and type(value) in _NUMBERS and not same(value, now):
                    if (id(table), name) not in known:
                        self._add(Slot(table, name, name, f"{name} {title}", True), value)
        for (name, read), before in zip(_GENERATORS.items(), self._generators, strict=True):
            if read() != before:
                what = f"the state of the random generator of Python's {name}"
                self._add(Slot(read, None, name, what, True), before)

    def _add(self, slot: Slot, before: Any) -> None:
        self.slots.append(slot)
        self._other.append(slot)
        self.before.append(before)

    # -- what there is to watch --

    def _functions(self) -> None:
        for code, function in self.reach.functions.items():
            table = function.__globals__
            self._everywhere[id(table)] = (table, f"of {table.get('__name__', '?')}")
            for name in set(code.co_names) & table.keys():
                self._slot(table, name, name, f"the global {name} of {table.get('__name__', '?')}")
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                self._slot(cell, name, name, f"the variable {name} that {function.__qualname__} uses")

    def _attributes(self, found: Any) -> None:
        if isinstance(found, types.ModuleType):
            title = f"of {found.__name__}"
        elif isinstance(found, type):
            title = f"of the class {found.__qualname__}"
        else:
            title = f"of {_a(type(found).__qualname__)}"
        table: Any = attributes(found)
        self._everywhere[id(table)] = (table, title)
        names = there = self.reach.names & table.keys()
        if "__wrapped__" in table and not isinstance(found, types.FunctionType):  # what wraps it has more of its own
            names = {name for name in names if not name.startswith("_")}
        if isinstance(table, (dict, Slotted)):  # an attribute of the class may be hidden by one of the instance's
            names |= {name for name in self._shared(type(found)) if not callable(getattr(type(found), name))}
            self._owners.append((table, title, there | names))
        for name in names:
            self._slot(table, name, name, f"the attribute {name} {title}")
        if isinstance(found, torch.nn.Module):
            for inner in (found._parameters, found._buffers, found._modules):
                for name in inner:
                    self._slot(inner, name, name, f"{name} {title}", True)

    def _shared(self, cls: type) -> set[str]:
        """The mentioned attributes that instances of `cls` share."""
        out: set[str] = set()
        for base in cls.__mro__:
            if id(base) in self.reach.objects:
                out |= self.reach.names & vars(base).keys()
        return out

    def _slot(self, table: Any, key: Any, name: str, what: str, always: bool = False) -> None:
        if (id(table), key) in self._seen or _is_dunder(name):
            return
        self._seen.add((id(table), key))
        slot = Slot(table, key, name, what, always)
        self.slots.append(slot)
        self._content(slot.get(), name, what, always)

    def _content(self, held: Any, name: str, what: str, always: bool) -> None:
        """Watch what is in `held`, which was found under `name`, and in what is in that."""
        if (id(held), None) in self._seen or not contents.holds(held):
            return
        self._seen.add((id(held), None))
        large = contents.unwatched(held)
        if large is not None and name:
            self.unwatched.append((name, f"{what}, {large}"))
        read = contents.reader(held)
        if read is not None:
            self.slots.append(Slot(read, None, name, f"what is in {what.removeprefix('the ')}", always))
        if isinstance(held, (list, dict)) and len(held) <= contents.LARGEST:
            items = held.items() if isinstance(held, dict) else enumerate(held)
            inside = [
                Slot(held, k, name, f"an item of {what}", always) for k, v in items if isinstance(v, torch.Tensor)
            ]
            self.slots += inside
        for inner in contents.inside(held):
            self._content(inner, name, what, always)

    # -- what the code says about a name --

    def unread(self, slots: Iterable[int], codes: Iterable[types.CodeType] | None = None) -> list[int]:
        """Those of `slots` that no code reads for anything but their own update: of `codes`, or of all in reach."""
        if any(map(names_by_string, self.reach.functions if codes is None else codes)):
            return []
        return [
            i
            for i in slots
            if not self.slots[i].always and self._find(self.slots[i].name, codes, lambda found: found.reads) is None
        ]

    def where_read(self, name: str, own: bool = False) -> Source | None:
        """A line that reads it; if `own`, of the user's code and not of an installed package's."""
        codes = [c for c, f in self.reach.functions.items() if not is_installed(f.__module__)] if own else None
        return self._find(name, codes, lambda found: found.reads)

    def where_written(self, name: str) -> Source | None:
        """A line that writes it."""
        return self._find(name, None, lambda found: found.writes)

    def _find(
        self,
        name: str,
        codes: Iterable[types.CodeType] | None,
        part: Callable[[reads.Uses], dict[str, Source]],
    ) -> Source | None:
        for code in (*self.reach.functions, *self.reach.forwards) if codes is None else codes:
            for inner in _with_inner(code):
                found = part(reads.uses(inner)).get(name)
                if found is not None:
                    return found
        return None


def _numpy_state() -> tuple:
    name, words, *rest = np.random.get_state()
    return name, words.tobytes(), *rest


# Generators whose numbers a trace cannot see; PyTorch's own are part of the Program.
_GENERATORS: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy": _numpy_state}


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same to a step's Python: the same object, or equal plain ones."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return bool(a == b) or a != a
    if isinstance(a, (tuple, frozenset)) and len(a) == len(b):
        return all(map(operator.is_, a, b)) or all(map(same, a, b)) if isinstance(a, tuple) else a == b
    return False


def _with_inner(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def _is_dunder(name: Any) -> bool:
    return name.startswith("__") and name.endswith("__")


def _a(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
