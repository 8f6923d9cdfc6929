"""What a step takes on each device of a mesh, there or not: from the traced step, cut as it would be compiled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...capture import session
from ...capture.deferred import named_tensors
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...errors import BackendError
from ...init import shardings
from ...lower.estimate import Jaxprs, Sent, Work, local_bytes, work_of
from ...lower.segments import Segment
from ...lower.sharding import Axes, Placed, Spec
from ...program.graph import Value
from ...uncollected import put_off
from ...undo import Undo
from ..backend import Backend
from ..mesh.edges import spec_of
from ..mesh.mesh import SMALL, Mesh
from . import tracing
from .arguments import Arguments
from .compiling import Parts, parts_of
from .inputs import Inputs
from .segmented import Function, functions_of
from .surroundings import Surroundings
from .traced import TracedProgram

ROLES = ("weights", "state", "gradients", "activations", "batch", "scratch")


class Held(NamedTuple):
    """An array that lives from step to step, or an argument.

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
class Part:
    """Segments that compute the same: layers, mostly.

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
    """A roofline: how long a step takes at least, by what is computed and what is sent.

    Attributes:
        compute: all floating-point operations at the given rate.
        links: what is sent along each axis, at the bandwidth of its link.
        apart: one after the other.
        overlapped: each segment's communication beside its computation.
        sending: of each of the plan's parts, what one turn of it sends.
    """

    compute: float
    links: dict[str, float]
    apart: float
    overlapped: float
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
    held: list[Held]
    parts: list[Part]
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
        """Bytes on each device at the fullest moment."""
        return sum(self.peak.values())

    @property
    def matmul_flops(self) -> float:
        """Floating-point operations of a step's matrix products and convolutions on each device."""
        return sum(part.turns * part.work.matmul_flops for part in self.parts)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step on each device."""
        return sum(part.turns * part.work.flops for part in self.parts)

    def sent(self) -> list[Sent]:
        """What each device sends at a step."""
        return [one for part in self.parts for one in part.work.sent * part.turns]

    def collectives(self, part: Part | None = None) -> list[dict[str, Any]]:
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

    def replicated(self) -> list[Held]:
        """What is replicated along some axis, the largest first."""
        return sorted((one for one in self.held if one.whole and one.role != "batch"), key=lambda one: -one.bytes)

    def seconds(self, flop_rate: float, links: Mapping[str, float]) -> Seconds:
        """How long a step takes at least.

        Args:
            flop_rate: floating-point operations that a device does in a second.
            links: bytes that a device sends in a second, by axis; under "" for axes that are not named. What goes along
                several axes goes at the slowest.
        """

        def rate(axes: Iterable[str]) -> float:
            return min(links.get(axis, links.get("", math.inf)) for axis in axes)

        by_axes: dict[str, float] = {}
        overlapped, each = 0.0, []
        for part in self.parts:
            sending = 0.0
            for one in part.work.sent:
                took = one.on_link(self.axes) / rate(one.axes)
                sending += took
                name = "+".join(one.axes)
                by_axes[name] = by_axes.get(name, 0.0) + part.turns * took
            each.append(sending)
            overlapped += part.turns * max(part.work.flops / flop_rate, sending)
        compute = self.flops / flop_rate
        return Seconds(compute, by_axes, compute + sum(by_axes.values()), overlapped, each)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
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
            "sent": [{**row, "axes": list(row["axes"])} for row in self.collectives()],
            "parts": [
                {
                    "name": part.name,
                    "turns": part.turns,
                    "layers": part.layers,
                    "updates": part.updates,
                    "flops": part.work.flops,
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


def plan_step(step: Callable[..., Any], arguments: Arguments, backend: Backend) -> StepPlan:
    """See `TracedStep.plan`."""
    if not backend.is_xla:
        raise BackendError(
            f'backend "{backend.name}" compiles nothing that could be planned. Make the backend "XLA", for a mesh that '
            "is not there with mesh=jax.sharding.AbstractMesh(sizes, names) and validate_only=True."
        )
    with Undo() as undo, undo, session.tracing:
        put_off(undo)
        around = Surroundings((step, *arguments.own(), *backend.models), [], False)
        traced = tracing.trace_step(step, arguments, backend, around)
        try:
            if traced.raised is not None:
                raise traced.raised
            inputs = Inputs(backend, traced.owners, traced.optimizers.groups.inputs)
            return _planned(traced, parts_of(traced, inputs, backend), inputs, backend)
        finally:
            tracing.abandon(traced, around)


def _planned(traced: TracedProgram, parts: Parts, inputs: Inputs, backend: Backend) -> StepPlan:
    axes = backend.mesh.axes if backend.mesh is not None else {}
    names, held = _held(traced, inputs, backend, axes)
    edges = parts.edges

    def placed(value: Value | int) -> Placed:
        if isinstance(value, int):
            return Placed(())
        return Placed(((),) * len(value.shape)) if edges is None else edges.placed(value)

    def size(value: Value | int) -> int:
        if isinstance(value, int):
            return 4
        return local_bytes(value.shape, value.dtype.itemsize, placed(value).spec, axes)

    segments, outputs = parts.cut.segments, parts.cut.outputs
    kept = {outputs[name] for group in parts.groups for name in group}
    new = [outputs[name] for name in parts.groups[0]]
    functions = functions_of(segments, dict(zip(parts.state, new, strict=True)), kept, edges)
    index = {number: i for i, number in enumerate(functions)}
    jaxprs: Jaxprs = {}
    scatters = backend.mesh is None or backend.mesh.scatters
    found = [
        _part(number, function, segments, names, placed, size, axes, scatters, jaxprs)
        for number, function in functions.items()
    ]
    plan = StepPlan(
        axes=dict(axes),
        held=held,
        parts=found,
        order=[index[segment.function] for segment in segments],
        gradients=sum(one.bytes for one in held if one.name in names.trained),
    )
    gradients = traced.optimizers.given
    _find_peak(plan, segments, functions, kept, set(parts.state) | set(parts.read), gradients, size)
    return plan


class _Names(NamedTuple):
    """Names of the step's inputs, and of the parameters that get gradients."""

    of: dict[Value, str]
    trained: set[str]


