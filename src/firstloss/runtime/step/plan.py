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
        role: "weights", "state" (the optimizer's, and everything else that a step changes), or "batch".
        bytes: on each device.
        whole: the axes along which it is replicated.
        why: why it is replicated; empty if it is not.
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
    """Equal segments, mostly layers.

    Attributes:
        name: of the modules whose weights they read, with numbers as `*`.
        turns: how often the segment runs in a step.
        layers: how many layers the segment has.
        updates: whether it updates weights.
        work: what a device does for one run.
        input_bytes, output_bytes, reused_bytes: of one run's inputs, outputs, and outputs in the memory of inputs.
        function: the segments' function number.
    """

    name: str
    turns: int
    layers: int
    updates: bool
    work: Work
    input_bytes: int
    output_bytes: int
    reused_bytes: int
    function: int


@dataclass
class Seconds:
    """A roofline: a lower bound of the time of a step, from computation, memory traffic and communication.

    Attributes:
        compute: all floating-point operations at the given rate.
        memory: all memory traffic at the given bandwidth; 0 without one.
        links: communication along each axis, at the bandwidth of its link.
        apart: without overlap of communication and computation.
        overlapped: with each segment's communication overlapped by its computation.
        computing: for each of the plan's parts, one run: for each of its kernels the arithmetic or the memory traffic,
            whichever takes longer.
        sending: for each of the plan's parts, the communication of one run.
    """

    compute: float
    memory: float
    links: dict[str, float]
    apart: float
    overlapped: float
    computing: list[float]
    sending: list[float]


class SameRunCost(NamedTuple):
    """What `same_run` takes in place of the plan's own computation and communication.

    Attributes:
        shards: the logical shards of a step.
        passes: how often a device goes through its logical shards.
        sent: bytes that each device sends, weights and sums.
        gathered: bytes of values of the batch that each device gathers whole, by the lines that need them so.
    """

    shards: int
    passes: int
    sent: float
    gathered: dict[str, int]

    def __str__(self) -> str:
        text = f"{self.shards} logical shards in {self.passes} passes, sends {self.sent:,.0f} bytes"
        whole = [f"gathers {size:,} bytes of the batch for {line or 'it'}" for line, size in self.gathered.items()]
        return "; ".join([text.replace(" in 1 passes", " in 1 pass"), *whole])


@dataclass
class StepPlan:
    """The resources of one call of a step on each device.

    Attributes:
        axes: the mesh's axes.
        held: weights, state and batch.
        parts: the step's distinct segments, in the order of their first run.
        order: for each run, the index in `parts`.
        gradients: bytes of all gradients, if they were live at once.
        live: bytes of segments' outputs for others or for the next step, at each run.
        peak: bytes at the peak, by role; `gradients` are those that are live then.
        peak_part: the index in `parts` of the segment that runs at the peak.
        same_run: for a backend with `same_run`, what this takes instead; all else is of the step as XLA divides it.
    """

    axes: dict[str, int]
    held: list[PlannedArray]
    parts: list[PlannedPart]
    order: list[int]
    gradients: int
    live: list[int] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    peak_part: int = 0
    same_run: SameRunCost | None = None

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.axes.items())
        head = f"each device of {mesh}, per step" if mesh else "the device, per step"
        rows = [(role, f"{self.bytes_of(role):,} bytes") for role in ("weights", "state", "batch")]
        rows.append(("at the peak", f"{self.peak_bytes:,} bytes, {self.peak.get('gradients', 0):,} of them gradients"))
        rows.append(("computes", f"{self.flops:,.0f} floating-point operations, {self.matmul_flops:,.0f} in products"))
        rows.append(("kernels move", f"{self.memory_bytes:,} bytes"))
        for row in self.collectives():
            name, times = (
                f"{row['kind']} along {'+'.join(row['axes'])}",
                "" if row["count"] == 1 else f" in {row['count']}",
            )
            rows.append((name, f"sends {row['sent']:,.0f} bytes{times}"))
        if self.same_run is not None:
            rows.append(("as the same run", str(self.same_run)))
        width = max(len(name) for name, _ in rows)
        return "\n".join([head, *(f"  {name:{width}}  {text}" for name, text in rows)])

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    def bytes_of(self, role: str) -> int:
        """Bytes of weights, state or batch on each device."""
        return sum(array.bytes for array in self.held if array.role == role)

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
        """The memory traffic of a step's kernels on each device, given XLA's fusion."""
        return sum(part.turns * part.work.memory_bytes for part in self.parts)

    def sent(self) -> list[Sent]:
        """The collectives of a step."""
        return [one for part in self.parts for one in part.work.sent * part.turns]

    def collectives(self, part: PlannedPart | None = None) -> list[dict[str, Any]]:
        """Collectives by kind and axes: their number, the bytes of their whole arrays, and the bytes that each device
        sends; in a step, or in one run of `part`."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for collective in self.sent() if part is None else part.work.sent:
            row = rows.setdefault(
                (collective.kind, collective.axes),
                {"kind": collective.kind, "axes": collective.axes, "count": 0, "bytes": 0, "sent": 0.0},
            )
            row["count"] += 1
            row["bytes"] += collective.bytes
            row["sent"] += collective.on_link(self.axes)
        return sorted(rows.values(), key=lambda row: -row["sent"])

    def replicated(self) -> list[PlannedArray]:
        """The arrays replicated along some axis, the largest first."""
        return sorted((one for one in self.held if one.whole and one.role != "batch"), key=lambda one: -one.bytes)

    def seconds(self, flop_rate: float, links: Mapping[str, float], memory_rate: float = math.inf) -> Seconds:
        """A lower bound of the time of a step.

        Args:
            flop_rate: floating-point operations per second of a device.
            links: bytes per second that a device sends, by axis; under "" for all other axes. Communication along
                several axes takes the slowest.
            memory_rate: a device's memory bandwidth in bytes per second.
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
        sequential = sum(part.turns * busy for part, busy in zip(self.parts, computing, strict=True))
        sequential += sum(by_axes.values())
        memory = self.memory_bytes / memory_rate
        return Seconds(self.flops / flop_rate, memory, by_axes, sequential, overlapped, computing, each)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
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
