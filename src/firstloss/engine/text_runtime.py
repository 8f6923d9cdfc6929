"""The functions that a Program's text calls besides PyTorch's operations: see `program/python_text.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program.node_kinds import fill_pair, replaces_target
from ..rng.counter_stream import CounterStream
from ..rng.stream import PhiloxStream, Position, Stream
from . import counter_fill
from .replay import new_tensors as made
from .sampler import call_with

__all__ = ["draw", "made", "view"]


def draw(stream: Any, position: int | tuple[int, int], op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a random operation at a position of a stream.

    A step has no such stream, since its compiled function gets new keys at each call; its operations draw from a
    generator that is seeded with the position.

    Args:
        position: in words; or (words, spare), as in `Position`.
    """
    at = Position(*position) if isinstance(position, tuple) else Position(position)
    if isinstance(stream, CounterStream) and (pair := fill_pair(op, args, kwargs)) is not None:
        name, numbers = pair
        target = args[0] if replaces_target(op) else call_with(op, args, kwargs, torch.Generator())
        counter_fill.fill(name, target, *numbers, stream, at)
        return target
    generator = torch.Generator("cuda" if isinstance(stream, PhiloxStream) else "cpu")
    if isinstance(stream, Stream):
        generator.set_state(torch.from_numpy(stream.state_at(at)))
    else:
        generator.manual_seed(at.words)
    return call_with(op, args, kwargs, generator)


def view(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """A view of `tensor` as another dtype; `stride` and `offset` are in elements of that dtype."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, size, stride)
