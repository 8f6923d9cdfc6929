"""Queries on the schemas of ATen operations."""

from __future__ import annotations

import functools
from typing import Any

from ..compat.torch_names import schema_of


def _arguments(op: Any) -> dict[str, str]:
    """The types of an operation's arguments, by name."""
    return {argument.name: str(argument.type) for argument in schema_of(op).arguments}


@functools.cache
def with_generator(op: Any) -> Any:
    """The overload of a random operation that takes a generator, as `randint.low_generator` for `randint.low`.

    Without a generator it would draw from the global one, which the user's threads use.

    Returns:
        `op` itself if it takes a generator; None if there is no such overload with the same arguments.
    """
    expected = _arguments(op)
    if "generator" in expected:
        return op
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = _arguments(overload)
        if arguments.pop("generator", None) is not None and arguments == expected:
            return overload
    return None


def is_number_type(argument_type: Any) -> bool:
    """Whether a schema argument of this type is a number or a list of numbers."""
    text = str(argument_type)
    return any(name in text for name in ("number", "Scalar", "float", "int")) and "Tensor" not in text
