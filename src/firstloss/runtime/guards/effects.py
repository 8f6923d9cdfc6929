"""What a step leaves in Python when it ends: found once, by comparing with what was there, and repeated at each call.

After a call every name holds what eager PyTorch would have bound: new tensors where the step makes new ones, the same
objects where it only moves them about, new containers where it makes those. What is found is undone first, so that the
call in which a step is traced ends as every other does.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...capture.tensor import DeferredTensor, Hooks, geometry_of
from ...compat.python_names import is_python_class
from . import contents
from .guard_set import GuardSet, same
from .kinds import Kind, items_of, kind_of, slots, table_of
from .not_yet import NotYet
from .snapshot import MISSING, Snapshot, own_attributes, slot_value


class Env:
    """One call's: its new tensors, the arguments with the containers that they are in, and what stands for tensors that
    were there when it was traced."""

    __slots__ = ("fresh", "arguments", "containers", "stand_in", "made")

    def __init__(
        self,
        fresh: Callable[[int], torch.Tensor],
        arguments: list[Any],
        containers: Callable[[], list[Any]],
        stand_in: dict[int, torch.Tensor],
    ) -> None:
        self.fresh = fresh
        self.arguments = arguments
        self.containers = containers
        self.stand_in = stand_in
        self.made: dict[int, Any] = {}


Make = Callable[[Env], Any]


class Given(NamedTuple):
    """What stands for the arguments of a step while it is traced.

    Attributes:
        tensors: by id, the traced tensors, each with the number of the argument that it stands for.
        stores: by id, their storages, likewise.
        containers: by id, the dicts, lists and objects that hold them, each with its number.
        view: makes of an argument, and how a view of its stand-in looks at that, the same view of the argument.
        outside: the tensor from outside, whole, that a storage stands for, if it does.
        lent: whether a real tensor that the step has made lies in memory of an array that was there before.
    """

    tensors: dict[int, int]
    stores: dict[int, int]
    containers: dict[int, int]
    view: Callable[[torch.Tensor, Any], torch.Tensor]
    outside: Callable[[Any], torch.Tensor | None]
    lent: Callable[[torch.Tensor], bool]


NOTHING_GIVEN = Given({}, {}, {}, lambda tensor, geometry: tensor, lambda store: None, lambda tensor: False)


class Left:
    """The values that a step returns or leaves, as functions that make them anew at each call.

    Attributes:
        tensors: the traced tensors among them, each once; `Env.fresh` is asked for them by number.
        why_not: what cannot be made anew, in words; then the step has to be traced at each call.
    """

    def __init__(
        self, is_traced: Callable[[Any], bool], is_old: Callable[[Any], bool], given: Given = NOTHING_GIVEN
    ) -> None:
        """
        Args:
            is_traced: whether a tensor was made by the step.
            is_old: whether an object was there before the step.
            given: what stands for the arguments.
        """
        self.tensors: list[DeferredTensor] = []
        self.why_not: str | None = None
        self._numbers: dict[int, int] = {}
        self._is_traced = is_traced
        self._is_old = is_old
        self._given = given
        self._makes: dict[int, Make] = {}
        self._constant: set[int] = set()
        self._kept: list[Any] = []

    def number(self, tensor: DeferredTensor) -> int:
        """The number of a traced tensor that is left."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def release(self) -> None:
        """All are known: hold none of them any more."""
        self.tensors.clear()
        self._kept.clear()
        self._is_old = lambda what: True

    def place(self, container: Any) -> Make:
        """What `container` is at each call: itself, unless it is one that holds arguments."""
        if id(container) not in self._given.containers:
            return _constant(container)
        number = self._given.containers[id(container)]
        return lambda env: env.containers()[number]

    def holds_arguments(self, container: Any) -> bool:
        """Whether it stands for one that holds arguments, which are others at each call."""
        return id(container) in self._given.containers

    def make(self, value: Any) -> Make:
        """A function that makes at each call what `value` is now."""
        if id(value) in self._given.containers:
            return self.place(value)
        known = self._makes.get(id(value))
        if known is not None:
            return known
        kind = kind_of(type(value))
        if type(value) is NotYet:
            value.refuse()
        if kind is Kind.LEAF or kind is not Kind.TENSOR and self._is_old(value):
            return _constant(value)
        self._kept.append(value)  # so that its id stays its own
        box: list[Make] = []
        self._makes[id(value)] = lambda env: box[0](env)  # it may contain itself
        made = self._make(value, kind)
        box.append(made)
        self._makes[id(value)] = made
        return made

    def _make(self, value: Any, kind: Kind) -> Make:
        if kind is Kind.TENSOR:
            return self._tensor(value)
        if kind is Kind.TUPLE:
            parts = [self.make(part) for part in items_of(value)]
            if all(isinstance(part, _Constant) for part in parts):
                return _constant(value)
            cls = type(value)
            if cls in (tuple, frozenset):
                return lambda env: cls([part(env) for part in parts])
            if hasattr(value, "_fields"):
                return lambda env: cls(*[part(env) for part in parts])
            return self._cannot(value)
        if kind in (Kind.LIST, Kind.SET, Kind.DEQUE):
            return self._once(value, self._sequence(value))
        if kind is Kind.DICT:
            return self._once(value, self._dict(value))
        if kind is Kind.FUNCTION:
            return self._function(value)
        if kind is Kind.BINDING:
            return self._binding(value)
        if kind is Kind.CELL:
            content = self.make(value.cell_contents)
            return self._once(
                value, lambda env: (types.CellType(), lambda new: setattr(new, "cell_contents", content(env)))
            )
        if kind is Kind.INSTANCE:
            return self._once(value, self._instance(value))
        if kind in (Kind.CLASS, Kind.MODULE):
            return _constant(value)
        if hasattr(value, "copy") and type(value).__module__ == "numpy":
            kept = value.copy()
            return lambda env: kept.copy()
        return self._cannot(value)

    def _cannot(self, value: Any) -> Make:
        self.why_not = self.why_not or f"an object of type {type(value).__name__}"
        return _constant(value)

    def _tensor(self, value: torch.Tensor) -> Make:
        argument = self._given.tensors.get(id(value))
        if argument is not None:
            return lambda env: env.arguments[argument]
        if self._is_traced(value):
            assert type(value) is DeferredTensor
            shown = self._given.stores.get(id(value._store))
            if shown is not None and not value.is_conj():
                return self._view(value, lambda env: env.arguments[shown], self._given.view)
            home = self._given.outside(value._store)
            if home is not None and not value.is_conj() and value.dtype == home.dtype:
                key = id(home)
                return self._view(value, lambda env: env.stand_in.get(key, home), _same_memory)
            number = self.number(value)
            return lambda env: env.fresh(number)
        key = id(value)
        if self._is_old(value):
            return lambda env: env.stand_in.get(key, value)
        if type(value) is not DeferredTensor:
            if self._given.lent(value):
                return self._once(value, lambda env: (value.detach(), _nothing_more))
            with torch.no_grad():
                kept = value.detach().clone()
            return self._once(value, lambda env: (kept.clone(), _nothing_more))
        if value._store.resident is None and value._store.value.known:  # the step has made it of constants
            known = Hooks.value_of(value)
            return self._once(value, lambda env: (known.clone(), _nothing_more))
        store, geometry = value._store, geometry_of(value)  # a view of a weight, which shows it as it will be
        return self._once(value, lambda env: (DeferredTensor.wrap(store, *geometry), _nothing_more))

    def _view(self, value: DeferredTensor, of: Make, view: Callable[[torch.Tensor, Any], torch.Tensor]) -> Make:
        """A tensor that shows what another one holds, an argument or one from outside."""
        geometry = geometry_of(value)
        leaf = value.requires_grad and value.is_leaf
        attributes = {k: v for k, v in value.__dict__.items() if k != "_store"}

        def make(env: Env) -> tuple[torch.Tensor, Callable[[Any], None]]:
            made = view(of(env), geometry).requires_grad_(leaf)
            return made, lambda new: new.__dict__.update(attributes)

        return self._once(value, make)

    @staticmethod
    def _once(value: Any, how: Callable[[Env], tuple[Any, Callable[[Any], None]]]) -> Make:
        """Made once a call, though it may be found in several places, and in itself."""
        key = id(value)

        def make(env: Env) -> Any:
            if key not in env.made:
                new, fill = how(env)
                env.made[key] = new
                fill(new)
            return env.made[key]

        return make

    def _sequence(self, value: Any) -> Callable[[Env], tuple]:
        parts = [self.make(part) for part in items_of(value)]
        empty, more = _empty_like(value), self._more(value)

        def fill(new: Any, env: Env) -> None:
            put_items(new, [part(env) for part in parts])
            more(new, env)

        return lambda env: (empty(), lambda new: fill(new, env))

    def _dict(self, value: dict) -> Callable[[Env], tuple]:
        parts = [(self.make(key), self.make(part)) for key, part in table_of(value).items()]
        empty, more = _empty_like(value), self._more(value)

        def fill(new: Any, env: Env) -> None:
            put_table(new, {key(env): part(env) for key, part in parts})
            more(new, env)

        return lambda env: (empty(), lambda new: fill(new, env))

    def _more(self, value: Any) -> Callable[[Any, Env], None]:
        """Gives a new container the attributes of `value`."""
        parts = {key: self.make(part) for key, part in (own_attributes(value) or {}).items()}

        def give(new: Any, env: Env) -> None:
            if parts:
                own_attributes(new).update({key: part(env) for key, part in parts.items()})  # type: ignore[union-attr]

        return give

    def _instance(self, value: Any) -> Callable[[Env], tuple]:
        table = own_attributes(value) or {}
        parts = {key: self.make(part) for key, part in table.items()}
        held = {name: slot_value(value, name) for name in slots(type(value))}
        slotted = {name: self.make(part) for name, part in held.items() if part is not MISSING}
        cls = type(value)

        def fill(new: Any, env: Env) -> None:
            if parts:
                own_attributes(new).update({key: part(env) for key, part in parts.items()})  # type: ignore[union-attr]
            for name, part in slotted.items():
                object.__setattr__(new, name, part(env))

        base: Any = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
        try:
            base.__new__(cls)
        except TypeError:
            made = self._cannot(value)
            return lambda env: (made(env), lambda new: None)
        return lambda env: (base.__new__(cls), lambda new: fill(new, env))

    def _function(self, value: types.FunctionType) -> Make:
        cells = [self.make(cell) for cell in value.__closure__ or ()]
        if all(isinstance(cell, _Constant) for cell in cells):
            return _constant(value)

        def make(env: Env) -> Any:
            made = types.FunctionType(
                value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(c(env) for c in cells)
            )
            made.__kwdefaults__ = value.__kwdefaults__
            return functools.update_wrapper(made, value)

        return make

    def _binding(self, value: Any) -> Make:
        if isinstance(value, types.MethodType):
            function, owner = self.make(value.__func__), self.make(value.__self__)
            return lambda env: types.MethodType(function(env), owner(env))
        if isinstance(value, functools.partial):
            f, args = self.make(value.func), [self.make(a) for a in value.args]
            kwargs = {k: self.make(v) for k, v in value.keywords.items()}
            return lambda env: functools.partial(
                f(env), *[a(env) for a in args], **{k: v(env) for k, v in kwargs.items()}
            )
        return _constant(value)


