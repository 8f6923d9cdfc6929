"""Equality of values as far as the Python code of a step can tell."""

from __future__ import annotations

import operator
from math import copysign
from typing import Any

import numpy as np
import torch

from .native import native


class ComparedState(str):
    """A state that is compared as text.

    Attributes:
        state: the state that the text describes.
    """

    state: Any

    def __new__(cls, state: Any) -> ComparedState:
        text = super().__new__(cls, repr(state))
        text.state = state
        return text


class AnyNumber:
    """As the expected value of a guard: any number of a type."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind: type = kind


class Anything:
    """As the expected value of a guard: anything."""

    __slots__ = ()


# Compared by content. Instances of subclasses may have attributes, and an `__eq__` of their own.
_PLAIN = {int, bool, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size, ComparedState}


def same(a: Any, b: Any) -> bool:
    """Whether they are the same object, or equal values of the same plain type. `a` may stand for any number, or for
    anything."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return kind is AnyNumber and type(b) is a.kind or kind is Anything
    if kind in _PLAIN:
        return bool(a == b)
    if kind is float:
        return a == b and (a != 0 or copysign(1, a) == copysign(1, b)) or a != a and b != b
    if kind is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.generic) and not isinstance(a, (np.void, np.object_)):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if kind is tuple or isinstance(a, tuple) and not kind.__dictoffset__:
        return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(same, a, b)))
    if kind is frozenset:
        return len(a) == len(b) and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    return False


def same_items(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same items. (`==` would compare tensors, and considers True equal to 1.)"""
    return _identical(a, b) or len(a) == len(b) and all(map(same, a, b))


def _same_objects(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


# The C function compares addresses, eight bytes at a time.
_identical = getattr(native, "same_items", _same_objects)
