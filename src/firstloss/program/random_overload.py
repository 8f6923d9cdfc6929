"""The overload of a random operation that takes a generator.

An operation without one draws from PyTorch's global generator, which belongs to the user's threads.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compat.torch_names import schema_of


def _arguments(op: Any) -> dict[str, str]:
    """Their types, by their names."""
    return {argument.name: str(argument.type) for argument in schema_of(op).arguments}


@functools.cache
def with_generator(op: Any) -> Any:
    """`op`, or the overload of the same operation that takes the same arguments and a generator (`randint.low` has
    `randint.low_generator`); None if there is no such overload."""
    own = _arguments(op)
    if "generator" in own:
        return op
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        others = _arguments(overload)
        if others.pop("generator", None) is not None and others == own:
            return overload
    return None