def _held(traced: TracedProgram, inputs: Inputs, backend: Backend, axes: Axes) -> tuple[_Names, list[Held]]:
    names: dict[int, str] = {}  # by the id of a storage or of a tensor from outside
    found: dict[int, Held] = {}
    trained: set[str] = set()
    values: dict[Value, str] = {}

    def add(name: str, tensor: torch.Tensor, role: str) -> None:
        owner = tensor._store if type(tensor) is DeferredTensor else tensor
        if id(owner) in names:
            return
        names[id(owner)] = name
        found[id(owner)] = _array(name, role, owner, tensor, backend, axes)

    by_parameter: dict[int, str] = {}
    for number, model in enumerate(backend.models):
        prefix = f"{number}." if len(backend.models) > 1 else ""
        for name, tensor, kind in named_tensors(model):
            add(prefix + name, tensor, "weights")
            by_parameter.setdefault(id(tensor), prefix + name)
            if kind == "parameter" and tensor.requires_grad:
                trained.add(prefix + name)
    for optimizer in traced.optimizers.seen:
        for parameter, entries in optimizer.state.items():
            name = by_parameter.get(id(parameter), "a weight")
            for key, entry in entries.items():
                if isinstance(entry, torch.Tensor):
                    add(f"{name}.{key}", entry, "state")
    for value, owner in traced.owners.inputs.items():
        where = inputs.where.get(value)
        if value in traced.owners.arguments:
            spec = spec_of(where, len(value.shape)) if where is not None else ((),) * len(value.shape)
            label = f"argument {traced.owners.arguments[value]}"
            nbytes = local_bytes(value.shape, value.dtype.itemsize, spec, axes)
            found[id(value)] = Held(label, "batch", tuple(value.shape), value.dtype, spec, nbytes)
        elif id(owner) in names:
            values[value] = names[id(owner)]
    return _Names(values, trained), list(found.values())


def _array(
    name: str, role: str, owner: DeferredStorage | torch.Tensor, tensor: torch.Tensor, backend: Backend, axes: Axes
) -> Held:
    value = owner.value if isinstance(owner, DeferredStorage) else owner
    shape, dtype = tuple(value.shape), value.dtype
    sharding = None
    if isinstance(owner, DeferredStorage) and backend.mesh is not None:
        sharding = owner.resident.sharding if owner.resident is not None else backend.mesh.of_store(owner)
    spec = ((),) * len(shape) if sharding is None else spec_of(sharding, len(shape))
    cut = {axis for entry in spec for axis in entry}
    whole = tuple(axis for axis, size in axes.items() if axis not in cut and size > 1)
    nbytes = local_bytes(shape, dtype.itemsize, spec, axes)
    why = _why_whole(tensor, shape, whole, backend.mesh) if whole and backend.mesh is not None else ""
    return Held(name, role, shape, dtype, spec, nbytes, whole, why)


