"""From a `TracedProgram` to what computes it: lowered, cut where it repeats, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from ... import timeline
from ...capture.recorder import DeferredStorage
from ...errors import BackendError, LoweringError
from ...lower import program as lowering
from ...lower.program import view_of
from ...lower.segments import Cut, cut, uncut
from ...program.graph import Value
from ...program.program import Program
from ..backend import Backend
from ..mesh.edges import Edges
from .first_loss import FirstLoss
from .inputs import Inputs
from .segmented import SegmentedStep
from .traced import TracedProgram


def compile_step(traced: TracedProgram, inputs: Inputs, backend: Backend) -> SegmentedStep:
    """What is called with the state that the step changes, the rest of its inputs and a seed, and returns new state,
    what the step leaves, and results. The state is donated, so that its memory is updated in place.

    Raises:
        BackendError: for a mesh that is not there.
        LoweringError: for operations that have no lowering.
    """
    if backend.mesh is not None and not backend.mesh.is_there:
        raise BackendError(
            f"{traced.name} cannot be compiled for an AbstractMesh, whose devices are not there: only planned, as "
            f"{traced.name}.plan(batch). Give the backend sizes of axes, as mesh={backend.mesh.axes}."
        )
    missing = lowering.unsupported(traced.program)
    if missing:
        lines = [f"{op} (first at {nodes[0].source})" for op, nodes in missing.items()]
        raise LoweringError(
            "the step uses operations that have no lowering to StableHLO: "
            + "; ".join(lines)
            + ". Write those lines with other operations, give an operation of your own a lowering with "
            "firstloss.register_lowering, or run on backend 'CPU'."
        )
    with timeline.span("lower"):
        parts = parts_of(traced, inputs, backend)
    first_loss = _first_loss(traced, traced.results, backend)
    state, read, groups = parts.state, parts.read, parts.groups
    compiles = not backend.validate_only
    return SegmentedStep(traced.name, parts.cut, state, read, groups, first_loss, parts.edges, compiles)


class Parts(NamedTuple):
    """A traced step in segments.

    Attributes:
        state: the inputs that it changes; what they become is the first of `groups`.
        read: the others.
        groups: names of outputs: new state, what the step leaves, results.
        edges: on a mesh, the shardings of what crosses from one segment to another.
    """

    cut: Cut
    state: list[Value]
    read: list[Value]
    groups: tuple[Sequence[str], Sequence[str], Sequence[str]]
    edges: Edges | None


def parts_of(traced: TracedProgram, inputs: Inputs, backend: Backend) -> Parts:
    """Cut a step, and find the shardings of what crosses the cuts."""
    program, mesh = traced.program, backend.mesh
    changed, read = list(traced.owners.changed), traced.owners.read
    new, made, names = [f"new{i}" for i in range(len(changed))], traced.outputs.made, traced.results
    apart = _apart(program, dict(zip(new, changed, strict=True)))
    pieces = cut(program, names, apart) or uncut(program, apart)
    edges = None
    if mesh is not None:
        outputs = {**dict(zip(new, (inputs.where[v] for v in changed), strict=True)), **traced.outputs.where}
        if mesh.of_results() is not None:
            outputs |= dict.fromkeys(names, mesh.of_results())
        wanted = {pieces.outputs[name]: sharding for name, sharding in outputs.items()}
        edges = Edges(pieces, mesh, inputs.where, traced.owners.arguments, wanted)
        pieces = edges.cut
    return Parts(pieces, changed, read, (new, made, names), edges)


def _apart(program: Program, renewed: Mapping[str, Value]) -> set[str]:
    """Names of outputs that are the same Value as an input or another output: each gets an array of its own.

    Args:
        renewed: for outputs that are an input's new content, that input; it may be the old one.
    """
    taken = set(program.inputs.values())
    found = set()
    for name, ref in program.outputs.items():
        if view_of(ref) is not None or ref.value is renewed.get(name):
            continue
        if ref.value in taken:
            found.add(name)
        taken.add(ref.value)
    return found


def _first_loss(traced: TracedProgram, names: Sequence[str], backend: Backend) -> FirstLoss | None:
    """What computes the results of the first step without a compiler: that of new weights, not of those which a
    checkpoint had, so that a run that goes on has the losses of one that was never interrupted."""
    if backend.first_loss != "eager" or backend.stepped or traced.raised is not None:
        return None
    if backend.compile_only or backend.validate_only or jax.process_count() > 1:  # each process has some of the parts
        return None
    found = FirstLoss(traced.program, names)
    owners = [traced.owners.inputs[value] for value in found.inputs]
    weights = [owner for owner in owners if isinstance(owner, DeferredStorage)]
    fresh = all(owner.resident is None or owner.resident.fresh for owner in weights)
    return found if weights and fresh and found.possible else None
