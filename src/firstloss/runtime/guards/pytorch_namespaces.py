"""Guards on PyTorch's own functions and methods, which user code may replace: `torch.nn.functional.gelu = mine`."""

from __future__ import annotations

import operator
import types
from typing import Any

import torch

from .introspection import class_table
from .object_kinds import PACKAGE

_NAMESPACES = (torch, torch.nn.functional, torch.functional, torch.linalg, torch.special, torch.fft, torch.Tensor)


class Namespace:
    """A snapshot of the functions of one of PyTorch's modules, or of the methods of `torch.Tensor`.

    Shared by all guard sets until something is replaced: it has thousands of entries.
    """

    __slots__ = ("table", "expected", "owner", "_all")

    def __init__(self, table: dict, owner: str) -> None:
        self.table = table
        self.owner = owner
        self._all = dict(table)
        self.expected = _functions(table)

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


def _functions(table: dict) -> dict[str, Any]:
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


_known: dict[int, Namespace] = {}


def is_shared(expected: dict) -> bool:
    """Whether it is a dict that a namespace has held: functions, none of which is a tensor."""
    return any(expected is namespace.expected for namespace in _known.values())


def namespaces() -> list[Namespace]:
    """All namespaces in their present state."""
    for where in _NAMESPACES:
        table, owner = (
            (class_table(where), "torch.Tensor") if isinstance(where, type) else (vars(where), where.__name__)
        )
        known = _known.get(id(where))
        _known[id(where)] = Namespace(table, owner) if known is None else known.current()
    return list(_known.values())
