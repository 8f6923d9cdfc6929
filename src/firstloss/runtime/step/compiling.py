"""From a `TracedProgram` to what computes it: lowered, cut where it repeats, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ... import timeline
from ...capture.recorder import DeferredStorage
from ...errors import LoweringError
from ...lower import program as lowering
from ...lower.dtypes import to_jax
from ...lower.program import view_of
from ...lower.segments import cut
from ...program.graph import Program, Value
from ..backend import Backend
from ..device import dispatch
from ..device.placement import begin_behind
from ..jaxlib import compile_options, x64
from ..mesh.edges import Edges
from .first_loss import FirstLoss
from .inputs import Inputs
from .segmented import SegmentedStep
from .traced import TracedProgram
from .whole import WholeStep


def compile_step(traced: TracedProgram, inputs: Inputs, backend: Backend) -> Any:
    """What is called with the state that the step changes, the rest of its inputs and a seed, and returns new state,
    what the step leaves, and results. The state is donated, so that its memory is updated in place.

    Raises:
        LoweringError: for operations that have no lowering.
    """
    missing = lowering.unsupported(traced.program)
    if missing:
        lines = [f"{op} (first at {nodes[0].source})" for op, nodes in missing.items()]
        raise LoweringError(
            "the step uses operations that have no lowering to StableHLO: "
            + "; ".join(lines)
            + ". Write those lines with other operations, give an operation of your own a lowering with "
            "firstloss.register_lowering, or run on backend 'CPU'."
        )
    program, draws, mesh = traced.program, traced.draws, backend.mesh
    changed, read = list(traced.owners.changed), traced.owners.read
    made, names = traced.outputs.made, traced.results
    where = inputs.shardings((*changed, *read))
    with timeline.span("lower"):
        outputs = {f"new{i}": where[v] for i, v in enumerate(changed)}
        if mesh is not None:
            outputs |= traced.outputs.where
            if mesh.of_results() is not None:
                outputs |= dict.fromkeys(names, mesh.of_results())
        apart = _apart(program, outputs, where) if mesh is not None else ()
        pieces = None if backend.validate_only else cut(program, names, apart)
        edges = None
        if pieces is not None and mesh is not None:
            wanted = {pieces.outputs[name]: lies for name, lies in outputs.items()}
            edges = Edges(pieces, mesh, where, traced.owners.arguments, wanted)
            pieces = edges.cut
    first_loss = _first_loss(traced, names, backend)
    if pieces is not None:
        new = [f"new{i}" for i in range(len(changed))]
        return SegmentedStep(traced.name, pieces, changed, read, (new, made, names), first_loss, edges)

    if first_loss is None:
        begin_behind()  # a step in one piece waits for all

    def run(state: tuple, rest: tuple, seed: Any) -> tuple:
        values = dict(zip([*changed, *read], [*state, *rest], strict=True))
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1]) if draws else None
        outputs = lowering.lower(program, values, key)
        return (
            tuple(outputs[f"new{i}"] for i in range(len(changed))),
            tuple(outputs[name] for name in made),
            tuple(outputs[name] for name in names),
        )

    run.__name__ = traced.name
    shapes = [
        tuple(jax.ShapeDtypeStruct(v.shape, to_jax(v.dtype), sharding=where[v]) for v in part)
        for part in (changed, read)
    ]
    options: dict[str, Any] = {}
    if mesh is not None:
        made_where = tuple(traced.outputs.where[name] for name in made)
        options["out_shardings"] = (tuple(where[v] for v in changed), made_where, mesh.of_results())

    def compile() -> Any:
        with x64():
            with timeline.span("lower"):
                jitted = jax.jit(run, donate_argnums=(0,), **options)
                lowered = jitted.lower(*shapes, jax.ShapeDtypeStruct((2,), np.uint32))
            if backend.validate_only:
                return lowered
            with timeline.span("compile"):
                compiled = lowered.compile(compile_options())
        dispatch.probe_memory([compiled])
        return compiled

    if first_loss is None:
        return compile()
    return WholeStep(compile, (*changed, *read), (len(changed), len(made)), first_loss)


def _apart(program: Program, outputs: Mapping[str, Any], given: Mapping[Value, Any]) -> set[str]:
    """Names of outputs that lie otherwise than an input or another output which is the same Value."""
    found = set()
    lies = dict(given)
    for name, where in outputs.items():
        value = program.outputs[name].value
        if view_of(program.outputs[name]) is None and lies.setdefault(value, where) != where:
            found.add(name)
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
