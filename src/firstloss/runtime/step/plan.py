"""`StepPlan`: the memory, operations and communication of a step on each device of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...lower.sharding import Spec
from ...lower.work import Sent, Work

ROLES = ("weights", "state", "gradients", "activations", "batch", "scratch")


class PlannedArray(NamedTuple):
    """An array that persists from step to step, or an argument.

    Attributes:
        role: "weights", "state" (the optimizer's, and all else that a step changes), or "batch".
        bytes: on each device.
        whole: the axes along which devices hold copies.
        why: why they do; empty, if they do not.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    bytes: int
    whole: tuple[str, ...] = ()
    why: str = ""


@dataclass
class PlannedPart:
    """Identical segments: layers, mostly.

    Attributes:
        name: of the modules whose weights they read, numbers as `*`.
        turns: how many there are in a step.
        layers: how many layers one of them is.
        updates: whether they update weights.
        work: what a device does for one of them.
        given, made, reused: bytes that one takes, gives, and gives in the memory of what it took.
        function: their number.
    """

    name: str
    turns: int
    layers: int
    updates: bool
    work: Work
    given: int
    made: int
    reused: int
    function: int


@dataclass
class Seconds:
    """A roofline: a lower bound of the time of a step, from computation, memory traffic and communication.

    Attributes:
        compute: all floating-point operations at the given rate.
        memory: what is read and written in memory, at its bandwidth; 0 if that is not given.
        links: what is sent along each axis, at the bandwidth of its link.
        apart: one after the other.
        overlapped: each segment's communication beside its computation.
        computing: of each of the plan's parts, one turn of it: each of its kernels by its operations, or by its
            memory, whichever takes longer.
        sending: of each of the plan's parts, what one turn of it sends.
    """

    compute: float
    memory: float
    links: dict[str, float]
    apart: float
    overlapped: float
    computing: list[float]
    sending: list[float]


@dataclass
class StepPlan:
    """What one call of a step takes on each device.

    Attributes:
        axes: the mesh's.
        held: weights, state and batch.
        parts: the step's segments by what they compute, in the order of their first turn.
        order: of the turns, which of `parts` each is.
        gradients: bytes of all gradients, if they were held at once.
        live: bytes of what segments have made for others or for the next step, at each turn.
        peak: bytes at the fullest moment, by role; `gradients` those which are held then.
        peak_part: which of `parts` runs then.
    """

    axes: dict[str, int]
    held: list[PlannedArray]
    parts: list[PlannedPart]
    order: list[int]
    gradients: int
    live: list[int] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    peak_part: int = 0

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.axes.values())

    def bytes_of(self, role: str) -> int:
        """Bytes of weights, state or batch on each device."""
        return sum(one.bytes for one in self.held if one.role == role)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on each device."""
        return sum(self.peak.values())

    @property
    def matmul_flops(self) -> float:
        """Floating-point operations of a step's matrix products and convolutions on each device."""
        return sum(part.turns * part.work.matmul_flops for part in self.parts)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step on each device."""
        return sum(part.turns * part.work.flops for part in self.parts)

    @property
    def memory_bytes(self) -> int:
        """The memory traffic of a step's kernels on each device, as XLA fuses operations."""
        return sum(part.turns * part.work.memory_bytes for part in self.parts)

    def sent(self) -> list[Sent]:
        """The bytes that each device sends at a step."""
        return [one for part in self.parts for one in part.work.sent * part.turns]

    def collectives(self, part: PlannedPart | None = None) -> list[dict[str, Any]]:
        """What is sent, by kind and axes: how many operations, the bytes of their whole arrays, and the bytes that each
        device sends; at a step, or at one turn of `part`."""
        found: dict[tuple, dict[str, Any]] = {}
        for one in self.sent() if part is None else part.work.sent:
            row = found.setdefault(
                (one.kind, one.axes), {"kind": one.kind, "axes": one.axes, "count": 0, "bytes": 0, "sent": 0.0}
            )
            row["count"] += 1
            row["bytes"] += one.bytes
            row["sent"] += one.on_link(self.axes)
        return sorted(found.values(), key=lambda row: -row["sent"])

    def replicated(self) -> list[PlannedArray]:
        """The arrays replicated along some axis, the largest first."""
        return sorted((one for one in self.held if one.whole and one.role != "batch"), key=lambda one: -one.bytes)

    def seconds(self, flop_rate: float, links: Mapping[str, float], memory_rate: float = math.inf) -> Seconds:
        """A lower bound of the time of a step.

        Args:
            flop_rate: floating-point operations that a device does in a second.
            links: bytes that a device sends in a second, by axis; under "" for axes that are not named. What goes along
                several axes goes at the slowest.
            memory_rate: bytes that a device reads and writes in its memory in a second.
        """

        def rate(axes: Iterable[str]) -> float:
            return min(links.get(axis, links.get("", math.inf)) for axis in axes)

        by_axes: dict[str, float] = {}
        overlapped, each = 0.0, []
        computing = [part.work.seconds(flop_rate, memory_rate) for part in self.parts]
        for part, busy in zip(self.parts, computing, strict=True):
            sending = 0.0
            for one in part.work.sent:
                took = one.on_link(self.axes) / rate(one.axes)
                sending += took
                name = "+".join(one.axes)
                by_axes[name] = by_axes.get(name, 0.0) + part.turns * took
            each.append(sending)
            overlapped += part.turns * max(busy, sending)
        apart = sum(part.turns * busy for part, busy in zip(self.parts, computing, strict=True))
        apart += sum(by_axes.values())
        memory = self.memory_bytes / memory_rate
        return Seconds(self.flops / flop_rate, memory, by_axes, apart, overlapped, computing, each)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "mesh": self.axes,
            "devices": self.devices,
            "bytes": {
                **{role: self.bytes_of(role) for role in ("weights", "state", "batch")},
                "gradients": self.gradients,
                "peak": self.peak_bytes,
                "at_peak": self.peak,
            },
            "flops": self.flops,
            "matmul_flops": self.matmul_flops,
            "memory_bytes": self.memory_bytes,
            "sent": [{**row, "axes": list(row["axes"])} for row in self.collectives()],
            "parts": [
                {
                    "name": part.name,
                    "turns": part.turns,
                    "layers": part.layers,
                    "updates": part.updates,
                    "flops": part.work.flops,
                    "memory_bytes": part.work.memory_bytes,
                    "scratch": part.work.scratch,
                    "sent": [{**row, "axes": list(row["axes"])} for row in self.collectives(part)],
                }
                for part in self.parts
            ],
            "arrays": [
                {
                    "name": one.name,
                    "role": one.role,
                    "shape": list(one.shape),
                    "dtype": str(one.dtype).removeprefix("torch."),
                    "cut": [list(cut) for cut in one.spec],
                    "bytes": one.bytes,
                    "copies_along": list(one.whole),
                    "why": one.why,
                }
                for one in self.held
            ],
        }
