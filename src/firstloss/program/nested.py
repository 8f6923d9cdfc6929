"""Maps over nested lists and tuples, which the arguments of operations are.

A nested function that calls itself is in a cycle with the variables that it reads: they stay until Python collects
garbage, and with them tensors, whose memory is not freed, and which a trace finds alive. So it is not defined there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mapped(change: Callable[[Any], Any], value: Any, into: type | None = None) -> Any:
    """`value` with `change` applied to what is in nested lists and tuples, or to itself.

    Args:
        into: list or tuple, to have only such; None: as they are.
    """
    if type(value) in (list, tuple):
        return (into or type(value))([mapped(change, part, into) for part in value])
    return change(value)
