"""Firstloss's own operations, which a Program may contain besides ATen's."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..compat.patches import original
from .graph import Value
from .program import Program

Tensor = torch.Tensor


class Region(NamedTuple):
    """A captured function of control flow.

    Attributes:
        program: with the outputs in order.
        inputs: the Values of its arguments, then those of `lifted`.
        lifted: the tensors from outside that it reads.
        draws: the number of its random operations.
    """

    program: Program
    inputs: list[Value]
    lifted: list[Tensor]
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


_LIBRARY = torch.library.Library("firstloss", "DEF")
_SEEDED = (torch.Tag.nondeterministic_seeded,)


def _shapes(operands: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in FLOWS[number].outputs]


_TRUNC_NORMAL = "torch.nn.init._no_grad_trunc_normal_"
# `torch.nn.init.trunc_normal_`, whose loop is data-dependent: see `capture/trunc_normal.py`.
_LIBRARY.define(
    "trunc_normal_(Tensor(a!) self, float mean, float std, float a, float b, *, Generator? generator=None)"
    " -> Tensor(a!)",
    tags=_SEEDED,
)
_LIBRARY.impl("trunc_normal_", lambda *args, **kwargs: original(_TRUNC_NORMAL)(*args, **kwargs), "CPU")
# An optimization barrier: see `capture/activation_checkpointing.py`.
_LIBRARY.define("barrier(Tensor[] xs, Tensor after) -> Tensor[]")
_LIBRARY.impl("barrier", lambda xs, after: [torch.empty_like(x) for x in xs], "Meta")
# Control flow, by its number in FLOWS: see `capture/control_flow.py`.
_LIBRARY.define("region(Tensor[] operands, int number) -> Tensor[]")
_LIBRARY.define("region_that_draws(Tensor[] operands, int number) -> Tensor[]", tags=_SEEDED)
_LIBRARY.impl("region", _shapes, "Meta")
_LIBRARY.impl("region_that_draws", _shapes, "Meta")

trunc_normal_ = torch.ops.firstloss.trunc_normal_.default
barrier = torch.ops.firstloss.barrier.default
region = torch.ops.firstloss.region.default
region_that_draws = torch.ops.firstloss.region_that_draws.default