def _why_whole(tensor: torch.Tensor, shape: tuple[int, ...], whole: Sequence[str], mesh: Mesh) -> str:
    mark = shardings.mark_of(tensor)
    said = " x ".join(map(str, shape)) or "a number"
    reasons = []
    if mark is not None:
        wanted = {a for entry in mark.spec if entry for a in ((entry,) if isinstance(entry, str) else entry)}
        refused = [axis for axis in whole if axis in wanted]
        unsaid = [axis for axis in whole if axis not in wanted]
        reasons += [f"no dimension left of {said} is divisible by {axis}={mesh.axes[axis]}" for axis in refused]
        reasons += [f"its spec does not name {axis}" for axis in unsaid]
    elif math.prod(shape) < SMALL:
        reasons.append(f"smaller than {SMALL:,} elements")
    else:
        data = mesh.data or tuple(mesh.axes)
        reasons += [f"no spec cuts it over {axis}" for axis in whole if axis not in data]
        left = [axis for axis in whole if axis in data]
        if left:
            parts = math.prod(mesh.axes[axis] for axis in data)
            reasons.append(f"no dimension of {said} is divisible by {parts} ({' x '.join(data)})")
    return "; ".join(reasons)


def _part(
    number: int,
    function: Function,
    segments: Sequence[Segment],
    names: _Names,
    placed: Callable[[Value | int], Placed],
    size: Callable[[Value | int], int],
    axes: Axes,
    scatters: bool,
    jaxprs: Jaxprs,
) -> Part:
    segment = function.like
    mine = [one for one in segments if one.function == number]
    known = {v: placed(v) for v in (*segment.inputs, *segment.outputs) if isinstance(v, Value)}
    reused = {segment.outputs[i] for i in function.gives[: function.reused]}
    read = [names.of[v] for v in segment.inputs if isinstance(v, Value) and v in names.of]
    name, layers = _name_of(read)
    return Part(
        name=name,
        turns=len(mine),
        layers=layers,
        updates=function.reused > 0,
        work=work_of(segment, known, axes, reused=reused, scatters=scatters, jaxprs=jaxprs),
        given=sum(map(size, segment.inputs)),
        made=sum(map(size, segment.outputs)),
        reused=sum(map(size, reused)),
        function=number,
    )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _name_of(weights: Sequence[str]) -> tuple[str, int]:
    """What modules with these weights are called in a word, and how many layers they are."""
    tops = dict.fromkeys(_top(name) for name in weights)
    numbers = {_NUMBER.search(name).group() for name in weights if _NUMBER.search(name)}  # type: ignore[union-attr]
    return ", ".join(tops) or "what reads no weights", max(len(numbers), 1)


def _top(name: str) -> str:
    """`model.layers.*` for `model.layers.3.mlp.up.weight`; `model.embed` for `model.embed.weight`."""
    found = _NUMBER.search(name)
    if found is not None:
        return name[: found.start()] + "*"
    for end in (".exp_avg", ".exp_avg_sq", ".step", ".momentum_buffer"):
        name = name.removesuffix(end)
    return name.rpartition(".")[0] or name


def _find_peak(
    plan: StepPlan,
    segments: Sequence[Segment],
    functions: Mapping[int, Function],
    kept: set[Value],
    given: set[Value],
    gradients: set[Value],
    size: Callable[[Value | int], int],
) -> None:
    """Go through the turns as a step does: what a segment gives lives until it was read last."""
    last = {value: n for n, segment in enumerate(segments) for value in segment.inputs}
    resident = {role: plan.bytes_of(role) for role in ("weights", "state", "batch")}
    live: dict[Value, int] = {}
    index = {part.function: i for i, part in enumerate(plan.parts)}
    most = -1
    for n, segment in enumerate(segments):
        function, i = functions[segment.function], index[segment.function]
        reused = {segment.outputs[j] for j in function.gives[: function.reused]}
        for value in segment.outputs:
            if value not in reused:
                live[value] = size(value)
        scratch = plan.parts[i].work.scratch
        plan.live.append(sum(live.values()))
        now = sum(resident.values()) + sum(live.values()) + scratch
        if now > most:
            most = now
            held = sum(nbytes for value, nbytes in live.items() if value in gradients)
            plan.peak = {
                **resident,
                "gradients": held,
                "activations": sum(live.values()) - held,
                "scratch": scratch,
            }
            plan.peak_part = i
        for one in (*segment.inputs, *segment.outputs):
            if isinstance(one, Value) and last.get(one, n) <= n and one not in kept and one not in given:
                live.pop(one, None)
