"""Functions that the text of a Program calls beside PyTorch's operations: see `program/python_text.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program.node_kinds import fill_pair, replaces_target
from ..rng.counter_stream import CounterStream
from ..rng.stream import PhiloxStream, Position, Stream
from . import counter_fill
from .sampler import call_with


def draw(stream: Any, position: int | tuple[int, int], op: Any, *args: Any, **kwargs: Any) -> Any:
    """What a random operation returns that begins to draw at a position of a stream.

    A step has no such stream: the keys of its compiled function are new at each call. What it draws is drawn here from
    a generator seeded with the position.

    Args:
        position: in words; or words, and the position of a pair of normals whose second one is cached.
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


def made(results: Any, count: int) -> list[torch.Tensor | None]:
    """The last `count` results of an operation, which come after the tensors that it has written to; a kernel may give
    None for one of them."""
    several = (results,) if isinstance(results, torch.Tensor) else results
    tensors: list[torch.Tensor | None] = [r for r in several if isinstance(r, torch.Tensor)]
    if len(tensors) < count:
        tensors = [r for r in several if r is None or isinstance(r, torch.Tensor)]
    return tensors[len(tensors) - count :]


def view(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """The memory of `tensor`, looked at as another dtype; `stride` and `offset` count elements of that."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, size, stride)


def barrier(tensors: Sequence[torch.Tensor], after: torch.Tensor) -> list[torch.Tensor]:
    """Copies of tensors: nothing is to be computed before `after` is there."""
    return [tensor.clone() for tensor in tensors]