def _same_memory(tensor: torch.Tensor, geometry: Any) -> torch.Tensor:
    """Another tensor in the same storage."""
    if type(tensor) is DeferredTensor:
        return DeferredTensor.wrap(tensor._store, *geometry)
    size, stride, offset, _ = geometry
    return tensor.detach().as_strided(size, stride, offset)


def _nothing_more(new: Any) -> None:
    """It is all there."""


class _Constant:
    """The same object at each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, env: Env) -> Any:
        return self.value


def _constant(value: Any) -> _Constant:
    return _Constant(value)


def _empty_like(container: Any) -> Callable[[], Any]:
    """Makes an empty container of the same class."""
    cls = type(container)
    base = _builtin(cls)
    if isinstance(container, collections.deque):
        length = container.maxlen
        return lambda: _initialized(base.__new__(cls), base, (), length)
    if isinstance(container, collections.defaultdict):
        factory = container.default_factory
        return lambda: _initialized(base.__new__(cls), base, factory)
    return lambda: base.__new__(cls)


def _initialized(new: Any, base: Any, *args: Any) -> Any:
    base.__init__(new, *args)
    return new


def _builtin(cls: type) -> Any:
    """The class of C that `cls` derives from."""
    return next(base for base in cls.__mro__ if not is_python_class(base))


def put_items(container: Any, items: list[Any]) -> None:
    """Make `items` all that is in a list, set or deque."""
    kind = kind_of(type(container))
    if kind is Kind.LIST:
        list.__setitem__(container, slice(None), items)
        return
    base = _builtin(type(container))
    base.clear(container)
    (set.update if kind is Kind.SET else base.extend)(container, items)


def put_table(table: dict, entries: dict) -> None:
    """Make `entries` all that is in a dict, in their order."""
    if type(table) is dict:
        table.clear()
        table.update(entries)
        return
    base = _builtin(type(table))
    base.clear(table)
    for key, value in entries.items():
        base.__setitem__(table, key, value)


# What binds something: done twice, it has the same effect as done once.
Bind = Callable[[], None]


class Effects:
    """What a traced step has changed in Python.

    Attributes:
        places: the ids of the dicts, lists, variables and objects in which something has changed.
    """

    def __init__(self, snapshot: Snapshot, guards: GuardSet | None, left: Left) -> None:
        """
        Args:
            guards: of what the step has read; None where it is only to be undone.
        """
        self.places: set[int] = set()
        self._undo: list[Bind] = []
        self._apply: list[Callable[[Env], Bind]] = []
        self._left = left
        for table in snapshot.tables.values():
            if not (table.before or table.table):
                continue
            if table.kind == "items":
                self._items(table.table, table.before, guards)
            else:
                self._names(table.table, table.before, table.owner, guards)
        for container, before in snapshot.sequences.values():
            self._sequence(container, before, guards)
        for cell, content in snapshot.cells.values():
            self._cell(cell, content, guards)
        for slotted in snapshot.slotted.values():
            for name, before in zip(slotted.names, slotted.before, strict=True):
                self._slot(slotted.owner, name, before, guards)
        for what, cls in snapshot.types:
            if type(what) is not cls:
                self.places.add(id(what))
                self._undo.append(functools.partial(object.__setattr__, what, "__class__", cls))
                new = type(what)
                self._apply.append(_always(functools.partial(object.__setattr__, what, "__class__", new)))
        for content, read, before in snapshot.opaque.values():
            if id(content) in snapshot.sequences or id(content) in snapshot.tables:
                continue
            if isinstance(content, contextvars.ContextVar):
                self._context(content, before, guards)
            elif guards is not None and not same(before, read()):  # it cannot be repeated: the step is traced each time
                self.places.add(id(content))
                guards.guard_content(content)

    def also(self, undo: Bind, apply: Callable[[Env], Bind]) -> None:
        """A change that somebody else has found."""
        self._undo.append(undo)
        self._apply.append(apply)

    def undo(self) -> None:
        """Make all as it was before the step."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()  # what was there before is nobody's any more

    def bindings(self, env: Env) -> list[Bind]:
        """What does at this call what the step's Python would do; all are made before the first is done."""
        return [apply(env) for apply in self._apply]

    # -- what has changed --

    def _names(self, table: dict, before: dict, owner: Any, guards: GuardSet | None) -> None:
        if _unchanged(table, before):
            return
        self.places.add(id(table))
        put: Callable[[Any, Any], None] = table.__setitem__
        delete: Callable[[Any], None] = table.__delitem__
        if isinstance(owner, type):  # a class tells its interpreter
            put, delete = functools.partial(type.__setattr__, owner), functools.partial(type.__delattr__, owner)
        given = self._left.holds_arguments(table)
        place = self._left.place(table)
        for name, now in list(table.items()):
            old = before.get(name, MISSING)
            if now is old:
                continue
            if isinstance(name, str) and name.startswith("_firstloss"):  # our own notes
                continue
            self._undo.append(functools.partial(delete, name) if old is MISSING else functools.partial(put, name, old))
            if given:
                self._apply.append(_setting_in(place, name, self._left.make(now)))
                continue
            self._bind((id(table), name), old, now, functools.partial(put, name), lambda n=name: table[n], guards)
        for name in before.keys() - table.keys():
            self._undo.append(functools.partial(put, name, before[name]))
            if given:
                self._apply.append(_removing_from(place, name))
                continue
            self._apply.append(_always(functools.partial(_delete, table, name, delete)))

    def _bind(self, place: tuple, old: Any, now: Any, put: Any, get: Any, guards: GuardSet | None) -> None:
        counted = None if guards is None else guards.updated.get(place)
        if counted is not None and guards is not None:
            update = _repeated(counted, now)
            if update is not None:
                self._apply.append(lambda env: functools.partial(put, update(get())))
                return
            guards.guard_number(place)
        make = self._left.make(now)
        self._apply.append(_setting(put, make))

    def _cell(self, cell: types.CellType, old: Any, guards: GuardSet | None) -> None:
        try:
            now = cell.cell_contents
        except ValueError:
            now = MISSING
        if now is old:
            return
        self.places.add(id(cell))

        def put(value: Any) -> None:
            if value is MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = value

        self._undo.append(functools.partial(put, old))
        if now is MISSING:
            self._apply.append(_always(functools.partial(put, MISSING)))
        else:
            self._bind((id(cell), None), old, now, put, lambda: cell.cell_contents, guards)

    def _slot(self, owner: Any, name: str, old: Any, guards: GuardSet | None) -> None:
        now = slot_value(owner, name)
        if now is old:
            return
        self.places.add(id(owner))

        def put(value: Any) -> None:
            if value is MISSING:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, value)

        self._undo.append(functools.partial(put, old))
        if now is MISSING:
            self._apply.append(_always(functools.partial(put, MISSING)))
        else:
            self._bind((id(owner), name), old, now, put, lambda: slot_value(owner, name), guards)

    def _context(self, variable: contextvars.ContextVar, old: Any, guards: GuardSet | None) -> None:
        now = contents.value_in(variable)
        if now is old:
            return
        self.places.add(id(variable))

        def put(value: Any) -> None:
            variable.set(value)

        self._undo.append(functools.partial(put, old))
        if guards is not None:
            guards.guard_content(variable)
        self._apply.append(_setting(put, self._left.make(now)))

    def _items(self, table: dict, before: dict, guards: GuardSet | None) -> None:
        now = table_of(table)
        if _unchanged(now, before):
            return
        self._undo.append(lambda: put_table(table, before))
        if self._counted(table, before, now, guards):
            return
        self.places.add(id(table))
        if guards is not None and not self._left.holds_arguments(table):
            guards.guard_content(table)
        place = self._left.place(table)
        if list(now) == list(before):  # bound anew in place
            for key, value in now.items():
                if value is not before[key]:
                    self._apply.append(_setting_in(place, key, self._left.make(value)))
            return
        parts = [(self._left.make(key), self._left.make(value)) for key, value in now.items()]
        self._apply.append(
            lambda env: functools.partial(put_table, place(env), {key(env): make(env) for key, make in parts})
        )

    def _counted(self, container: Any, before: Any, now: Any, guards: GuardSet | None) -> bool:
        """Whether all that the step has done to a dict or a list is to count in it, so that each call does that."""
        found = None if guards is None else guards.item_updates(container, before, now)
        if found is None:
            return False
        updates = [(key, _repeated(counted, now[key])) for key, counted in found]
        if any(update is None for _, update in updates):
            return False

        def setting(key: Any, update: Any) -> Callable[[Env], Bind]:
            return lambda env: functools.partial(operator.setitem, container, key, update(container[key]))

        self._apply += [setting(key, update) for key, update in updates]
        return True

    def _sequence(self, container: Any, before: list, guards: GuardSet | None) -> None:
        now = items_of(container)
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return
        self._undo.append(lambda: put_items(container, before))
        if guards is None or self._counted(container, before, now, guards):
            return
        self.places.add(id(container))
        added = _added(container, before, now) if guards.only_collected(container) else None
        if added is not None:
            makes = [self._left.make(item) for item in added]
            self._apply.append(lambda env: _adding(container, [make(env) for make in makes]))
            return
        place = self._left.place(container)
        if not self._left.holds_arguments(container):
            guards.guard_content(container)
        makes = [self._left.make(item) for item in now]
        if kind_of(type(container)) is Kind.LIST and len(now) == len(before):
            changed = [(i, makes[i]) for i in range(len(now)) if now[i] is not before[i]]

            for i, make in changed:
                self._apply.append(_setting_in(place, i, make))
            return
        self._apply.append(lambda env: functools.partial(put_items, place(env), [make(env) for make in makes]))


