"""Planning of a step from its traced Program, cut as it would be compiled."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...capture import session
from ...capture.deferred import named_tensors
from ...capture.input_numbers import NUMBERS
from ...capture.recorder import DeferredStorage
from ...errors import BackendError
from ...init import shardings
from ...interpreter import Undo, paused_until
from ...lower import aten
from ...lower.estimate import Jaxprs, local_bytes, work_of
from ...lower.segments import Segment
from ...lower.sharding import ArraySharding, Axes
from ...program.graph import Value
from ..backend import Backend
from ..jax_support import x64
from ..mesh.mesh import SMALL, Mesh
from ..mesh.same_run import SameRunEdges
from ..mesh.segment_shardings import spec_of
from . import tracing
from .arguments import Arguments
from .functions import Function, computation
from .inputs import Inputs
from .owners import Owner, storage_or_itself
from .plan import PlannedArray, PlannedPart, SameRunCost, StepPlan
from .reads import READ, AssumedNumbers, Reads
from .segmentation import Segmentation, segment_step
from .traced_program import TracedProgram
from .tracing import TraceObserver


def plan_step(step: Callable[..., Any], arguments: Arguments, backend: Backend) -> StepPlan:
    """See `TracedStep.plan`."""
    if not backend.is_xla:
        raise BackendError(
            f'backend "{backend.name}" compiles nothing that could be planned. Use the backend "XLA"; for devices that '
            "do not exist, with mesh=jax.sharding.AbstractMesh(sizes, names) and validate_only=True."
        )
    with traced_only(step, arguments, backend, Reads(AssumedNumbers, runs_eagerly=False)) as traced:
        inputs = Inputs(backend, traced.owners, traced.numbers)
        plan = _Planner(traced, segment_step(traced, inputs, backend, same_run=False), inputs, backend).plan()
        if backend.same_run is not None:
            plan.same_run = _same_run(segment_step(traced, inputs, backend), backend.same_run)
        return plan


@contextmanager
def traced_only(
    step: Callable[..., Any], arguments: Arguments, backend: Backend, reads: Reads | None = None
) -> Iterator[TracedProgram]:
    """Context with the trace of a step that is not called; Python, weights and optimizers are left as they were.

    Args:
        reads: which values it may read.
    """
    with Undo() as undo, undo, session.tracing:
        paused_until(undo)
        observer = TraceObserver((step, *arguments.guarded(), *backend.models), [], False)
        traced = tracing.trace_step(step, arguments, backend, observer, (), (*NUMBERS, READ), reads, prints=False)
        try:
            if traced.raised is not None:
                raise traced.raised
            yield traced
        finally:
            tracing.abandon(traced, observer)


def _same_run(parts: Segmentation, shards: int) -> SameRunCost:
    """What it costs to compute a step by logical shards."""
    edges = parts.edges
    with x64(), aten.within(False):
        for function in parts.functions(edges).values():
            computation(function, edges)
    assert isinstance(edges, SameRunEdges)
    costs = [edges.costs[segment.function] for segment in parts.cut.segments]
    gathered: Counter[str] = Counter()
    for cost in costs:
        gathered.update(cost.gathered)
    return SameRunCost(shards, sum(c.passes for c in costs), sum(c.sent for c in costs), dict(gathered))


def names_of(traced: TracedProgram, backend: Backend) -> dict[Value, str]:
    """The names of inputs that are weights or optimizer state."""
    inputs = Inputs(backend, traced.owners, traced.numbers)
    return _Arrays(traced, inputs, backend, backend.mesh.axes if backend.mesh is not None else {}).names


class _Planner:
    """Walks through the segments of a traced step."""

    def __init__(self, traced: TracedProgram, parts: Segmentation, inputs: Inputs, backend: Backend) -> None:
        self._gradients: set[Value] = traced.optimizers.gradients
        self._axes: Axes = backend.mesh.axes if backend.mesh is not None else {}
        self._scatters = backend.mesh is None or backend.mesh.scatters
        self._arrays = _Arrays(traced, inputs, backend, self._axes)
        self._edges = parts.edges
        self._segments: Sequence[Segment] = parts.cut.segments
        outputs = parts.cut.outputs
        names = {outputs[name] for group in parts.groups.outputs for name in group}
        self._persistent = {*names, *parts.groups.state, *parts.groups.read}  # live before or after the step
        self._functions = parts.functions(parts.edges)
        self._jaxprs: Jaxprs = {}

    def plan(self) -> StepPlan:
        """Make the plan."""
        index = {number: i for i, number in enumerate(self._functions)}
        plan = StepPlan(
            axes=dict(self._axes),
            held=self._arrays.held,
            parts=[self._part(number, function) for number, function in self._functions.items()],
            order=[index[segment.function] for segment in self._segments],
            gradients=sum(one.bytes for one in self._arrays.held if one.name in self._arrays.trained),
        )
        self._find_peak(plan)
        return plan

    def _placed(self, value: Value | int) -> ArraySharding:
        if isinstance(value, int):
            return ArraySharding(())
        return ArraySharding(((),) * len(value.shape)) if self._edges is None else self._edges.placed(value)

    def _size(self, value: Value | int) -> int:
        """Bytes on each device."""
        if isinstance(value, int):
            return 4
        return local_bytes(value.shape, value.dtype.itemsize, self._placed(value).spec, self._axes)

    def _reused(self, segment: Segment) -> set[Value]:
        """The results that a segment writes to the memory of its arguments."""
        function = self._functions[segment.function]
        return {segment.outputs[i] for i in function.result_order[: function.reused]}

    def _part(self, number: int, function: Function) -> PlannedPart:
        segment = function.like
        names = self._arrays.names
        name, layers = _name_of([names[v] for v in segment.inputs if isinstance(v, Value) and v in names])
        placed = {v: self._placed(v) for v in (*segment.inputs, *segment.outputs) if isinstance(v, Value)}
        reused = self._reused(segment)
        return PlannedPart(
            name=name,
            turns=sum(one.function == number for one in self._segments),
            layers=layers,
            updates=function.reused > 0,
            work=work_of(segment, placed, self._axes, reused=reused, scatters=self._scatters, jaxprs=self._jaxprs),
            input_bytes=sum(map(self._size, segment.inputs)),
            output_bytes=sum(map(self._size, segment.outputs)),
            reused_bytes=sum(map(self._size, reused)),
            function=number,
        )

    def _find_peak(self, plan: StepPlan) -> None:
        """Walk through the segments in order: a result lives until its last read."""
        last_read = {value: n for n, segment in enumerate(self._segments) for value in segment.inputs}
        resident = {role: plan.bytes_of(role) for role in ("weights", "state", "batch")}
        live: dict[Value | int, int] = {}
        most = -1
        for n, segment in enumerate(self._segments):
            reused = self._reused(segment)
            live.update((value, self._size(value)) for value in segment.outputs if value not in reused)
            plan.live.append(sum(live.values()))
            scratch = plan.parts[plan.order[n]].work.scratch
            now = sum(resident.values()) + plan.live[n] + scratch
            if now > most:
                most = now
                gradients = sum(nbytes for value, nbytes in live.items() if value in self._gradients)
                plan.peak = {
                    **resident,
                    "gradients": gradients,
                    "activations": plan.live[n] - gradients,
                    "scratch": scratch,
                }
                plan.peak_part = plan.order[n]
            for value in (*segment.inputs, *segment.outputs):
                if last_read.get(value, n) <= n and value not in self._persistent:
                    live.pop(value, None)


class _Arrays:
    """The arrays that persist from step to step, and the arguments.

    Attributes:
        held: all of them.
        names: the names of the inputs that stand for them.
        trained: names of the parameters that get gradients.
    """

    def __init__(self, traced: TracedProgram, inputs: Inputs, backend: Backend, axes: Axes) -> None:
        self.held: list[PlannedArray] = []
        self.names: dict[Value, str] = {}
        self.trained: set[str] = set()
        self._backend, self._axes = backend, axes
        self._named: dict[int, str] = {}  # by the id of a storage, or of a tensor outside the backend
        self._add_models()
        self._add_state(traced)
        for value, owner in traced.owners.inputs.items():
            if value in traced.owners.arguments:
                self._add_argument(traced.owners.arguments[value], value, inputs.where.get(value))
            elif id(owner) in self._named:
                self.names[value] = self._named[id(owner)]

    def _add_models(self) -> None:
        self._of_parameter: dict[int, str] = {}
        for number, model in enumerate(self._backend.models):
            prefix = f"{number}." if len(self._backend.models) > 1 else ""
            for name, tensor, kind in named_tensors(model):
                self._add(prefix + name, tensor, "weights")
                self._of_parameter.setdefault(id(tensor), prefix + name)
                if kind == "parameter" and tensor.requires_grad:
                    self.trained.add(prefix + name)

    def _add_state(self, traced: TracedProgram) -> None:
        for optimizer in traced.optimizers.seen:
            for parameter, entries in optimizer.state.items():
                name = self._of_parameter.get(id(parameter), "a weight")
                for key, entry in entries.items():
                    if isinstance(entry, torch.Tensor):
                        self._add(f"{name}.{key}", entry, "state")

    def _add(self, name: str, tensor: torch.Tensor, role: str) -> None:
        owner = storage_or_itself(tensor)
        if id(owner) not in self._named:
            self._named[id(owner)] = name
            self.held.append(_array(name, role, owner, tensor, self._backend, self._axes))

    def _add_argument(self, number: int, value: Value, sharding: Any) -> None:
        spec = spec_of(sharding, len(value.shape)) if sharding is not None else ((),) * len(value.shape)
        nbytes = local_bytes(value.shape, value.dtype.itemsize, spec, self._axes)
        self.held.append(PlannedArray(f"argument {number}", "batch", tuple(value.shape), value.dtype, spec, nbytes))


def _array(name: str, role: str, owner: Owner, tensor: torch.Tensor, backend: Backend, axes: Axes) -> PlannedArray:
    value = owner.value if isinstance(owner, DeferredStorage) else owner
    shape, dtype = tuple(value.shape), value.dtype
    sharding = None
    if isinstance(owner, DeferredStorage) and backend.mesh is not None:
        sharding = owner.resident.sharding if owner.resident is not None else backend.mesh.storage_sharding(owner)
    spec = ((),) * len(shape) if sharding is None else spec_of(sharding, len(shape))
    cut = {axis for entry in spec for axis in entry}
    whole = tuple(axis for axis, size in axes.items() if axis not in cut and size > 1)
    nbytes = local_bytes(shape, dtype.itemsize, spec, axes)
    why = _why_replicated(tensor, shape, whole, backend.mesh) if whole and backend.mesh is not None else ""
    return PlannedArray(name, role, shape, dtype, spec, nbytes, whole, why)


def _why_replicated(tensor: torch.Tensor, shape: tuple[int, ...], whole: Sequence[str], mesh: Mesh) -> str:
    mark = shardings.mark_of(tensor)
    size = " x ".join(map(str, shape)) or "a number"
    reasons = []
    if mark is not None:
        named_axes = mark.named_axes
        indivisible = [axis for axis in whole if axis in named_axes]
        unnamed = [axis for axis in whole if axis not in named_axes]
        reasons += [f"no dimension left of {size} is divisible by {axis}={mesh.axes[axis]}" for axis in indivisible]
        reasons += [f"its spec does not name {axis}" for axis in unnamed]
    elif math.prod(shape) < SMALL:
        reasons.append(f"smaller than {SMALL:,} elements")
    else:
        data = shardings.sharding_axes(mesh.axes)
        replicas = [axis for axis in whole if axis in shardings.REPLICA_AXES]
        reasons += [f"{axis} is an axis of replicas, by its name" for axis in replicas]
        reasons += [f"no spec shards it over {axis}" for axis in whole if axis not in (*data, *replicas)]
        left = [axis for axis in whole if axis in data]
        if left:
            parts = math.prod(mesh.axes[axis] for axis in data)
            reasons.append(f"no dimension of {size} is divisible by {parts} ({' x '.join(data)})")
    return "; ".join(reasons)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _name_of(weights: Sequence[str]) -> tuple[str, int]:
    """A name for the modules with these weights, and the number of their layers."""
    tops = dict.fromkeys(_layer_of(name) for name in weights)
    numbers = {_NUMBER.search(name).group() for name in weights if _NUMBER.search(name)}  # type: ignore[union-attr]
    return ", ".join(tops) or "without weights", max(len(numbers), 1)


def _layer_of(name: str) -> str:
    """`model.layers.*` for `model.layers.3.mlp.up.weight`; `model.embed` for `model.embed.weight`."""
    match = _NUMBER.search(name)
    if match is not None:
        return name[: match.start()] + "*"
    for end in (".exp_avg", ".exp_avg_sq", ".step", ".momentum_buffer"):
        name = name.removesuffix(end)
    return name.rpartition(".")[0] or name
