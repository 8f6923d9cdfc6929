"""Control flow in a Program: a function of control flow is a region, and the whole is one operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .graph import Value
    from .program import Program

Tensor = torch.Tensor


class Region(NamedTuple):
    """A captured function of control flow.

    Attributes:
        program: with the outputs in order.
        inputs: the Values of its arguments, then those of the tensors from outside that it reads.
        lifted: the number of these tensors.
        draws: the number of its random operations.
    """

    program: Program
    inputs: list[Value]
    lifted: int
    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    draws: int


class Flow(NamedTuple):
    """The attributes of a `firstloss::region`: "cond" has two regions, "while" a condition and a body, "scan" a body.

    The operands are those that all regions share (cond: the predicate first; scan: `carried` tensors, then the
    `scanned` ones), then those that each region lifted.
    """

    kind: str
    regions: tuple[Region, ...]
    carried: int
    scanned: int
    reverse: bool
    outputs: list[tuple[tuple[int, ...], torch.dtype]]


FLOWS: dict[int, Flow] = {}


def _shapes(operands: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in FLOWS[number].outputs]


# An operation has the number of its Flow in FLOWS: see `capture/control_flow.py`.
_LIBRARY = torch.library.Library("firstloss", "FRAGMENT")
_LIBRARY.define("region(Tensor[] operands, int number) -> Tensor[]")
_LIBRARY.define(
    "region_that_draws(Tensor[] operands, int number) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)
_LIBRARY.impl("region", _shapes, "Meta")
_LIBRARY.impl("region_that_draws", _shapes, "Meta")

region: Any = torch.ops.firstloss.region.default
region_that_draws: Any = torch.ops.firstloss.region_that_draws.default