def put_back(snapshot: Snapshot) -> bool:
    """Make arrays, buffers and the like again what they were before the step; whether nothing else has changed, such as
    where an iterator stands, which nobody can set back."""
    done = True
    for content, read, before in snapshot.opaque.values():
        bound = id(content) in snapshot.sequences or id(content) in snapshot.tables  # those are undone as all effects
        if not bound and not isinstance(content, contextvars.ContextVar) and not same(before, read()):
            done = contents.put_back(content, before) and done
    return done


def _delete(table: dict, name: Any, delete: Callable[[Any], None]) -> None:
    if name in table:
        delete(name)


def _always(bind: Bind) -> Callable[[Env], Bind]:
    return lambda env: bind


def _setting(put: Callable[[Any], None], make: Make) -> Callable[[Env], Bind]:
    return lambda env: functools.partial(put, make(env))


def _setting_in(place: Make, key: Any, make: Make) -> Callable[[Env], Bind]:
    """Puts an item into a dict or a list, whatever its class makes of that."""

    def apply(env: Env) -> Bind:
        container = place(env)
        put = dict.__setitem__ if isinstance(container, dict) else list.__setitem__
        return functools.partial(put, container, key, make(env))

    return apply


def _removing_from(place: Make, name: str) -> Callable[[Env], Bind]:
    return lambda env: functools.partial(place(env).pop, name, None)


