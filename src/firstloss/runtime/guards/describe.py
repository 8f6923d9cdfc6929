"""What is guarded, in words."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def describe_global(table: dict) -> Callable[[Any], str]:
    """Says a name among a module's variables."""
    return lambda name: f"the global {name} of {table.get('__name__', '?')}"


def describe_attribute(owner: Any) -> Callable[[Any], str]:
    """Says a name among an object's attributes."""
    if isinstance(owner, type):
        return lambda name: f"the attribute {name} of the class {owner.__qualname__}"
    if isinstance(owner, types.FunctionType):
        return lambda name: f"the attribute {name} of the function {owner.__qualname__}"
    cls = type(owner)
    return lambda name: f"the attribute {name} of {with_article(cls.__qualname__)}"


def with_article(name: str) -> str:
    """`name` behind "a" or "an"."""
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
