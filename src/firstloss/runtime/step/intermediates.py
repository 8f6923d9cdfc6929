"""What each operation of a step computes, to find the first that differs from another run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ...errors import BackendError
from ..backend import Backend
from ..jax_support import compile_options, to_host, x64
from ..lazy_jax import process_count
from .arguments import Arguments
from .functions import lower_function, whole_function
from .inputs import Inputs
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
    made = [(node, value) for node in traced.program.nodes for value in node.outputs]
    values = [value for _, value in made]
    function, edges = whole_function(traced.program, values, mesh, inputs.where, traced.owners.arguments, {})
    with x64():
        lowered = lower_function("intermediates", function, edges)
        compiled = lowered.compile(compile_options(mesh is not None, backend.same_run is not None))

        def put(number: Any) -> Any:
            return jax.numpy.asarray(number) if edges is None else edges.put(number)

        seed = backend.keys.next() if traced.draws else np.zeros(2, np.uint32)
        operands = [
            np.uint32(value) if isinstance(value, int) else inputs.array(value, arguments)
            for value in function.arguments()
        ]
        arrays = compiled(put(seed), *(array if isinstance(array, jax.Array) else put(array) for array in operands))
        return [
            Intermediate(str(node.op), str(node.source), to_host(array).clone())
            for (node, _), array in zip(made, arrays, strict=True)
        ]
