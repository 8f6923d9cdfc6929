"""One traced, lowered and compiled step: from a Program to an executable, and from a batch to a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from .. import timeline
from ..capture import session
from ..capture.compare import same_bytes
from ..capture.constants import owned_by_torch
from ..capture.deferred import named_tensors
from ..capture.program import Program, Ref, Value
from ..capture.recorder import DeferredTensor, Store
from ..capture.step import StepTrace, dense_stride, is_traced
from ..errors import LoweringError, TraceError
from ..lower import program as lowering
from ..lower.dtypes import to_jax, to_torch
from ..lower.segments import cut
from ..undo import Undo
from . import dispatch
from . import loop as loops
from .backend import Backend
from .cell import Cell
from .gradients import Gradients
from .inputs import Inputs, keep
from .jaxlib import compile_options, use_x64, x64
from .modes import ModesLeft
from .optimizers import Optimizers
from .placement import begin_behind
from .segmented import SegmentedStep


class Surroundings(Protocol):
    """What an executable asks of the Python around a step; see `watch.py`."""

    def carry(self) -> None: ...

    def tensors(self) -> Iterable[torch.Tensor]: ...


class Kept(NamedTuple):
    """A returned value that is no tensor: the same at each step."""

    value: Any


class Executable:
    """A step for one kind of batch. Called with the batch's leaves, it runs the step and returns what the step does.

    Inputs of the executable are of two kinds: the state that the step changes, which is donated, so that its memory is
    updated in place; and the rest: weights that are only read, the batch, numbers such as the learning rate.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        backend: Backend,
        around: Surroundings | None = None,
        find: Callable[[Executable], Executable | None] = lambda traced: None,
    ) -> None:
        """Trace and compile `step`.

        Args:
            around: the Python values that the step may read and rebind.
            find: given this, traced and not yet compiled, an earlier one that computes the same, whose compiled step
                will do.
        """
        self._backend = backend
        self._around = around
        self._name = getattr(step, "__name__", "step")
        self._tracing = StepTrace()
        self._optimizers = Optimizers(self._tracing)
        self._batch: dict[Value, int] = {}
        self.inputs = Inputs(backend, self._tracing.inputs, self._batch, self._optimizers.hyperparameters)
        with timeline.span("trace"):
            self._gradients = Gradients(backend.parameters())
            self._modes = ModesLeft()
            try:
                result = self._trace(step, leaves, spec)
                self._modes.traced()
                self._settle(result)
                self._optimizers.settled()
                self._gradients.traced(self._tracing.inputs)
                same = find(self) if backend.mesh is None else None
                # What the step leaves is left when it has been run.
                self._gradients.undo()
                self._modes.undo()
            except BaseException:
                self._undo()
                raise
        self._compiled: Any = self._compile() if same is None else same._compiled
        self._ran = same is not None
        self._reseated = session.reseated

    # -- from Python to a Program --

    def _trace(self, step: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
        """Run the step's Python once on tensors without values; returns what it returns."""
        traced = list(leaves)
        arguments: dict[DeferredTensor, torch.Size] = {}
        with self._tracing.active(), self._optimizers.watched():
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    made = self._tracing.new_input(leaf, f"batch{i}")
                    self._batch[made._store.value] = i
                    traced[i] = made.requires_grad_(True) if leaf.requires_grad else made
                    arguments[made] = made.shape
            args, kwargs = pytree.tree_unflatten(traced, spec)
            result = step(*args, **kwargs)
            self._optimizers.carry()
            if self._around is not None:
                self._around.carry()
        for argument, shape in arguments.items():
            node = argument._store.value.node
            if node is not None or argument.shape != shape:
                where = f"{node.source}: the step edits" if node is not None else f"{self._name} resizes"
                raise TraceError(
                    f"{where} its argument in place, and the caller's tensor would not see it. "
                    "Edit a clone of it, or return it."
                )
        if self._backend.mesh is not None:
            self._backend.mesh.follow(self._backend.parameters(), self._optimizers.seen)
        self._backend.claim(self._optimizers.schedule_state)
        self._backend.claim(self._optimizers.new_state, behind=True)
        return result

    def _settle(self, result: Any) -> None:
        """What goes in and what comes out: results, changed state, and state that is new and can still be reached."""
        tracing = self._tracing
        outputs: dict[str, Ref] = {}
        leaves, self._result_spec = pytree.tree_flatten(result)
        self._results: list[str | Kept] = []
        for i, leaf in enumerate(leaves):
            if is_traced(leaf, tracing):  # else it was there before, and is given back as it is then
                outputs[f"out{i}"] = leaf._ref()
                self._results.append(f"out{i}")
            elif type(leaf) is DeferredTensor and not leaf.is_leaf:  # a view of a weight, which shows it as it will be
                self._results.append(Kept(leaf.detach()))
            else:
                self._results.append(Kept(leaf))
        self._changed: dict[Value, Store | torch.Tensor] = {}
        for value, new in tracing.changes.items():
            outputs[f"new{len(self._changed)}"] = Ref.of(new)
            home = tracing.inputs[value]
            if isinstance(home, torch.Tensor) and _nobody_elses(home):
                # It lives on the backend from now on: each step would have to be waited for otherwise.
                self._backend.claim([home])
                home = tracing.inputs[value] = home._store  # type: ignore[attr-defined]
            self._changed[value] = home._store if type(home) is DeferredTensor else home  # moved since, by claim
        self._made: list[Store] = []
        around = [] if self._around is None else self._around.tensors()
        for tensor in (*_reachable(self._backend, self._optimizers.seen), *around):
            if is_traced(tensor, tracing) and not any(store is tensor._store for store in self._made):
                outputs[f"made{len(self._made)}"] = Ref.of(tensor._store.value)
                self._made.append(tensor._store)
        for i, call in enumerate(tracing.closures):
            outputs.update({f"closure{i}.{j}": ref for j, ref in enumerate(call.refs)})
        self._arguments = [name for name in outputs if name.startswith("closure")]
        self.program = Program({value.label or "in": value for value in tracing.inputs}, outputs)
        if tracing.cbfloat16:
            from ..lower import cbfloat16

            for kept in (*tracing.changes.values(), *(store.value for store in self._made)):
                cbfloat16.refuse_state(kept)
            self.program = cbfloat16.in_place_of_float16(self.program)
        needed = {ref.value for ref in outputs.values()}
        for node in self.program.nodes:
            needed.update(ref.value for ref in node.refs())
            needed.update(ref.value for ref in node.writes)
        self._read = [v for v in tracing.inputs if v in needed and v not in self._changed]

    def signature(self) -> tuple:
        """What goes in and comes out, beside the Program: if both are the same, so is the compiled step."""
        order = {value: i for i, value in enumerate(self._tracing.inputs)}
        return (
            [order[v] for v in self._changed],
            [order[v] for v in self._read],
            len(self._made),
            [name for name in self._results if isinstance(name, str)],
            self._arguments,
        )

    def reads_other_tensors(self, other: Executable) -> bool:
        """Whether `other`, which has the same signature, reads other tensors from off the backend: it was given
        another batch by something that is no argument."""
        ours, theirs = self._from_outside(), other._from_outside()
        return any(_differ(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)

    def reads(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of `tensors` goes in, or its gradient."""
        theirs = {id(t) for tensor in tensors for t in (tensor, tensor.grad) if t is not None}
        stores = {id(t._store) for tensor in tensors for t in (tensor, tensor.grad) if type(t) is DeferredTensor}
        return any(id(home) in theirs or id(home) in stores for home in self._tracing.inputs.values())

    def _from_outside(self) -> list[Store | torch.Tensor | None]:
        """What goes in, in the signature's order; None for what each call is given anew."""
        given = {*self._batch, *self._optimizers.hyperparameters, *self._gradients.read}
        return [None if v in given else self._tracing.inputs[v] for v in (*self._changed, *self._read)]

    def _undo(self) -> None:
        """A step that could not be traced leaves nothing behind."""
        self._gradients.undo()
        self._modes.undo()
        new = self._optimizers.new_state
        for optimizer in self._optimizers.seen:
            for entries in optimizer.state.values():
                dead = [k for k, v in entries.items() if any(v is n for n in new) or is_traced(v, self._tracing)]
                for key in dead:
                    del entries[key]

    def outdated(self) -> bool:
        """Whether it was for a first step, or a number baked in, a weight's memory or the value of a tensor that
        its Python has read has been changed since."""
        if self._optimizers.first_step_only and self._ran or session.reseated != self._reseated:
            return True
        if any(read.outdated() for read in self._tracing.read.values()) or self._tracing.laid_out_anew():
            return True
        return self._optimizers.outdated() or not self._gradients.fit()

    # -- from a Program to an executable --

    def _compile(self) -> Any:
        missing = lowering.unsupported(self.program)
        if missing:
            lines = [f"{op} (first at {nodes[0].source})" for op, nodes in missing.items()]
            raise LoweringError(
                "the step uses operations that have no lowering to StableHLO: "
                + "; ".join(lines)
                + ". Write those lines with other operations, give an operation of your own a lowering with "
                "firstloss.register_lowering, or run on backend 'CPU'."
            )
        program, draws = self.program, self._tracing.draws
        changed, read, made = list(self._changed), self._read, len(self._made)
        names = [*(name for name in self._results if isinstance(name, str)), *self._arguments]
        mesh = self._backend.mesh
        where = self.inputs.lie((*changed, *read))
        with timeline.span("lower"):
            # On a mesh the partitioner has to see all of it.
            pieces = cut(program, first=names) if mesh is None else None
        if pieces is not None:
            new = [f"new{i}" for i in range(len(changed))]
            return SegmentedStep(self._name, pieces, changed, read, (new, [f"made{i}" for i in range(made)], names))

        begin_behind()  # a step in one piece waits for all

        def run(state: tuple, rest: tuple, seed: Any) -> tuple:
            values = dict(zip([*changed, *read], [*state, *rest], strict=True))
            key = jax.random.fold_in(jax.random.key(seed[0]), seed[1]) if draws else None
            outputs = lowering.lower(program, values, key)
            return (
                tuple(outputs[f"new{i}"] for i in range(len(changed))),
                tuple(outputs[f"made{i}"] for i in range(made)),
                tuple(outputs[name] for name in names),
            )

        run.__name__ = self._name
        shapes = [
            tuple(jax.ShapeDtypeStruct(v.shape, to_jax(v.dtype), sharding=where[v]) for v in part)
            for part in (changed, read)
        ]
        options: dict[str, Any] = {}
        if mesh is not None:
            made_where = tuple(mesh.of_store(store) for store in self._made)
            options["out_shardings"] = (tuple(where[v] for v in changed), made_where, mesh.of_results())
        with x64():
            with timeline.span("lower"):
                jitted = jax.jit(run, donate_argnums=(0,), **options)
                lowered = jitted.lower(*shapes, jax.ShapeDtypeStruct((2,), np.uint32))
            with timeline.span("compile"):
                compiled = lowered.compile(compile_options())
        dispatch.probe_memory([compiled])
        return compiled

    # -- from a batch to a loss --

    def _commit(
        self,
        cells: Sequence[Cell | None],
        key: np.ndarray | None,
        new: Sequence[Any],
        made: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """The step has been run: what it leaves in weights, state, gradients and modes. May be done twice."""
        keep(self._changed.values(), cells, new)
        for store, array in zip(self._made, made, strict=True):
            if store.resident is None:
                store.resident, store.trace = Cell(store.value, sharding=_mesh_sharding(array)), None
            store.resident.set(array)
        self._gradients.leave()
        self._modes.leave()
        if key is not None:
            self._backend.keys.taken(key)
        self.inputs.settle(cells, (*new, *made, *results))

    def _first(
        self, run: Any, state: Sequence[Any], cells: Sequence[Cell | None], key: np.ndarray | None, gradients: Any
    ) -> None:
        """The loss of a first step is there, and the rest of it under way: should that fail, the state is as it was."""
        later = getattr(run, "later", None)
        if later is None:
            return
        arrays = [None if cell is None else cell._array for cell in cells]

        def failed(error: BaseException) -> None:
            with dispatch.lock:
                later.failed = lambda error: None
                lost = any(isinstance(array, jax.Array) and array.is_deleted() for array in state)
                for cell, old, new in zip(cells, state, arrays, strict=True):
                    if cell is None:
                        continue
                    if lost:
                        cell.lose(error)
                    elif cell._array is new:
                        cell.set(old)
                self._gradients.back_to(gradients)
                if key is not None:
                    self._backend.keys.untaken(key)
                self._ran = False

        later.failed = failed

    def __call__(self, leaves: list[Any]) -> Any:
        with Undo() as undo, undo, dispatch.lock:
            use_x64(undo)
            dispatch.settled()
            self._gradients.follow(self._tracing.inputs, self._changed)
            wait = self._ran or not isinstance(self._compiled, SegmentedStep)  # that waits itself for what is to come
            state, cells = self.inputs.state(self._changed, leaves, wait)
            rest = self.inputs.arrays(self._read, leaves, wait)
            key = self._backend.keys.next() if self._tracing.draws else None
            seed = key if key is not None else _no_seed(self._backend.mesh is None)
            begin = timeline.current().now()
            run = dispatch.begin(self._compiled, state, rest, seed)

            def commit(outputs: Sequence[Sequence[Any]]) -> None:
                self._commit(cells, key, *outputs)

            def lose(error: BaseException) -> None:
                for cell in cells:
                    if cell is not None:
                        cell.lose(error)

            step = dispatch.Transaction(run, state, commit, lose)
            first = not self._ran or isinstance(self._compiled, SegmentedStep) and not self._compiled.ran
            gradients = self._gradients.now() if first else None
            try:
                results = step.execute()[2]
            except BaseException as error:
                step.settle(error)
                raise
            if first:
                self._first(run, state, cells, key, gradients)
            if not self._ran:
                jax.block_until_ready(results)
                timeline.current().add("first step", begin)
                timeline.current().mark(timeline.FIRST_LOSS)
        self._ran = True
        arrays = iter(results)
        out = [result.value if isinstance(result, Kept) else resident(next(arrays)) for result in self._results]
        for call in self._tracing.closures:
            call.after_step([next(arrays) for _ in call.refs])
        loop = loops.current()
        if loop is not None:
            loop.dispatched(results)
        return pytree.tree_unflatten(out, self._result_spec)


def _differ(a: Store | torch.Tensor, b: Store | torch.Tensor) -> bool:
    """Whether two tensors, of one shape and dtype, are others and do not hold the same bytes."""
    if a is b or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.data_ptr() != b.data_ptr() and not same_bytes(a, b)


def _nobody_elses(tensor: torch.Tensor) -> bool:
    """Whether `tensor` alone holds its memory: no view, no array of numpy's."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference() or not owned_by_torch(tensor):
        return False
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.itemsize and tensor.is_contiguous()
    return whole and torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor's own, and `storage`


@functools.cache
def _no_seed(on_device: bool) -> Any:
    """For a step that draws nothing."""
    return jax.device_put(np.zeros(2, np.uint32)) if on_device else np.zeros(2, np.uint32)


def resident(array: jax.Array) -> DeferredTensor:
    """A tensor of the backend that holds `array`."""
    shape = tuple(array.shape)
    value = Value(shape, dense_stride(shape), to_torch(array.dtype), torch.device("cpu"))
    store = Store(value)
    store.resident = Cell(value, array=array, sharding=_mesh_sharding(array))
    return DeferredTensor.wrap(store, shape, value.stride, 0, value.dtype)


def _mesh_sharding(array: jax.Array | Callable[[], jax.Array]) -> Any:
    if callable(array):  # still to come, of a step that is not on a mesh
        return None
    return array.sharding if len(array.sharding.device_set) > 1 else None


def _reachable(backend: Backend, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The tensors that outlive a step: gradients, buffers and attributes of the models, the optimizers' state."""
    for model in backend.models:
        for _, tensor, kind in named_tensors(model):
            yield tensor
            if kind == "parameter" and tensor.grad is not None:
                yield tensor.grad
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            yield from (v for v in entries.values() if isinstance(v, torch.Tensor))
