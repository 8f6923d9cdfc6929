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
    """A collective operation.

    Attributes:
        kind: one of `KINDS`.
        axes: the mesh axes of the participating devices.
        bytes: of the array on each device, unsharded along these axes: after an all-gather, before a reduce-scatter.
        of: the Value that is sent.
        source: the source line that needs it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    of: Value | None = None
    source: str = ""

    def on_link(self, sizes: Axes) -> float:
        """The bytes that each device sends, with ring algorithms."""
        ways = math.prod(sizes[axis] for axis in self.axes)
        if self.kind == "collective-permute":
            return float(self.bytes)
        return self.bytes * (ways - 1) / ways * (2 if self.kind == "all-reduce" else 1)


@dataclass
class Work:
    """The work of one device for one run of a segment.

    Attributes:
        matmul_flops: floating-point operations of matrix products and convolutions; a multiply-add counts as two.
        other_flops: those of all other operations, one per element.
        sent: the collectives, in order.
        scratch: peak bytes of memory for values that are neither inputs nor outputs.
        kernels: the fused kernels, with the memory that they read and write.
    """

    matmul_flops: float = 0.0
    other_flops: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    scratch: int = 0
    kernels: list[FusedKernel] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.matmul_flops + self.other_flops

    @property
    def memory_bytes(self) -> int:
        """The bytes read and written in memory, without collectives."""
        return sum(kernel.bytes for kernel in self.kernels)

    def seconds(self, flop_rate: float, memory_rate: float = math.inf) -> float:
        """A lower bound of the computing time: each kernel takes as long as its arithmetic or its memory traffic."""
        by_kernels = sum(max(kernel.flops / flop_rate, kernel.bytes / memory_rate) for kernel in self.kernels)
        return max(self.flops / flop_rate, by_kernels)
