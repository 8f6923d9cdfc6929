"""Segmentation of a traced step into parts that are lowered and compiled separately."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import jax

from ... import timeline
from ...errors import LoweringError
from ...lower import segments
from ...lower.jaxprs import jaxpr_of
from ...lower.program import call_of, unsupported, view_of
from ...lower.registry import is_certain
from ...lower.segments import Cut, cut
from ...program.graph import Value
from ...program.program import Program
from ..backend import Backend
from ..lazy_jax import on_cpu
from ..mesh.mesh import Mesh
from ..mesh.same_run import SameRunEdges
from ..mesh.segment_shardings import Edges, PartitionedEdges
from .functions import Function, functions_of, keep_compiled
from .inputs import Inputs
from .segmented import SegmentedStep
from .traced_program import Groups, TracedProgram

E = TypeVar("E", bound=Edges)


def refuse_unsupported(traced: TracedProgram) -> None:
    """Check that all operations can be lowered, before the step has any effect.

    Raises:
        LoweringError: for operations that cannot.
    """
    missing = unsupported(traced.program)
    if missing:
        lines = [f"{op} (first at {nodes[0].source})" for op, nodes in missing.items()]
        raise LoweringError(
            "the step uses operations that have no lowering to StableHLO: "
            + "; ".join(lines)
            + ". Write those lines with other operations, register a lowering of a custom operation with "
            "firstloss.register_lowering, or run on backend 'CPU'."
        )
    for node in traced.program.nodes:
        if not is_certain(node):
            jaxpr_of(call_of(node))


def segmented(traced: TracedProgram, inputs: Inputs, backend: Backend, behind: bool) -> SegmentedStep:
    """Make the segmented step, ready to be lowered.

    Args:
        behind: whether its first results are available already.
    """
    with timeline.span("lower"):
        parts = segment_step(traced, inputs, backend)
    compiles = not backend.validate_only
    step = SegmentedStep(traced.name, parts.cut, *parts.groups, parts.edges, compiles, behind, traced.early)
    if compiles and isinstance(parts.edges, SameRunEdges):
        step.when_run = compile_ahead(traced, inputs, parts)
    return step


def compile_ahead(traced: TracedProgram, inputs: Inputs, parts: Segmentation) -> Callable[[], None] | None:
    """In process 0 of several: what compiles the step in the background for half as many, which may have to go on with
    it. They find the executables in the compilation cache folder, if it is theirs, too.

    The shardings of weights on that mesh are those that a new run would have; if some are not, it compiles as usual.
    """
    mesh = inputs.mesh
    smaller = None if mesh is None or jax.process_index() else mesh.of_half_the_processes()
    if smaller is None:
        return None
    by_spec = {name: smaller.like(sharding) for name, sharding in traced.outputs.where.items()}
    where = inputs.on(smaller)
    edges = edges_on(smaller, traced, parts.cut, where, by_spec, SameRunEdges)
    functions = parts.functions(edges)

    def work() -> None:
        with suppress(AttributeError, OSError):  # other systems have no priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        keep_compiled(traced.name, functions, edges)

    return threading.Thread(target=work, name="firstloss-ahead").start


class Segmentation(NamedTuple):
    """A traced step, cut into segments.

    Attributes:
        groups: its inputs and outputs.
        edges: on a mesh, the shardings of arrays passed between segments.
    """

    cut: Cut
    groups: Groups
    edges: Edges | None

    def functions(self, edges: Edges | None) -> dict[int, Function]:
        """Its distinct functions on a mesh."""
        outputs = self.cut.outputs
        renewed = {old: outputs[name] for old, name in zip(self.groups.state, self.groups.outputs[0], strict=True)}
        results = {outputs[name] for group in self.groups.outputs for name in group}
        return functions_of(self.cut.segments, renewed, results, edges, self.cut.early)


def segment_step(traced: TracedProgram, inputs: Inputs, backend: Backend, same_run: bool = True) -> Segmentation:
    """Cut a step, and find the shardings of the arrays that cross the cuts.

    Args:
        same_run: whether it is computed by logical shards if the backend says so, not as XLA divides it.
    """
    program, mesh = traced.program, backend.mesh
    changed, _, (new, _, names) = groups = traced.groups
    separate = _apart(program, dict(zip(new, changed, strict=True)))
    least_periods = segments.LEAST_PERIODS_ON_CPU if mesh is None and on_cpu() else 2
    same_run = same_run and backend.same_run is not None
    if same_run:  # a logical shard goes through all layers before the next
        least_periods = sys.maxsize
    pieces = cut(program, names, separate, traced.early, least_periods, mesh is not None)
    edges = None
    if mesh is not None:
        kind = SameRunEdges if same_run else PartitionedEdges
        edges = edges_on(mesh, traced, pieces, inputs.where, traced.outputs.where, kind)
        pieces = edges.cut
    return Segmentation(pieces, groups, edges)


def edges_on(
    mesh: Mesh,
    traced: TracedProgram,
    pieces: Cut,
    where: Mapping[Value, Any],
    made: Mapping[str, Any],
    kind: Callable[..., E],
) -> E:
    """The shardings of the arrays that cross the cuts on a mesh.

    Args:
        where: those of the inputs.
        made: by name, those of the outputs that are made.
        kind: how it is divided.
    """
    changed, _, (new, _, names) = traced.groups
    outputs = {**dict(zip(new, (where[value] for value in changed), strict=True)), **made}
    if mesh.result_sharding() is not None:
        outputs |= dict.fromkeys(names, mesh.result_sharding())
    sharding_of = {pieces.outputs[name]: sharding for name, sharding in outputs.items()}
    return kind(pieces, mesh, where, traced.owners.arguments, sharding_of)


def _apart(program: Program, renewed: Mapping[str, Value]) -> set[str]:
    """Names of outputs that are the same Value as an input or another output, and so need an array of their own.

    Args:
        renewed: for outputs that are an input's new content, that input, which may be unchanged.
    """
    values = set(program.inputs.values())
    names = set()
    for name, ref in program.outputs.items():
        if view_of(ref) is not None or ref.value is renewed.get(name):
            continue
        if ref.value in values:
            names.add(name)
        values.add(ref.value)
    return names
