"""Segmentation of a traced step into parts that are lowered and compiled separately."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

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
from ..mesh.same_run import SameRunEdges
from ..mesh.segment_shardings import Edges
from .compiled_step import Inputs
from .segmented import SegmentedStep
from .traced_program import Groups, TracedProgram


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
    return SegmentedStep(traced.name, parts.cut, *parts.groups, parts.edges, compiles, behind, traced.early)


class Segmentation(NamedTuple):
    """A traced step, cut into segments.

    Attributes:
        groups: its inputs and outputs.
        edges: on a mesh, the shardings of arrays passed between segments.
    """

    cut: Cut
    groups: Groups
    edges: Edges | None


def segment_step(traced: TracedProgram, inputs: Inputs, backend: Backend, same_run: bool = True) -> Segmentation:
    """Cut a step, and find the shardings of the arrays that cross the cuts.

    Args:
        same_run: whether it is computed by logical shards if the backend says so, not as XLA divides it.
    """
    program, mesh = traced.program, backend.mesh
    changed, _, (new, created, names) = groups = traced.groups
    separate = _apart(program, dict(zip(new, changed, strict=True)))
    least_periods = segments.LEAST_PERIODS_ON_CPU if mesh is None and on_cpu() else 2
    same_run = same_run and mesh is not None and mesh.same_run is not None
    if same_run:  # a logical shard goes through all layers before the next
        least_periods = sys.maxsize
    pieces = cut(program, names, separate, traced.early, least_periods)
    edges = None
    if mesh is not None:
        outputs = {**dict(zip(new, (inputs.where[v] for v in changed), strict=True)), **traced.outputs.where}
        if mesh.result_sharding() is not None:
            outputs |= dict.fromkeys(names, mesh.result_sharding())
        sharding_of = {pieces.outputs[name]: sharding for name, sharding in outputs.items()}
        kind = SameRunEdges if same_run else Edges
        edges = kind(pieces, mesh, inputs.where, traced.owners.arguments, sharding_of)
        pieces = edges.cut
    return Segmentation(pieces, groups, edges)


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
