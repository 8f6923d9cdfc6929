"""`CompiledStep`: a step, traced and compiled for one kind of batch; `Inputs`: the arrays that it is called with."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import timeline
from ...capture.exported_memory import record_exported_memory
from ...capture.input_numbers import NumberInput
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...errors import BackendError, TraceError
from ...interpreter import Undo
from ...program.graph import Value
from ...program.source import here
from ..backend import Backend
from ..device import dispatch
from ..device.buffer import DeviceBuffer, mesh_sharding, replace_arrays
from ..device.host_memory import HostMemory
from ..device.lazy_array import LazyArray, ready, share_later, to_device_later
from ..guards.effects import Bind
from ..guards.reconstruct import CallFrame
from ..lazy_jax import is_array, is_imported, on_cpu, use_x64
from . import closures as _closures  # noqa: F401 - registers the handling of assertions
from . import loop as loops
from .arguments import Arguments
from .bound_step import BoundStep, StepCall
from .first_loss import BackgroundCompiledStep, KernelsFirstRun
from .owners import Owner, Owners
from .reads import ComputedStep, OutcomeChanged, check_outcomes
from .traced_program import TracedProgram, names_read

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import Mesh
    from .segmented import SegmentedRun, SegmentedStep


_COPIED_BYTES = 1 << 16  # below, a tensor is passed to a call as a NumPy array
# From this size on, a tensor of the host's that is no argument, such as a data set, is not copied for a call.
_BORROWED_BYTES = 1 << 20
_ALIGNMENT = 64  # of memory that XLA takes as it is
# Dtypes that torch can convert to NumPy, and JAX from it.
_NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


_NUMPY_SCALARS: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.int64: np.int64,
}


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


class Inputs:
    """The inputs of a step: storages on the backend, arguments of the call, numbers in parameter groups, and tensors
    outside the backend.

    Attributes:
        where: on a mesh, the sharding of each input.
        is_shared: whether, at this call, some are in memory that others may write to as soon as the call has returned:
            exported (`DeviceBuffer.memory`) or borrowed; see `export_results`.
    """

    def __init__(
        self,
        backend: Backend,
        owners: Owners,
        numbers: Mapping[Value, NumberInput],
    ) -> None:
        """`numbers` are the inputs that are numbers, read at each call. On a mesh, storages that are not on the backend
        yet are moved there."""
        self._backend = backend
        self._owners = owners.inputs
        self._read = owners.read
        self._argument_index = owners.arguments
        self._numbers = numbers
        self.where: dict[Value, Any] = {}
        if backend.mesh is not None:
            self.where = {value: self._sharding(value, backend.mesh) for value in (*owners.changed, *owners.read)}
        self.is_shared: bool = False
        self._may_borrow = False

    def state(
        self, changed: Mapping[Value, Owner], arguments: Arguments, wait: bool = True
    ) -> tuple[tuple[Any, ...], Sequence[DeviceBuffer | None]]:
        """The arrays of the state that the step changes, and the buffers for its new content; tensors outside the
        backend have no buffer. There may be a thousand arrays, most of them untouched since the last step: only for the
        others is anything computed."""
        self.is_shared = False
        self._may_borrow = wait and is_imported() and on_cpu()
        buffers = _buffers(changed)
        if self.where or not wait:
            arrays = self.arrays(changed, arguments, wait, donated=True)
        else:
            current = [buffer.current if buffer is not None else None for buffer in buffers]
            arrays = tuple(
                [self.array(v, arguments, True) if a is None else a for v, a in zip(changed, current, strict=True)]
            )
        return arrays, buffers if all(buffers) else _buffers(changed)  # some have been created since

    def arrays(
        self, values: Iterable[Value], arguments: Arguments, wait: bool = True, donated: bool = False
    ) -> tuple[Any, ...]:
        """The arrays of the inputs `values`; without `wait`, lazy ones for those still being computed."""
        return tuple(
            (None if wait else self._later(value, arguments.leaves)) or self.array(value, arguments, donated)
            for value in values
        )

    def _later(self, value: Value, leaves: list[Any]) -> LazyArray | None:
        index = self._argument_index.get(value)
        owner = self._owners[value] if index is None else leaves[index]
        if type(owner) is DeferredTensor and owner._ref().whole:
            storage = owner._storage
            if storage.resident is not None and storage.resident.sharding is self.where.get(
                value
            ):  # no resharding needed
                owner = storage
        return (
            owner.resident.lazy_array() if isinstance(owner, DeferredStorage) and owner.resident is not None else None
        )

    def array(self, value: Value, arguments: Arguments, donated: bool = False) -> Any:
        """The array of an input `value` at this call; `donated` if the step may write to it."""
        number = self._numbers.get(value)
        if number is not None:
            read = number.read(arguments.leaves, arguments.known)
            if isinstance(read, np.ndarray):
                return np.array(read, order="C")
            return _NUMPY_SCALARS[value.dtype](read)
        index = self._argument_index.get(value)
        owner = self._owners[value] if index is None else arguments.leaves[index]
        sharding = self.where.get(value)
        array: jax.Array
        if isinstance(owner, DeferredStorage):
            array = self._argument(self._buffer(owner), donated)
        elif type(owner) is DeferredTensor and owner._storage.resident is not None and owner._ref().whole:
            array = self._argument(owner._storage.resident)
        elif sharding is not None:
            if owner.layout is not torch.strided:
                raise TraceError(
                    f"{here()}: the step computes with a tensor of the layout {owner.layout}, which devices of a mesh "
                    "do not have. Keep it dense, and multiply or torch.where with its mask."
                )
            return to_device_later(owner, sharding)
        elif index is None and not donated and self._may_borrow and _can_be_borrowed(owner):
            from ..jax_support import share_memory

            self.is_shared = True
            return share_memory(owner.detach())
        else:  # a copy, since the caller may write to the tensor while the step runs
            return _given(owner.detach().clone(memory_format=torch.contiguous_format))
        if sharding is None:
            return array
        from ..mesh.sharded_arrays import fit

        return fit(array, sharding)

    def _argument(self, buffer: DeviceBuffer, donated: bool = False) -> jax.Array:
        array = buffer.argument(donated)
        self.is_shared = self.is_shared or buffer.is_exported
        return array

    def export_results(self, buffers: Iterable[DeviceBuffer | None], arrays: Iterable[Any]) -> None:
        """After dispatch: if others may write to inputs once the call has returned, or read results in exported memory,
        wait for the step, and write its results `arrays` back there."""
        if not self.is_shared:
            return
        for array in arrays:
            ready(array).block_until_ready()
        for buffer in buffers:
            if buffer is not None:
                buffer.export_content()

    def described(self, state_owners: Mapping[Value, Owner], arguments: Arguments) -> list[Any]:
        """What the inputs are at this call, the state first: equal for the same input of another step."""
        described: list[Any] = []
        for value, owner in (*state_owners.items(), *((value, self._owners.get(value)) for value in self._read)):
            number, index = self._numbers.get(value), self._argument_index.get(value)
            if number is not None:
                read = number.read(arguments.leaves, arguments.known)
                described.append((value.dtype, repr(read)) if type(read) in (int, float, bool) else object())
            else:
                described.append(("argument", index) if index is not None else ("owner", id(owner)))
        return described

    @property
    def mesh(self) -> Mesh | None:
        """The backend's mesh."""
        return self._backend.mesh

    def on(self, mesh: Mesh) -> dict[Value, Any]:
        """The sharding of each input as it would be on another mesh."""
        return {value: self._sharding_on(mesh, value) for value in self.where}

    def _sharding_on(self, mesh: Mesh, value: Value) -> Any:
        owner = self._owners[value]
        if isinstance(owner, DeferredStorage) and value not in self._numbers:
            return mesh.storage_sharding(owner)
        return self._sharding(value, mesh)

    def same_shardings(self, other: Inputs) -> bool:
        """On a mesh: whether the inputs of an equivalent step have the same shardings."""
        from ..mesh.mesh import named

        return [*map(named, self.where.values())] == [*map(named, other.where.values())]

    def _sharding(self, value: Value, mesh: Mesh) -> Any:
        owner = self._owners[value]
        if value in self._numbers or value not in self._argument_index and not isinstance(owner, DeferredStorage):
            return mesh.whole
        if not isinstance(owner, DeferredStorage):
            return mesh.batch_sharding(tuple(value.shape))
        return self._buffer(owner).sharding or mesh.whole

    def _buffer(self, storage: DeferredStorage) -> DeviceBuffer:
        """The buffer of a storage, which is moved to the backend first if necessary."""
        if storage.resident is None:
            self._backend.move_to_device(_tensors_of(storage))
        return storage.resident


