"""PyTorch's own functions and methods, which somebody may replace: `torch.nn.functional.gelu = mine`."""

from __future__ import annotations

import types
from typing import Any

import torch

from .kinds import PACKAGE
from .objects import class_table

_NAMESPACES = (torch, torch.nn.functional, torch.functional, torch.linalg, torch.special, torch.fft, torch.Tensor)


class Namespace:
    """The functions of one of PyTorch's modules, or the methods of `torch.Tensor`, as they were once.

    Shared by all guard sets that were made while nothing was replaced: there are thousands.
    """

    __slots__ = ("table", "expected", "what")

    def __init__(self, table: dict, what: str) -> None:
        self.table = table
        self.what = what
        self.expected = _functions(table)

    def describe(self, name: str) -> str:
        """A function in it, in words."""
        return f"{self.what}.{name}"

    def current(self) -> Namespace:
        """This, or one of what is there now."""
        now = _functions(self.table)
        same = len(now) == len(self.expected) and all(self.expected.get(k) is v for k, v in now.items())
        return self if same else Namespace(self.table, self.what)


def _functions(table: dict) -> dict[str, Any]:
    return {name: value for name, value in table.items() if callable(value) and not _lazy(name, value)}


def _lazy(name: str, value: Any) -> bool:
    """Modules and classes come and go with imports; nobody replaces them to change what a step computes."""
    return name.startswith("_firstloss") or isinstance(value, (type, types.ModuleType)) or name == "__getattribute__"


def undisguised(value: Any) -> Any:
    """A function; if one of ours stands in its place while a step is traced, perhaps in another thread, that which it
    stands for."""
    while isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(PACKAGE):
        original = getattr(value, "__wrapped__", None)
        if original is None:
            break
        value = original
    return value


_known: dict[int, Namespace] = {}


def namespaces() -> list[Namespace]:
    """All of them, as they are now."""
    for where in _NAMESPACES:
        table, what = (class_table(where), "torch.Tensor") if isinstance(where, type) else (vars(where), where.__name__)
        known = _known.get(id(where))
        _known[id(where)] = Namespace(table, what) if known is None else known.current()
    return list(_known.values())
