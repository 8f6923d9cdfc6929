"""Epilogues: in-place operations with scalars after a fill, fused with it piece by piece.

timm's `trunc_normal_` is `uniform_`, `erfinv_`, `mul_`, `add_`, `clamp_`, each over the whole weight. Done piece by
piece, in the cache, the weight passes through memory once instead of five times, and all cores take part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..program.node_kinds import Pointwise
from ..rng import native

aten = torch.ops.aten


class Epilogue(NamedTuple):
    """The trailing operations that have a native kernel: multiply, add, clamp; each is optional."""

    factor: float = 1.0
    term: float = -0.0  # the identity of addition, even for -0.0
    low: float = -math.inf
    high: float = math.inf

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write the result for `source` to `target`: both float32, contiguous, and of the same length."""
        native.mul_add_clamp(target.data_ptr(), source.data_ptr(), source.numel(), *self)


def split_epilogue(edits: Sequence[Pointwise]) -> tuple[list[Pointwise], Epilogue | None]:
    """Split the edits into those before an Epilogue and the Epilogue; None if they do not end in one."""
    epilogue = Epilogue()
    rest = list(edits)
    for ops, read in _LAST_TO_FIRST:
        if rest and rest[-1].op in ops:
            numbers = read(rest[-1])
            if numbers is not None:
                epilogue, _ = epilogue._replace(**numbers), rest.pop()
    return rest, epilogue if len(rest) < len(edits) else None


def _number(name: str) -> Callable[[Pointwise], dict[str, float] | None]:
    def read(edit: Pointwise) -> dict[str, float] | None:
        number = edit.args[1] if len(edit.args) == 2 and not edit.kwargs else None
        return {name: number} if isinstance(number, (int, float)) and math.isfinite(number) else None

    return read


def _bounds(edit: Pointwise) -> dict[str, float] | None:
    given = dict(zip(("min", "max"), edit.args[1:], strict=False)) | edit.kwargs
    numbers = {field: given[name] for field, name in (("low", "min"), ("high", "max")) if given.get(name) is not None}
    return numbers if all(math.isfinite(number) for number in numbers.values()) else None


_LAST_TO_FIRST: tuple[tuple[set, Callable[[Pointwise], dict[str, float] | None]], ...] = (
    ({aten.clamp_.default}, _bounds),
    ({aten.add_.Tensor, aten.add_.Scalar}, _number("term")),
    ({aten.mul_.Tensor, aten.mul_.Scalar}, _number("factor")),
)


def apply(edits: Sequence[Pointwise], piece: torch.Tensor) -> None:
    """Apply the edits to a piece of a fill."""
    for edit in edits:
        edit.op(piece, *edit.args[1:], **edit.kwargs)