def _can_be_borrowed(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    is_large = tensor.numel() * tensor.itemsize >= _BORROWED_BYTES
    return is_large and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def _given(tensor: torch.Tensor) -> Any:
    """A tensor as an argument of one call; lazily before JAX is imported. A small one is a NumPy array: copying it is
    faster than `share_memory`."""
    if not is_imported():
        return share_later(tensor)
    if tensor.numel() * tensor.itemsize < _COPIED_BYTES and tensor.dtype in _NUMPY_DTYPES and not tensor.is_cuda:
        return tensor.numpy()
    from ..jax_support import share_memory

    return share_memory(tensor)


def _tensors_of(storage: DeferredStorage) -> list[DeferredTensor]:
    """The tensors in a storage; if the step has loaded it from a file and not kept any, a tensor of all of it."""
    value = storage.value
    return storage.alive() or [DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype)]


def _buffers(owners: Mapping[Value, Owner]) -> list[DeviceBuffer | None]:
    return [owner.resident if type(owner) is DeferredStorage else None for owner in owners.values()]


def write_back(owners: Iterable[Owner], buffers: Sequence[DeviceBuffer | None], arrays: Sequence[Any]) -> None:
    """Write `arrays` back as the new content of `owners` with these buffers; some may be lazy."""
    if not all(buffers):
        with torch.no_grad():
            for owner, array in zip(owners, arrays, strict=True):
                if isinstance(owner, torch.Tensor):  # outside the backend
                    from ..jax_support import to_host

                    owner.copy_(to_host(ready(array)))
    replace_arrays(buffers, arrays)
