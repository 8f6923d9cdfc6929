"""The work of a segment on one device: floating-point operations, memory traffic and collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ..program.graph import Value
from .scratch_memory import FusedKernel
from .sharding import Axes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class Sent(NamedTuple):
    """One collective operation.

    Attributes:
        kind: one of `KINDS`.
        axes: of the mesh, along which devices take part.
        bytes: of the array on each device where it is whole along these axes: after an all-gather, before a
            reduce-scatter.
        of: the Value that is sent.
        source: the line that wants it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    of: Value | None = None
    source: str = ""

    def on_link(self, sizes: Axes) -> float:
        """Bytes that each device sends, in the ring algorithms."""
        ways = math.prod(sizes[axis] for axis in self.axes)
        if self.kind == "collective-permute":
            return float(self.bytes)
        return self.bytes * (ways - 1) / ways * (2 if self.kind == "all-reduce" else 1)


@dataclass
class Work:
    """What one device does for one run of a segment.

    Attributes:
        matmul_flops: floating-point operations of matrix products and convolutions, two for a multiplication and an
            addition.
        other_flops: those of all else, one an element.
        sent: the collectives, in order.
        scratch: the most bytes of memory at a time for what is neither an input nor an output.
        kernels: what it computes in one go each, and what of memory that reads and writes.
    """

    matmul_flops: float = 0.0
    other_flops: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    scratch: int = 0
    kernels: list[FusedKernel] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """All of them."""
        return self.matmul_flops + self.other_flops

    @property
    def memory_bytes(self) -> int:
        """What it reads and writes in memory, but for what collectives do."""
        return sum(kernel.bytes for kernel in self.kernels)

    def seconds(self, flop_rate: float, memory_rate: float = math.inf) -> float:
        """How long it computes at least: each kernel by what it computes or by what it reads and writes, whichever
        takes longer."""
        by_kernels = sum(max(one.flops / flop_rate, one.bytes / memory_rate) for one in self.kernels)
        return max(self.flops / flop_rate, by_kernels)
