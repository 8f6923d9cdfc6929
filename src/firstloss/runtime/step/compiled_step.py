"""`CompiledStep`: a step, traced and compiled for one kind of batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import timeline
from ...capture.exported_memory import record_exported_memory
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...errors import BackendError
from ...interpreter import Undo
from ..backend import Backend
from ..device import dispatch
from ..device.buffer import DeviceBuffer, mesh_sharding
from ..device.host_memory import HostMemory
from ..device.lazy_array import LazyArray, ready
from ..guards.effects import Bind
from ..guards.reconstruct import CallFrame
from ..lazy_jax import is_array, is_imported, use_x64
from . import loop as loops
from .arguments import Arguments
from .bound_step import BoundStep, StepCall
from .first_loss import BackgroundCompiledStep, KernelsFirstRun
from .inputs import Inputs, write_back
from .owners import Owner
from .reads import ComputedStep, OutcomeChanged, check_outcomes
from .traced_program import TracedProgram, names_read

if TYPE_CHECKING:
    from .segmented import SegmentedRun, SegmentedStep


class CompiledStep(BoundStep):
    """Runs the step on the arguments, and returns its results.

    Inputs are of two kinds: the state that the step changes, which is donated and updated in place; and the others:
    weights that are only read, the batch, numbers such as the learning rate.

    Attributes:
        inputs: returns the array of each input at a call.
    """

    def __init__(
        self,
        traced: TracedProgram,
        inputs: Inputs,
        executable: SegmentedStep | BackgroundCompiledStep | ComputedStep,
        backend: Backend,
        ran: bool,
    ) -> None:
        """`ran`: whether the executable has been run already, for another step that does the same."""
        super().__init__(traced)
        self.inputs = inputs
        self._executable = executable
        self._backend = backend
        self._ran = ran

    @property
    def executable(self) -> SegmentedStep:
        """The executable; waits for JAX if its import is deferred. See `compiling.compile_step`."""
        executable = self._executable
        assert not isinstance(executable, ComputedStep), "it has computed one call, and is nothing to be called again"
        if isinstance(executable, BackgroundCompiledStep):
            executable = self._executable = executable.made()
        return executable

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled, or being compiled: not if PyTorch's kernels have run it, once."""
        executable = self._executable
        return not (isinstance(executable, BackgroundCompiledStep) and executable.whole and not executable.is_made)

    def shares_executable(self, other: CompiledStep) -> bool:
        """Whether it has the executable of another one."""
        return self._executable is other._executable  # the first's has been replaced when it was given to the second

    def wait_until_lowered(self) -> None:
        """Wait while the first run lowers the step, before it is traced again."""
        if isinstance(self._executable, BackgroundCompiledStep):
            self._executable.wait_until_lowered()

    @property
    def is_for_one_call(self) -> bool:
        """Whether it computes one call only, for which it was traced."""
        return isinstance(self._executable, ComputedStep) or self.traced.is_for_one_call

    def outdated(self) -> bool:
        """Whether the compiled step no longer applies: it was for a first step, or a number baked in, a weight's
        memory, or the value of a tensor that its Python code has read has changed."""
        return self.traced.optimizers.first_step_only and self._ran or self.traced.outdated()

    def skip_execution(self, arguments: Arguments) -> Any:
        """In place of a call if steps are only compiled: return the step's results without values. Effects on Python
        objects are applied, and weights are unchanged."""
        self.executable.compile_all()
        traced = self.traced
        call = StepCall(arguments)
        results = dict.fromkeys((*traced.results, *traced.outputs.made), LazyArray(_not_executed))
        self.leave(call, self._env(arguments, results))
        return self.returned(call)

    def __call__(self, arguments: Arguments) -> Any:
        """
        Raises:
            Shared: if some arguments must be inputs themselves.
            OutcomeChanged: if what it reads decides otherwise than in its trace.
        """
        traced, owners, backend = self.traced, self.traced.owners, self._backend
        self.admit(arguments)
        with Undo() as undo, undo, dispatch.lock:
            use_x64(undo)
            self.begin()
            wait = self._ran  # otherwise the executable itself waits for pending arrays
            state_owners = owners.owners_at_call(arguments.leaves)
            state, buffers = self.inputs.state(state_owners, arguments, wait)
            rest = self.inputs.arrays(owners.read, arguments, wait)
            key = backend.keys.next() if traced.draws else None
            seed = (
                key if key is not None else _no_seed(backend.mesh is None) if is_imported() else np.zeros(2, np.uint32)
            )
            begin = 0.0 if self._ran else timeline.current().now()
            run: Any = self._executable.begin(state, rest, seed)
            has_run = self._ran and self._executable.ran
            if has_run and arguments.early is not None:
                before, inputs_before = arguments.early
                run.take_early(before, self.inputs.described(state_owners, arguments), inputs_before)
            arguments.early = None

            call = StepCall(arguments)

            def commit(outputs: Sequence[Sequence[Any]]) -> None:
                self._commit(call, state_owners.values(), buffers, key, *outputs)

            def check() -> None:
                numbers = traced.trace.numbers
                self._note_numbers(arguments, traced.early, run.early())
                if traced.early:
                    try:
                        check_outcomes(numbers, arguments.known)
                    except OutcomeChanged:
                        if has_run:
                            arguments.early = run, self.inputs.described(state_owners, arguments)
                        raise
                if numbers.draws is not None:
                    numbers.draws.commit(arguments.known)

            def lose(error: BaseException) -> None:
                for buffer in buffers:
                    if buffer is not None:
                        buffer.lose(error)

            first = not has_run
            gradients = traced.gradients.now() if first else None
            results = dispatch.execute(run, state, commit, lose, check)[2]
            if first:
                self._first(run, state, buffers, key, gradients)
            if not self._ran:
                for result in results:
                    result.block_until_ready()
                timeline.current().add("first step", begin)
                timeline.current().mark(timeline.FIRST_LOSS)
        self._ran = True
        self.end(call, dict(zip(traced.results, results, strict=True)))
        loop = loops.current() if loops.under_way else None
        if loop is not None:
            loop.dispatched(results)
        return self.returned(call)

    def _commit(
        self,
        call: StepCall,
        state_owners: Iterable[Owner],
        buffers: Sequence[DeviceBuffer | None],
        key: np.ndarray | None,
        new: Sequence[Any],
        created: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Commit weights, state, side effects and settings after the run; weights first."""
        traced = self.traced
        arrays = dict(zip((*traced.results, *traced.outputs.made), (*results, *created), strict=True))
        memory: dict[DeferredStorage, HostMemory] = {}  # exported memory that weights leave to its holders
        for storage in traced.old_memory:
            if storage.resident.exported_memory is not None:
                memory[storage] = storage.resident.exported_memory
                storage.resident.release_exported_memory()
        write_back(state_owners, buffers, new)
        for name, storage in traced.outputs.held.items():
            if storage.resident is None:
                storage.resident, storage.trace = (
                    DeviceBuffer(storage.value, sharding=mesh_sharding(arrays[name])),
                    None,
                )
            storage.resident.set(arrays[name])
        read = names_read(traced.trace)
        self._note_numbers(call.arguments, read, [arrays[name] for name in read])
        env = self._env(call.arguments, arrays)
        self.leave(call, env, [_keeping(memory[s], make(env)) for s, make in traced.old_memory.items() if s in memory])
        if not self._backend.stepped:
            self._backend.stepped = True
        if key is not None:
            self._backend.keys.advance(key)
        self.inputs.export_results(buffers, (*new, *created, *results))

    def _note_numbers(self, arguments: Arguments, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Wait for numbers that the step's Python has read, by the names of the outputs."""
        if not names:
            return
        reads = dict(zip(names_read(self.traced.trace), self.traced.trace.numbers.reads, strict=True))
        for name, array in zip(names, arrays, strict=True):
            if reads[name] not in arguments.known:  # the early ones are known before
                recorded = timeline.records_reads()
                with timeline.span(f"read: {self.traced.program.notes[name]}") if recorded else nullcontext():
                    content = array.content if type(array) is LazyArray else None
                    if content is None:
                        from ..jax_support import to_host
                        from ..mesh.sharded_arrays import readable

                        array = ready(array)
                        content = to_host(array if self._backend.mesh is None else readable(array))
                    arguments.known[reads[name]] = content.item()

    def _env(self, arguments: Arguments, arrays: dict[str, Any]) -> CallFrame:
        traced = self.traced
        fresh = traced.outputs.fresh(arrays, traced.program.outputs, traced.name)
        return CallFrame(fresh, arguments.leaves, arguments.containers, traced.owners.current, arguments.known)

    def _first(
        self,
        run: SegmentedRun | KernelsFirstRun | ComputedStep,
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
                donated = any(map(_is_gone, state))
                for buffer, old, new in zip(buffers, state, arrays, strict=True):
                    if buffer is None:
                        continue
                    if donated:
                        buffer.lose(error)
                    elif buffer.newest is new:
                        buffer.set(old)
                self.traced.gradients.restore(gradients)
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
