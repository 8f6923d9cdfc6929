"""What each operation of a step computes, to find the first that differs from another run."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ...errors import BackendError
from ...lower.segments import cut
from ..backend import Backend
from ..jax_support import compile_options, to_host, x64
from ..lazy_jax import process_count
from ..mesh.same_run import SameRunEdges
from ..mesh.segment_shardings import Edges
from .arguments import Arguments
from .compiled_step import Inputs
from .functions import Function, lower_function
from .traced_program import TracedProgram


class Intermediate(NamedTuple):
    """A result of an operation.

    Attributes:
        operation: its name in ATen.
        line: of the user's code that called it.
        value: on the host.
    """

    operation: str
    line: str
    value: torch.Tensor


def intermediates(traced: TracedProgram, arguments: Arguments, backend: Backend) -> list[Intermediate]:
    """See `LoweredStep.intermediates`."""
    if process_count() > 1:
        raise BackendError("what a step's operations compute is read in one process. Use a mesh of its own devices.")
    inputs, mesh = Inputs(backend, traced.owners, traced.numbers), backend.mesh
    pieces = cut(traced.program, least_periods=sys.maxsize)
    (segment,) = pieces.segments
    # An output of the program's that is a view is of no node.
    made = [(call.node, value) for call in segment.calls if call.node is not None for value in call.outputs]
    segment = segment._replace(outputs=tuple(value for _, value in made))
    edges = None
    if mesh is not None:
        kind = Edges if backend.same_run is None else SameRunEdges
        edges = kind(pieces._replace(segments=[segment]), mesh, inputs.where, traced.owners.arguments, {})
        (segment,) = edges.cut.segments
    order = tuple(range(len(segment.inputs)))
    with x64():
        same_run = backend.same_run is not None
        function = Function(segment, order, tuple(range(len(made))), 0)
        compiled = lower_function("intermediates", function, edges).compile(compile_options(mesh is not None, same_run))

        def put(number: Any) -> Any:
            return jax.numpy.asarray(number) if edges is None else edges.put(number)

        seed = backend.keys.next() if traced.draws else np.zeros(2, np.uint32)
        operands = [
            put(np.uint32(value)) if isinstance(value, int) else inputs.array(value, arguments)
            for value in segment.inputs
        ]
        operands = [array if isinstance(array, jax.Array) else put(array) for array in operands]
        arrays = compiled(put(seed), *operands)
        values = [to_host(array).clone() for array in arrays]
    return [Intermediate(str(node.op), str(node.source), value) for (node, _), value in zip(made, values, strict=True)]