def _adding(container: Any, items: list) -> Bind:
    """Adds items at the end of a collection."""
    kind = kind_of(type(container))
    if kind is Kind.SET:
        return functools.partial(set.update, container, items)
    if kind is Kind.LIST:
        return functools.partial(list.__setitem__, container, slice(len(container), None), items)
    return functools.partial(put_items, container, [*container, *items])


def _unchanged(table: dict, before: dict) -> bool:
    if len(table) != len(before) or not all(map(operator.is_, table.values(), before.values())):
        return False
    return list(table) == list(before)


def _added(container: Any, before: list, now: list) -> list | None:
    """What was added at the end; None if it is not just that."""
    if kind_of(type(container)) is Kind.SET:
        return [item for item in now if not any(item is old for old in before)] if len(now) >= len(before) else None
    if getattr(container, "maxlen", None) is not None:
        for count in range(1, len(now) + 1):  # so many were added, and so many fell out
            kept = before[max(0, len(before) + count - container.maxlen) :]
            if len(kept) + count == len(now) and all(map(operator.is_, kept, now)):
                return now[len(kept) :]
        return None
    return now[len(before) :] if len(now) >= len(before) and all(map(operator.is_, before, now)) else None


def _repeated(counted: tuple, now: Any) -> Callable[[Any], Any] | None:
    """What `n += 1` does to a number at each call; None if that is not all that has happened to it."""
    before, updates, once = counted
    if type(before) is int and type(now) is int and all(type(u.constant) is int for u in updates):
        difference = now - before
        return lambda number: number + difference
    if once and same(updates[0].combine(before, updates[0].constant), now):
        combine, constant = updates[0]
        return lambda number: combine(number, constant)
    return None
