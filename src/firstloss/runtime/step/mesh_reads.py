"""Values that a step's Python reads while it is traced on a mesh of several processes, of which none has all weights,
or on one with `same_run`, where they must not depend on how many processes there are.

All processes trace the same step, so they come to the same read: what it needs is compiled and run by all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import StepTrace
from ...compat.torch_names import DisableAutocast, DisableTorchDispatch, InferenceMode
from ...engine.replay import materialize_whole
from ...errors import LoweringError
from ...program.graph import Ref, Value
from ...program.program import Program
from ..device.lazy_array import ready, to_device_later
from .owners import Owner

if TYPE_CHECKING:
    from ..mesh.mesh import Mesh


class MeshContents:
    """The content of Values in a trace; see `capture.step.Contents`."""

    only_numbers = False

    def __init__(self, trace: StepTrace, mesh: Mesh, seed: Callable[[], np.ndarray]) -> None:
        """`seed` returns the two words from which the call's random numbers are derived."""
        self._trace = trace
        self._inputs: Mapping[Value, Owner] = trace.inputs
        self._mesh = mesh
        self._seed = seed
        self._known: dict[Value, torch.Tensor] = {}

    def keep_inputs(self) -> None:
        """As in `Contents`."""
        self._inputs = dict(self._inputs)

    def of(self, value: Value) -> torch.Tensor:
        """As in `Contents`. To be called by all processes."""
        if value not in self._known:
            inputs = self._inputs
            program = Program({f"in{i}": each for i, each in enumerate(inputs)}, {"read": Ref.of(value)})
            needed = {ref.value for node in program.nodes for ref in (*node.refs(), *node.writes)} | {value}
            read = [each for each in inputs if each in needed]
            with DisableTorchDispatch(), DisableAutocast(), InferenceMode(False), torch.no_grad():
                arrays = {each: self._array(each, inputs[each]) for each in read}
            # A thread of its own has no dispatch modes, no trace, and nobody who records what it calls.
            with ThreadPoolExecutor(1, thread_name_prefix="firstloss-read") as pool:
                batch = set(filter(self._trace.is_argument, read))
                future = pool.submit(_run, program, arrays, batch, self._seed(), self._mesh)
            try:
                self._known[value] = future.result()
            except LoweringError as error:
                raise NotImplementedError(str(error)) from error
        return self._known[value]

    def _array(self, value: Value, owner: Owner) -> Any:
        from ..mesh.sharded_arrays import fit

        mesh, is_argument = self._mesh, self._trace.is_argument(value)
        sharding = mesh.batch_sharding(tuple(value.shape)) if is_argument else mesh.whole
        storage = owner._storage if type(owner) is DeferredTensor and owner._ref().whole else owner
        if isinstance(storage, DeferredStorage) and storage.resident is not None:
            where = sharding if is_argument else storage.resident.sharding or sharding
            return fit(storage.resident.argument(), where)
        if isinstance(owner, DeferredStorage):
            owner = materialize_whole(self._trace.before(owner))
        return ready(to_device_later(owner.detach().reshape(value.shape), sharding))


# By the digest of a module's text, in the order in which they were used. A value that has changed may be a constant of
# another module, and the memory maps of executables are limited.
_compiled: dict[str, Any] = {}
_MAX_COMPILED = 64


def _run(
    program: Program, arrays: Mapping[Value, Any], batch: Container[Value], seed: np.ndarray, mesh: Mesh
) -> torch.Tensor:
    """Compute a Program's output from the arrays of its inputs, by all processes."""
    import jax

    from ...lower.program import unsupported
    from ..jax_support import compile_options, to_host, x64
    from ..mesh.mesh import named
    from ..mesh.peers import peers_of
    from ..mesh.sharded_arrays import readable
    from .functions import lower_function, whole_function

    if unsupported(program):
        raise LoweringError("it has operations that have no lowering")
    whole = named(mesh.whole)
    where = {value: array.sharding for value, array in arrays.items()}
    function, edges = whole_function(program, None, mesh, where, batch, {"read": mesh.whole})
    assert edges is not None
    with x64():
        lowered = lower_function("read", function, edges)
        digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        executable = _compiled.pop(digest, None)
        if executable is None:
            options = compile_options(on_mesh=True, same_run=mesh.same_run is not None)
            peers = peers_of(whole.mesh)
            if peers is None:
                executable = lowered.compile(options)
            else:
                peers.agree("read", digest)
                executable = peers.compile(0, "read", lowered, options, whole.mesh.devices)
        _compiled[digest] = executable
        for oldest in list(_compiled)[:-_MAX_COMPILED]:
            del _compiled[oldest]
        operands = [edges.put(np.uint32(v)) if isinstance(v, int) else arrays[v] for v in function.arguments()]
        (value,) = executable(jax.device_put(seed, whole), *operands)
        return to_host(readable(value)).clone()
