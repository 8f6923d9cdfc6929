"""Dicts and lists that closures are called with.

A closure sees them as they were at its call, and may change them, as a function would that runs at once.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...capture.input_numbers import Expression
from ...capture.input_texts import input_of, value_of
from ...compat.torch_names import pytree
from ...errors import ClosureError
from ..guards.equality import same, same_items
from ..guards.reconstruct import CallFrame, Make, Reconstructor
from ..pytrees import flatten, is_size


def taken_apart(arguments: Any, existed: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """What a closure is called with: leaves in place of whose tensors it gets values, and their structure.

    Args:
        existed: whether an object existed before the step. Such objects are passed themselves, as all others than
            dicts, lists and tuples are outside of one.
    """

    def is_object(arg: Any) -> bool:
        return is_size(arg) or pytree.tree_is_leaf(arg) and not isinstance(arg, torch.Tensor) and existed(arg)

    def is_whole(arg: Any) -> bool:
        if isinstance(arg, torch.Tensor) or is_object(arg) or _is_plain(arg):
            return True
        return not isinstance(arg, tuple) and not any(
            isinstance(leaf, torch.Tensor) for leaf in flatten(arg, is_object)[0]
        )

    return flatten(arguments, is_whole)


class OfCaller(NamedTuple):
    """What an object that stands in for an argument of the step is at a call."""

    make: Make


class Copy:
    """What a closure gets for a dict or list that has been changed since the call: a copy, as it was."""

    def __init__(self, made: Any, since: str) -> None:
        """`since`: what has changed it."""
        self.copy: Any = made
        self._since = since
        self._then = _flat(made)

    def check(self, closure: str) -> None:
        """Once the closure has run.

        Raises:
            ClosureError: if it has changed the copy.
        """
        if not _are_same(_flat(self.copy), self._then):
            kind = type(self.copy).__name__
            raise ClosureError(
                f"the closure {closure} changes a {kind} with which it was called, and which {self._since} has changed "
                f"after that call, before the closure runs. Change the {kind} in closures only, or pass a copy."
            )


class Container:
    """A dict or list without tensors that a traced step passes to a closure.

    One that existed before the step, and that the step does not change after the call, is passed itself; another one is
    made anew for each call, as it was when the closure was called.

    Attributes:
        container: it, until it is found.
        parts: what `kept` has kept of its items.
    """

    def __init__(self, container: Any, existed: Callable[[Any], bool]) -> None:
        """`existed`: whether an object existed before the step, or stands in for one of its arguments."""
        self.container: Any = container
        self._then, self._spec = _parts(container)
        self.parts: list[Any] = [kept(part, existed) for part in self._then]
        self._make: Make | None = None
        self._existed = existed(container)

    @property
    def is_passed_itself(self) -> bool:
        """Whether the closure gets the container itself, and not a new one; known once it is found."""
        return self._make is not None

    def find(self, reconstructor: Reconstructor) -> None:
        """Once the step is traced: find out whether it is passed itself."""
        container, then = self.container, self._then
        self.container, self._then = None, []  # which would keep alive what the step has dropped
        now, spec = _parts(container)
        # Where the step has a number as an input, the caller has the number.
        is_same = spec == self._spec and all(a is b or same(_of_caller(a), b) for a, b in zip(then, now, strict=True))
        self.parts = [found(part, reconstructor) for part in self.parts]
        inner = [part.is_passed_itself for part in self.parts if type(part) is Container]
        if self._existed and is_same and all(inner):
            self._make = reconstructor.container(container)

    def at(self, frame: CallFrame, copies: list[Copy]) -> Any:
        """What a call of the step passes to the closure; copies of what existed before are added to `copies`."""
        if self._make is not None:
            return self._make(frame)
        made = pytree.tree_unflatten([at_call(part, frame, copies) for part in self.parts], self._spec)
        if self._existed:
            copies.append(Copy(made, "the step"))
        return made


class InLoop:
    """A dict or list without tensors with which a closure is called in a loop that runs it later.

    It is passed itself, if since then only closures that were called earlier have changed it: then it is as it would be
    if all of them had run at once.
    """

    def __init__(self, container: Any) -> None:
        self._container = container
        self._then = self._by_closures = _flat(container)
        self._copy = copy.copy(container) if _is_plain(container) else None

    def is_unchanged(self) -> bool:
        """Whether only closures have changed it since the call."""
        now = _flat(self._container)
        return _are_same(now, self._then) or _are_same(now, self._by_closures)

    def closure_has_run(self) -> None:
        """Note as a change by a closure how it is now."""
        self._by_closures = _flat(self._container)

    def now(self, copies: list[Copy]) -> Any:
        """What the closure gets; if that is a copy, it is added to `copies`."""
        if self.is_unchanged():
            return self._container
        copies.append(Copy(pytree.tree_unflatten(*self._then) if self._copy is None else self._copy, "the loop"))
        return copies[-1].copy


_PLAIN = {int, float, bool, complex, str, bytes, type(None)}


def _is_plain(container: Any) -> bool:
    """Whether a dict or list holds only numbers and texts: told, and compared, in C, since a history may be long."""
    if isinstance(container, dict):
        return _PLAIN.issuperset(map(type, container.values()))
    return isinstance(container, (list, collections.deque)) and _PLAIN.issuperset(map(type, container))


def _flat(container: Any) -> tuple[list[Any], Any]:
    if _is_plain(container):
        is_dict = isinstance(container, dict)
        return [*container.values()] if is_dict else [*container], (type(container), [*container] if is_dict else None)
    leaves, spec = pytree.tree_flatten(container, is_leaf=is_size)
    return leaves, spec


def _parts(container: Any) -> tuple[list[Any], Any]:
    """What a container holds itself, and its structure."""
    parts, spec = pytree.tree_flatten(container, is_leaf=lambda part: part is not container)
    return parts, spec


def _are_same(a: tuple[list[Any], Any], b: tuple[list[Any], Any]) -> bool:
    return a[1] == b[1] and same_items(a[0], b[0])


def _of_caller(part: Any) -> Any:
    """The number or text itself, of one that is an input; any other value as it is."""
    expression = input_of(part)
    return part if expression is None or expression.source is None else value_of(part)


def kept(leaf: Any, existed: Callable[[Any], bool]) -> Any:
    """An argument that is no tensor, as a traced step keeps it; `existed` as for `Container`."""
    if pytree.tree_is_leaf(leaf) or is_size(leaf):
        return input_of(leaf) or leaf
    return Container(leaf, existed)


def all_in(leaf: Any) -> list[tuple[Any, int]]:
    """What `kept` has kept, and in it, each with the id of the object."""
    if type(leaf) is not Container:
        return [(leaf, id(leaf))]
    return [(leaf, id(leaf.container)), *(each for part in leaf.parts for each in all_in(part))]


def found(leaf: Any, reconstructor: Reconstructor) -> Any:
    """What `kept` has kept, once the step is traced."""
    if type(leaf) is Container:
        leaf.find(reconstructor)
    elif reconstructor.holds_arguments(leaf):
        return OfCaller(reconstructor.container(leaf))
    return leaf


def at_call(leaf: Any, frame: CallFrame, copies: list[Copy]) -> Any:
    """What `found` has found, in a call of the step."""
    if type(leaf) is Container:
        return leaf.at(frame, copies)
    if type(leaf) is OfCaller:
        return leaf.make(frame)
    return leaf.value(frame.arguments, frame.known) if type(leaf) is Expression else leaf
