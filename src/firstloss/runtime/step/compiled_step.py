"""`CompiledStep`: a step, traced and compiled for one kind of batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import timeline
from ...capture import session
from ...capture.exported_memory import record_exported_memory
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...errors import BackendError, TraceError
from ...interpreter import Undo
from ...program.source import here
from ..backend import Backend
from ..device import dispatch
from ..device.buffer import DeviceBuffer, mesh_sharding
from ..device.host_memory import HostMemory
from ..device.lazy_array import LazyArray, ready
from ..guards.effects import Bind
from ..guards.reconstruct import CallFrame
from ..lazy_jax import is_array, is_imported
from . import closures as _closures  # noqa: F401 - registers the handling of assertions
from . import loop as loops
from .arguments import Arguments
from .first_loss import BackgroundCompiledStep, KernelsFirstRun
from .inputs import Inputs, Owner, write_back
from .tracing import Shared, TracedProgram

if TYPE_CHECKING:
    from .segmented import SegmentedRun, SegmentedStep


class StepCall:
    """A call of a step: its arguments, and what it returns and binds after the step has run."""

    __slots__ = ("arguments", "owners", "result", "bindings", "schedules", "memory")

    def __init__(self, arguments: Arguments, owners: Iterable[Owner]) -> None:
        self.arguments = arguments
        self.owners = owners  # of the state that the step changes
        self.result: Any = None
        self.bindings: list[Bind] | None = None
        self.schedules: list[Bind] = []  # schedulers that depend on its results
        self.memory: dict[DeferredStorage, HostMemory] = {}  # exported memory that its weights leave to its holders


class CompiledStep:
    """Runs the step on the arguments, and returns its results.

    Inputs are of two kinds: the state that the step changes, which is donated and updated in place; and the others:
    weights that are only read, the batch, numbers such as the learning rate.

    Attributes:
        traced: the traced Program.
        inputs: returns the array of each input at a call.
    """

    def __init__(
        self,
        traced: TracedProgram,
        inputs: Inputs,
        executable: SegmentedStep | BackgroundCompiledStep,
        backend: Backend,
        ran: bool,
    ) -> None:
        """`ran`: whether the executable has been run already, for another step that does the same."""
        self.traced = traced
        self.inputs = inputs
        self._executable = executable
        self._backend = backend
        self._ran = ran
        self._rebinds = session.rebinds

    @property
    def executable(self) -> SegmentedStep:
        """The executable; waits for JAX if its import is deferred. See `compiling.compile_step`."""
        executable = self._executable
        if isinstance(executable, BackgroundCompiledStep):
            executable = self._executable = executable.made()
        return executable

    def wait_until_lowered(self) -> None:
        """Wait while the first run lowers the step, before it is traced again."""
        if isinstance(self._executable, BackgroundCompiledStep):
            self._executable.wait_until_lowered()

    def outdated(self) -> bool:
        """Whether the compiled step no longer applies: it was for a first step, or a number baked in, a weight's
        memory, or the value of a tensor that its Python code has read has changed."""
        if self.traced.optimizers.first_step_only and self._ran or session.rebinds != self._rebinds:
            return True
        return self.traced.outdated()

    def skip_execution(self, arguments: Arguments) -> Any:
        """In place of a call if steps are only compiled: return the step's results without values. Effects on Python
        objects are applied, and weights are unchanged."""
        self.executable.compile_all()
        traced = self.traced
        call = StepCall(arguments, ())
        env = self._env(arguments, dict.fromkeys((*traced.results, *traced.outputs.made), LazyArray(_not_executed)))
        call.result = traced.result(env)
        for bind in [make(env) for make in traced.effects.bindings]:
            bind()
        traced.modes.leave()
        if traced.raised is not None:
            raise traced.raised
        return call.result

    def __call__(self, arguments: Arguments) -> Any:
        """
        Raises:
            Shared: if some arguments must be inputs themselves.
        """
        traced, owners, backend = self.traced, self.traced.owners, self._backend
        shared = owners.shared(arguments)
        if shared:
            raise Shared(shared)
        if not arguments.padded.isdisjoint(owners.edited):
            raise TraceError(
                f"{here()}: {traced.name} edits its argument in place, but got a padded copy of it, so the caller's "
                "tensor would not change. Edit a clone of it, or return it."
            )
        leaves = arguments.leaves
        with Undo() as undo, undo, dispatch.lock:
            if is_imported():
                from ..jax_support import use_x64

                use_x64(undo)
            dispatch.settled()
            traced.optimizers.groups.begin()
            if traced.gradients.follow(owners.inputs, owners.changed, owners.stand_in):
                owners.moved()
            wait = self._ran  # otherwise the executable itself waits for pending arrays
            state_owners = owners.owners_at_call(leaves)
            state, buffers = self.inputs.state(state_owners, leaves, wait)
            rest = self.inputs.arrays(owners.read, leaves, wait)
            key = backend.keys.next() if traced.draws else None
            seed = (
                key if key is not None else _no_seed(backend.mesh is None) if is_imported() else np.zeros(2, np.uint32)
            )
            begin = 0.0 if self._ran else timeline.current().now()
            run = self._executable.begin(state, rest, seed)

            call = StepCall(arguments, state_owners.values())

            def commit(outputs: Sequence[Sequence[Any]]) -> None:
                self._commit(call, buffers, key, *outputs)

            def lose(error: BaseException) -> None:
                for buffer in buffers:
                    if buffer is not None:
                        buffer.lose(error)

            step = dispatch.Transaction(run, state, commit, lose)
            first = not self._ran or not self._executable.ran
            gradients = traced.gradients.now() if first else None
            results = step.execute_or_settle()[2]
            if first:
                self._first(run, state, buffers, key, gradients)
            if not self._ran:
                for result in results:
                    result.block_until_ready()
                timeline.current().add("first step", begin)
                timeline.current().mark(timeline.FIRST_LOSS)
        self._ran = True
        for_closures = dict(zip(traced.for_closures, results[len(traced.outputs.out) :], strict=True))
        for i, closure in enumerate(traced.trace.closures):
            closure.after_step([for_closures[f"closure{i}.{j}"] for j in range(len(closure.refs))])
        for schedule in call.schedules:
            schedule()
        loop = loops.current() if loops.under_way else None
        if loop is not None:
            loop.dispatched(results)
        if traced.raised is not None:
            raise traced.raised
        return call.result

    def _commit(
        self,
        call: StepCall,
        buffers: Sequence[DeviceBuffer | None],
        key: np.ndarray | None,
        new: Sequence[Any],
        made: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Commit weights, state, side effects and settings after the run. May be called twice."""
        traced = self.traced
        arrays = dict(zip((*traced.results, *traced.outputs.made), (*results, *made), strict=True))
        for storage, _ in traced.handed_out:
            if storage.resident.exported_memory is not None:
                call.memory[storage] = storage.resident.exported_memory
                storage.resident.release_exported_memory()
        write_back(call.owners, buffers, new)
        for name, storage in traced.outputs.held.items():
            if storage.resident is None:
                storage.resident, storage.trace = (
                    DeviceBuffer(storage.value, sharding=mesh_sharding(arrays[name])),
                    None,
                )
            storage.resident.set(arrays[name])
        if call.bindings is None:
            env = self._env(call.arguments, arrays)
            call.result = traced.result(env)
            call.bindings = [make(env) for make in traced.effects.bindings]
            call.bindings += [_keeping(call.memory[s], make(env)) for s, make in traced.handed_out if s in call.memory]
            call.schedules = [make(env) for make in traced.optimizers.schedulers.afterwards]
        for bind in call.bindings:
            bind()
        traced.modes.leave()
        if not self._backend.stepped:
            self._backend.stepped = True
        if key is not None:
            self._backend.keys.advance(key)
        self.inputs.settle(buffers, (*new, *made, *results))

    def _env(self, arguments: Arguments, arrays: dict[str, Any]) -> CallFrame:
        traced = self.traced
        fresh = traced.outputs.fresh(arrays, traced.program.outputs, traced.name)
        return CallFrame(fresh, arguments.leaves, arguments.containers, traced.owners.stand_in)

    def _first(
        self,
        run: SegmentedRun | KernelsFirstRun,
        state: Sequence[Any],
        buffers: Sequence[DeviceBuffer | None],
        key: np.ndarray | None,
        gradients: Any,
    ) -> None:
        """Commit after the first loss, while the rest is running; if that fails, the state is restored."""
        later = run.later
        if later is None:
            return
        arrays = [None if buffer is None else buffer.newest for buffer in buffers]

        def failed(error: BaseException) -> None:
            with dispatch.lock:
                later.failed = lambda error: None
                lost = any(map(_is_gone, state))
                for buffer, old, new in zip(buffers, state, arrays, strict=True):
                    if buffer is None:
                        continue
                    if lost:
                        buffer.lose(error)
                    elif buffer.newest is new:
                        buffer.set(old)
                self.traced.gradients.back_to(gradients)
                if key is not None:
                    self._backend.keys.rewind(key)
                self._ran = False

        later.failed = failed


def _is_gone(array: Any) -> bool:
    """Whether an array, or the array behind a lazy one, has been donated."""
    try:
        array = ready(array)
    except Exception:  # it could not be computed
        return False
    return is_array(array) and array.is_deleted()


def _not_executed() -> Any:
    """In place of an array that will not be computed."""
    raise BackendError(
        "this has no value: the backend was created with compile_only or validate_only, so steps are compiled but "
        "not executed."
    )


def _keeping(memory: HostMemory, holder: DeferredTensor) -> Bind:
    """Let the holders of a weight's former memory keep it."""

    def bind() -> None:
        buffer = holder._storage.resident
        if buffer.exported_memory is None:
            buffer.take_memory(memory)
            record_exported_memory(holder._storage)

    return bind


@functools.cache
def _no_seed(on_device: bool) -> Any:
    """The seed of a step without random operations."""
    import jax

    return jax.device_put(np.zeros(2, np.uint32)) if on_device else np.zeros(2, np.uint32)
