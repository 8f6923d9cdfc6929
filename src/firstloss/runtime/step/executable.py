"""One traced, lowered and compiled step: from a Program to an executable, and from a batch to a loss."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch

from ... import timeline
from ...capture import numbers_in_memory, session
from ...capture.constants import owned_by_torch
from ...capture.deferred import named_tensors
from ...capture.lost_history import returned
from ...capture.new_memory import Viewer
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import StepTrace, is_traced, storage_key
from ...capture.tensor import Geometry, geometry_of, note_memory, reseat
from ...compat.torch_names import storage_use_count
from ...errors import BackendError, FirstlossError, LoweringError, TraceError
from ...lower import program as lowering
from ...lower.dtypes import to_jax
from ...lower.segments import cut
from ...program.compare import same_bytes
from ...program.graph import Program, Ref, Value
from ...program.source import here
from ...undo import Undo
from ..backend import Backend
from ..device import dispatch
from ..device.cell import Cell
from ..device.host_memory import HostMemory
from ..device.lazy import LazyArray
from ..device.placement import begin_behind
from ..device.tensors import mesh_sharding, resident, store_of
from ..guards.bindings import Bind
from ..guards.effects import Effects
from ..guards.left import Env, Given, Left
from ..jaxlib import compile_options, use_x64, x64
from ..structures import containers
from . import closures as _closures  # noqa: F401 - registers what an assertion in a step does
from . import loop as loops
from .arguments import Arguments, home_of, setting, view_of
from .first_loss import FirstLoss
from .gradients import Gradients
from .inputs import Inputs, keep
from .modes import ModesLeft
from .optimizers import Optimizers
from .segmented import SegmentedStep
from .whole import WholeStep


class Surroundings(Protocol):
    """What an executable asks of the Python around a step; see `changes.py`."""

    snapshot: Any
    recording: Any

    def effects(self, left: Left, weights: set[int]) -> Effects: ...

    def restore(self, left: Left) -> None: ...

    def put_back(self) -> bool: ...


class Outgoing(NamedTuple):
    """A traced tensor that the step returns or leaves: the output that holds it, and how it looks at that."""

    output: str
    geometry: Geometry | None  # None: it is all of the output
    shape: tuple[int, ...]
    dtype: torch.dtype
    leaf: bool  # it is one that wants a gradient
    computed: bool  # of those that do
    attributes: dict[str, Any]


class Call:
    """One call of an executable: its arguments, and what it returns and binds once the step has been run."""

    __slots__ = ("arguments", "homes", "result", "bindings", "schedules", "memory")

    def __init__(self, arguments: Arguments, homes: Sequence[DeferredStorage | torch.Tensor]) -> None:
        self.arguments = arguments
        self.homes = homes  # of the state that it changes
        self.result: Any = None
        self.bindings: list[Bind] | None = None
        self.schedules: list[Bind] = []  # what asks for its results
        self.memory: dict[DeferredStorage, HostMemory] = {}  # that its weights have left to those who were handed it


class Shared(Exception):
    """The step meets some of its arguments in another way as well: they have to go in as themselves.

    Attributes:
        leaves: their numbers.
    """

    def __init__(self, leaves: set[int]) -> None:
        super().__init__(leaves)
        self.leaves = leaves


class Executable:
    """A step for one kind of batch. Called with the arguments, it runs the step and returns what the step does.

    Inputs of the executable are of two kinds: the state that the step changes, which is donated, so that its memory is
    updated in place; and the rest: weights that are only read, the batch, numbers such as the learning rate.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Arguments,
        backend: Backend,
        around: Surroundings,
        find: Callable[[Executable], Executable | None] = lambda traced: None,
    ) -> None:
        """Trace and compile `step`.

        Args:
            around: the Python around the step.
            find: given this, traced and not yet compiled, an earlier one that computes the same, whose compiled step
                will do.
        """
        self._backend = backend
        self._around = around
        self._name = getattr(step, "__name__", "step")
        self.raised: Exception | None = None  # by the step's Python
        self.why_not: str | None = None  # why it has to be traced at each call, if so
        self._stand_in: dict[int, torch.Tensor] = {}
        self._stores: set[int] | None = None  # the ids of the inputs' homes, but for arguments
        self._origins: dict[int, int] = {}  # by the id of what stands there now, that of what it was traced with
        self._tracing = StepTrace()
        self._optimizers = Optimizers(self._tracing)
        self._batch: dict[Value, int] = {}
        self.inputs = Inputs(backend, self._tracing.inputs, self._batch, self._optimizers.hyperparameters)
        with timeline.span("trace"):
            weights = dict.fromkeys([*backend.parameters(), *around.snapshot.weights()])
            self._gradients = Gradients(weights)
            self._modes = ModesLeft()
            try:
                result = [self._trace(step, arguments)]
                self._modes.traced()
                self._tracing.refuse_overlaps()
                self._tracing.new_memory.settle()
                self._settle(result)
                self._optimizers.settled()
                shared = self.shared(arguments)
                if shared:
                    raise Shared(shared)
                self._forget_arguments()
                same = find(self) if backend.mesh is None else None
                self._modes.undo()  # what the step leaves is left when it has been run
            except BaseException as error:
                self._undo()
                if not around.put_back() and isinstance(error, Shared):
                    raise TraceError(
                        f"{here()}: {self._name} takes something from an iterator, and edits an argument whose memory "
                        "is that of another tensor which it uses. Edit a clone of it, or take what the iterator gives "
                        "before the step, and pass it."
                    ) from None
                raise
        del self._around  # whose snapshot holds all that was there before
        self._compiled: Any = self._compile() if same is None else same._compiled
        self._ran = same is not None
        self._reseated = session.reseated

    # -- from Python to a Program --

    def _trace(self, step: Callable[..., Any], arguments: Arguments) -> Any:
        """Run the step's Python once on tensors without values; returns what it returns."""
        leaves = arguments.leaves
        traced = list(leaves)
        self._traced: list[tuple[DeferredTensor, int]] = []
        snapshot = self._around.snapshot
        itself = {i for i, leaf in arguments.data() if leaf.requires_grad and leaf.is_leaf and snapshot.holds(leaf)}
        if itself:  # an optimizer's, perhaps
            raise Shared(itself)
        with Undo() as undo, undo, self._tracing.active(), self._optimizers.watched(self._around.recording):
            self._around.recording.begin(undo)
            made_of: dict[int, DeferredTensor] = {}
            for i, leaf in arguments.data():
                made = made_of.get(id(leaf))
                if made is None:
                    made = made_of[id(leaf)] = self._tracing.new_input(leaf, f"batch{i}", may_change=True)
                    self._batch[made._store.value] = i
                    made.requires_grad_(leaf.requires_grad)
                    self._traced.append((made, i))
                traced[i] = made
            for i, j in arguments.gradients.items():
                traced[i].grad = traced[j]
            self._arguments_before = leaves
            self._gradients_before = {i: traced[j] for i, j in arguments.gradients.items()}
            args, kwargs = arguments.rebuilt(traced[: len(arguments.given)])
            self._containers = list(containers((args, kwargs)))
            snapshot.also((args, kwargs))
            try:
                result = step(*args, **kwargs)
            except FirstlossError:
                raise
            except Exception as error:  # what was done before it is done, as in eager PyTorch; then it is raised
                if any(text in str(error) for text in numbers_in_memory.UNALLOCATED):
                    raise
                self.raised, result = error, None
        for argument, i in self._traced:
            if argument.shape != leaves[i].shape or argument.dtype != leaves[i].dtype:
                raise TraceError(
                    f"{here()}: {self._name} resizes its argument in place, or gives it other memory, and the caller's "
                    "tensor would not see it. Resize a clone of it, or return it."
                )
            if argument.grad is not None and not leaves[i].is_leaf:
                raise TraceError(
                    f"{here()}: {self._name} computes gradients for its argument {list(argument.shape)}, which was "
                    "computed outside of the step and wants them too: what it was computed from would get none. "
                    "Compute it in the step, or pass its detach()."
                )
        if self._backend.mesh is not None:
            self._backend.mesh.follow(self._backend.parameters(), self._optimizers.seen)
        self._backend.claim(self._optimizers.schedule_state)
        self._backend.claim(self._optimizers.new_state, behind=True)
        return result

    def _settle(self, result: list[Any]) -> None:
        """What goes in and what comes out: results, changed state, and what the step has left in Python, which is
        undone: each call does it at its end. `result` is emptied, so that nobody holds what is not left."""
        tracing = self._tracing
        given = Given(
            {id(made): i for made, i in self._traced},
            {id(made._store): i for made, i in self._traced},
            {id(container): n for n, container in enumerate(self._containers)},
            view_of,
            tracing.outside_of,
            self._around.snapshot.shares_memory,
        )
        left = Left(lambda tensor: is_traced(tensor, tracing), self._around.snapshot.holds, given)
        self._result = left.make(result.pop())
        returned = len(left.tensors)
        weights = {id(p) for p in self._backend.parameters()}
        self.effects = self._around.effects(left, weights)
        self._gradients.traced(tracing.inputs, self.effects, left)
        self._optimizers.traced(self.effects, left, self.move)
        self._follow_arguments(left)
        for viewer in tracing.new_memory.viewers:
            left.make(viewer.whole)  # so that what is kept is all of the memory
            self.effects.also(lambda: None, _own_memory(viewer, left.make(viewer.shows)))
        self._handed_out = [
            (store, left.make(kept)) for store, kept in tracing.new_memory.weights.items() if kept is not None
        ]
        self.effects.undo()
        outputs = self._leave(left, returned)
        tracing.new_memory.rejoin()
        self._changed: dict[Value, DeferredStorage | torch.Tensor] = {}
        for value, new in tracing.changes.items():
            outputs[f"new{len(self._changed)}"] = Ref.of(new)
            home = tracing.inputs[value]
            if value not in self._batch and isinstance(home, torch.Tensor) and _nobody_elses(home):
                # It lives on the backend from now on: each step would have to be waited for otherwise.
                self._backend.claim([home])
                home = tracing.inputs[value] = home._store  # type: ignore[attr-defined]
            self._changed[value] = home._store if type(home) is DeferredTensor else home  # moved since, by claim
        self._edited = [self._batch[value] for value in tracing.changes if value in self._batch]
        outside = any(isinstance(home, torch.Tensor) for home in self._changed.values())
        self._writes_outside = bool(self._edited) or outside
        for i, call in enumerate(tracing.closures):
            outputs.update({f"closure{i}.{j}": ref for j, ref in enumerate(call.refs)})
        self._arguments = [name for name in outputs if name.startswith("closure")]
        self.program = Program({value.label or "in": value for value in tracing.inputs}, outputs)
        if tracing.cbfloat16:
            from ...lower import cbfloat16

            for kept in (*tracing.changes.values(), *(outputs[name].value for name in self._made)):
                cbfloat16.refuse_state(kept)
            self.program = cbfloat16.in_place_of_float16(self.program)
        needed = {ref.value for ref in outputs.values()}
        for node in self.program.nodes:
            needed.update(ref.value for ref in node.refs())
            needed.update(ref.value for ref in node.writes)
        self._read = [v for v in tracing.inputs if v in needed and v not in self._changed]

    def _forget_arguments(self) -> None:
        """Each call has its own: those that it was traced with are not kept."""
        for value in self._batch:
            self._tracing.inputs[value] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        del self._traced, self._containers, self._arguments_before, self._gradients_before

    def _follow_arguments(self, left: Left) -> None:
        """What the step has done to its arguments, beside writing to them."""
        for made, i in self._traced:
            leaf = self._arguments_before[i]
            found = {k: v for k, v in made.__dict__.items() if k not in ("_store", *leaf.__dict__)}
            if made.requires_grad != leaf.requires_grad:
                found["requires_grad"] = made.requires_grad
            gradient = self._gradients_before.get(i)
            if made.grad is not gradient:
                found["grad"] = made.grad
            for name, value in found.items():
                self.effects.also(lambda: None, _on_argument(i, name, left.make(value)))

    def _leave(self, left: Left, returned: int) -> dict[str, Ref]:
        """Outputs for the traced tensors that are returned, or left in Python; for those that somebody else still holds
        as well. Tensors of one storage are views of one output."""
        tracing = self._tracing
        tensors: list[DeferredTensor] = []
        sharing: dict[int, list[int]] = {}
        for number in range(len(left.tensors)):
            sharing.setdefault(id(left.tensors[number]._store), []).append(number)
        outputs: dict[str, Ref] = {}
        found: dict[int, Outgoing] = {}
        self._out: list[str] = []  # what the first loss may be among
        self._made: list[str] = []  # what nobody waits for
        self._made_where: dict[str, Any] = {}
        for numbers in sharing.values():
            names, kind = (self._out, "out") if numbers[0] < returned else (self._made, "made")
            name = f"{kind}{len(names)}"
            names.append(name)
            tensors = [left.tensors[number] for number in numbers]
            # What is only left stays as it lies (a gradient may be a product transposed), unless it is part of it.
            whole = len(tensors) > 1 or kind == "made" and tensors[0]._ref().covers
            if self._backend.mesh is not None and kind == "made":
                store = tensors[0]._store
                self._made_where[name] = self._backend.mesh.of_store(store) if whole else self._backend.mesh.whole
            outputs[name] = Ref.of(tensors[0]._store.value) if whole else tensors[0]._ref()
            for number in numbers:
                tensor = left.tensors[number]
                size, _, _, dtype = geometry = geometry_of(tensor)
                leaf = tensor.requires_grad and tensor.is_leaf
                attributes = {k: v for k, v in tensor.__dict__.items() if k != "_store"}
                computed = tensor.requires_grad and not leaf
                found[number] = Outgoing(name, geometry if whole else None, size, dtype, leaf, computed, attributes)
                del tensor
        self._outgoing = [found[number] for number in range(len(left.tensors))]
        self.why_not = self._optimizers.counts or left.why_not and _leaves(left.why_not)
        tensors.clear()
        left.release()
        self._held: dict[str, DeferredStorage] = {}
        expected = {id(t._store) for t in _reachable(self._backend, self._optimizers.seen) if is_traced(t, tracing)}
        for store in self._survivors(expected):
            name = f"made{len(self._made)}"
            self._made.append(name)
            if self._backend.mesh is not None:
                self._made_where[name] = self._backend.mesh.of_store(store)
            outputs[name] = Ref.of(store.value)
            self._held[name] = store
        # In the order in which they are asked for: results, what is left.
        return {name: outputs[name] for name in (*self._out, *self._made)}

    def _survivors(self, expected: set[int]) -> list[DeferredStorage]:
        """Storages that the step has made and that somebody still holds, where the comparison has not found them."""

        placeholders = {id(home._store) for home in self._tracing.inputs.values() if type(home) is DeferredTensor}
        placeholders |= {id(viewer.whole._store) for viewer in self._tracing.new_memory.viewers}

        def alive() -> list[DeferredStorage]:
            stores = [store for made in self._tracing.made if (store := made()) is not None]
            ours = [s for s in stores if s.trace is self._tracing and id(s) not in placeholders]
            return [store for store in ours if store.alive()]

        found = alive()
        if any(id(store) not in expected for store in found):
            gc.collect(0)  # nothing was collected while the step was traced
            found = alive()
        found = [store for store in found if id(store) in expected or _is_held(store)]
        if self.why_not is None and any(id(store) not in expected for store in found):
            self.why_not = _leaves("a tensor in a place that cannot be seen")
        return found

    def signature(self) -> tuple:
        """What goes in and comes out, beside the Program: if both are the same, so is the compiled step."""
        order = {value: i for i, value in enumerate(self._tracing.inputs)}
        return (
            [order[v] for v in self._changed],
            [order[v] for v in self._read],
            self._out,
            self._made,
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

    def _from_outside(self) -> list[DeferredStorage | torch.Tensor | None]:
        """What goes in, in the signature's order; None for what each call is given anew."""
        given = {*self._batch, *self._optimizers.hyperparameters, *self._gradients.read}
        return [None if v in given else self._tracing.inputs[v] for v in (*self._changed, *self._read)]

    def _undo(self) -> None:
        """A step that could not be traced leaves nothing behind."""
        if hasattr(self, "effects"):
            self.effects.undo()
        else:
            self._around.restore(Left(lambda tensor: False, self._around.snapshot.holds))
        self._tracing.new_memory.rejoin()
        self._gradients.undo()
        self._modes.undo()
        new = self._optimizers.new_state
        for optimizer in self._optimizers.seen:
            for entries in optimizer.state.values():
                dead = [k for k, v in entries.items() if any(v is n for n in new) or is_traced(v, self._tracing)]
                for key in dead:
                    del entries[key]

    def move(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Of each pair, the second tensor stands now where the first did, and is like it: whether the step can go on
        with that one."""
        inputs = self._tracing.inputs
        homes = {id(home): value for value, home in inputs.items()}
        moved: list[tuple[Value, torch.Tensor]] = []
        for old, new in pairs:
            if id(self._origin(old)) in self._tracing.read or old is new:
                return False
            value = homes.get(id(old._store) if type(old) is DeferredTensor else id(old))
            if type(new) is DeferredTensor and not (new._ref().whole and new._store.trace is None):
                return False
            if value is None:
                if id(self._origin(old)) in self._tracing.outside:  # a view of what goes in
                    return False
                continue
            if type(old) is DeferredTensor and len(old._store.alive()) > 1:  # others show the same memory
                return False
            if type(old) is not DeferredTensor and self._tracing.views_of(self._origin(old)) > 1:
                return False
            if type(old) is DeferredTensor and not old._ref().whole or tuple(value.shape) != tuple(new.shape):
                return False
            if id(_home(new)) in homes and homes[id(_home(new))] is not value:
                if not any(_home(other) is _home(new) for other, _ in pairs):
                    return False
            moved.append((value, new))
        stores = [id(_home(new)) for _, new in moved]
        if len(set(stores)) != len(stores):
            return False
        self._stores = None
        for value, new in moved:
            inputs[value] = _home(new)
            if value in self._changed:
                self._changed[value] = _home(new)
        renamed = {id(new): self._origins.pop(id(old), id(old)) for old, new in pairs}
        for _, new in pairs:
            self._stand_in[renamed[id(new)]] = new
        self._origins.update(renamed)
        return True

    def _origin(self, tensor: torch.Tensor) -> Any:
        """What was there when the step was traced."""
        known = self._tracing.outside.get(self._origins.get(id(tensor), id(tensor)))
        return tensor if known is None else known[0]

    def outdated(self) -> bool:
        """Whether it was for a first step, or a number baked in, a weight's memory or the value of a tensor that
        its Python has read has been changed since."""
        if self._optimizers.first_step_only and self._ran or session.reseated != self._reseated:
            return True
        if any(read.outdated() for read in self._tracing.read.values()) or self._tracing.laid_out_anew():
            return True
        if self._tracing.new_memory.outdated():
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
        changed, read, made = list(self._changed), self._read, self._made
        names = [*self._out, *self._arguments]
        mesh = self._backend.mesh
        where = self.inputs.lie((*changed, *read))
        with timeline.span("lower"):
            # On a mesh the partitioner has to see all of it.
            whole = mesh is not None or self._backend.validate_only
            pieces = None if whole else cut(program, first=names)
        if pieces is not None:
            new = [f"new{i}" for i in range(len(changed))]
            return SegmentedStep(self._name, pieces, changed, read, (new, made, names), self._first_loss(names))

        first_loss = self._first_loss(names)
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

        run.__name__ = self._name
        shapes = [
            tuple(jax.ShapeDtypeStruct(v.shape, to_jax(v.dtype), sharding=where[v]) for v in part)
            for part in (changed, read)
        ]
        options: dict[str, Any] = {}
        if mesh is not None:
            made_where = tuple(self._made_where[name] for name in made)
            options["out_shardings"] = (tuple(where[v] for v in changed), made_where, mesh.of_results())

        def compile() -> Any:
            with x64():
                with timeline.span("lower"):
                    jitted = jax.jit(run, donate_argnums=(0,), **options)
                    lowered = jitted.lower(*shapes, jax.ShapeDtypeStruct((2,), np.uint32))
                if self._backend.validate_only:
                    return lowered
                with timeline.span("compile"):
                    compiled = lowered.compile(compile_options())
            dispatch.probe_memory([compiled])
            return compiled

        if first_loss is None:
            return compile()
        return WholeStep(compile, (*changed, *read), (len(changed), len(made)), first_loss)

    def leave_unexecuted(self, arguments: Arguments) -> Any:
        """Instead of a call, where steps are only compiled: what the step returns, without values; Python is left as a
        call leaves it, and weights as they are."""
        if isinstance(self._compiled, SegmentedStep):
            self._compiled.compile_all()
        call = Call(arguments, ())
        names = (*self._out, *self._arguments, *self._made)
        env = Env(
            self._fresh(dict.fromkeys(names, LazyArray(_not_executed))),
            arguments.leaves,
            arguments.containers,
            self._stand_in,
        )
        call.result = self._result(env)
        for bind in self.effects.bindings(env):
            bind()
        self._modes.leave()
        if self.raised is not None:
            raise self.raised
        return call.result

    def _first_loss(self, names: Sequence[str]) -> FirstLoss | None:
        """What computes the results of the first step without a compiler: that of new weights, not of those which a
        checkpoint had, so that a run that goes on has the losses of one that was never interrupted."""
        backend = self._backend
        if backend.first_loss != "eager" or backend.stepped or backend.mesh is not None or self.raised is not None:
            return None
        if backend.compile_only or backend.validate_only:
            return None
        found = FirstLoss(self.program, names)
        homes = [self._tracing.inputs[value] for value in found.inputs]
        weights = [home for home in homes if isinstance(home, DeferredStorage)]
        fresh = all(home.resident is None or home.resident.fresh for home in weights)
        return found if weights and fresh and found.possible else None

    # -- from a batch to a loss --

    def _commit(
        self,
        call: Call,
        cells: Sequence[Cell | None],
        key: np.ndarray | None,
        new: Sequence[Any],
        made: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """The step has been run: what it leaves in weights, state, Python and modes. May be done twice."""
        arrays = dict(zip((*self._out, *self._arguments, *self._made), (*results, *made), strict=True))
        for store, _ in self._handed_out:
            if store.resident.handed_out is not None:
                call.memory[store] = store.resident.handed_out
                store.resident.leave_memory()
        keep(call.homes, cells, new)
        for name, store in self._held.items():
            if store.resident is None:
                store.resident, store.trace = Cell(store.value, sharding=mesh_sharding(arrays[name])), None
            store.resident.set(arrays[name])
        if call.bindings is None:
            arguments = call.arguments
            env = Env(self._fresh(arrays), arguments.leaves, arguments.containers, self._stand_in)
            call.result = self._result(env)
            call.bindings = self.effects.bindings(env)
            call.bindings += [_taking(call.memory[s], make(env)) for s, make in self._handed_out if s in call.memory]
            call.schedules = [make(env) for make in self._optimizers.schedulers.afterwards]
        for bind in call.bindings:
            bind()
        self._modes.leave()
        self._backend.stepped = True
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
        arrays = [None if cell is None else cell.newest for cell in cells]

        def failed(error: BaseException) -> None:
            with dispatch.lock:
                later.failed = lambda error: None
                lost = any(isinstance(array, jax.Array) and array.is_deleted() for array in state)
                for cell, old, new in zip(cells, state, arrays, strict=True):
                    if cell is None:
                        continue
                    if lost:
                        cell.lose(error)
                    elif cell.newest is new:
                        cell.set(old)
                self._gradients.back_to(gradients)
                if key is not None:
                    self._backend.keys.untaken(key)
                self._ran = False

        later.failed = failed

    def shared(self, arguments: Arguments) -> set[int]:
        """The numbers of the arguments that the step meets in another way as well, or that lie in the memory of others,
        where it matters: some of them are written to."""
        inputs = self._tracing.inputs
        found: set[int] = set()
        data = list(arguments.data())
        for i, leaf in data:
            if type(leaf) is DeferredTensor:
                if self._stores is None:
                    self._stores = {id(h) for v, h in inputs.items() if v not in self._batch}
                if id(leaf._store) in self._stores:
                    found.add(i)
        if not self._writes_outside:
            return found
        where: dict[int, list[int]] = {}
        for i, leaf in data:
            where.setdefault(storage_key(leaf), []).append(i)
        written = {storage_key(arguments.leaves[i]) for i in self._edited}
        for key, numbers in where.items():
            alone = len({id(arguments.leaves[i]) for i in numbers}) == 1
            if key in written and not alone or self._tracing.shares(key):
                found.update(numbers)
        return found

    def __call__(self, arguments: Arguments) -> Any:
        shared = self.shared(arguments)
        if shared:
            raise Shared(shared)
        if not arguments.padded.isdisjoint(self._edited):
            raise TraceError(
                f"{here()}: {self._name} edits its argument in place, of which it was given a padded copy: the "
                "caller's tensor would not see it. Edit a clone of it, or return it."
            )
        leaves = arguments.leaves
        with Undo() as undo, undo, dispatch.lock:
            use_x64(undo)
            dispatch.settled()
            if self._gradients.follow(self._tracing.inputs, self._changed, self._stand_in):
                self._stores = None
            wait = self._ran or not hasattr(self._compiled, "ran")  # those wait themselves for what is to come
            homes = self._changed
            if self._edited:
                homes = {v: home_of(leaves[self._batch[v]]) if v in self._batch else h for v, h in homes.items()}
            state, cells = self.inputs.state(homes, leaves, wait)
            rest = self.inputs.arrays(self._read, leaves, wait)
            key = self._backend.keys.next() if self._tracing.draws else None
            seed = key if key is not None else _no_seed(self._backend.mesh is None)
            begin = timeline.current().now()
            run = dispatch.begin(self._compiled, state, rest, seed)

            call = Call(arguments, homes.values())  # type: ignore[arg-type]

            def commit(outputs: Sequence[Sequence[Any]]) -> None:
                self._commit(call, cells, key, *outputs)

            def lose(error: BaseException) -> None:
                for cell in cells:
                    if cell is not None:
                        cell.lose(error)

            step = dispatch.Transaction(run, state, commit, lose)
            first = not self._ran or not getattr(self._compiled, "ran", True)
            gradients = self._gradients.now() if first else None
            results = step.execute_or_settle()[2]
            if first:
                self._first(run, state, cells, key, gradients)
            if not self._ran:
                jax.block_until_ready(results)
                timeline.current().add("first step", begin)
                timeline.current().mark(timeline.FIRST_LOSS)
        self._ran = True
        to_closures = dict(zip(self._arguments, results[len(self._out) :], strict=True))
        for i, closure in enumerate(self._tracing.closures):
            closure.after_step([to_closures[f"closure{i}.{j}"] for j in range(len(closure.refs))])
        for schedule in call.schedules:
            schedule()
        loop = loops.current()
        if loop is not None:
            loop.dispatched(results)
        if self.raised is not None:
            raise self.raised
        return call.result

    def _fresh(self, arrays: dict[str, Any]) -> Callable[[int], torch.Tensor]:
        """Gives the new tensors of one call by their numbers, each once."""
        tensors: dict[int, torch.Tensor] = {}
        stores: dict[str, DeferredStorage] = {}

        def fresh(number: int) -> torch.Tensor:
            tensor = tensors.get(number)
            if tensor is None:
                output, geometry, shape, dtype, leaf, computed, attributes = self._outgoing[number]
                if geometry is None:
                    array = arrays[output]  # of another dtype than was traced, where that is cbfloat16
                    tensor = resident(array, shape, dtype) if type(array) is LazyArray else resident(array)
                else:
                    if output not in stores:
                        stores[output] = store_of(arrays[output], self._whole(output))
                    tensor = DeferredTensor.wrap(stores[output], *geometry)
                if attributes:
                    tensor.__dict__.update(attributes)
                if leaf:
                    tensor.requires_grad_(True)
                elif computed:
                    returned(tensor, self._name)
                tensors[number] = tensor
            return tensor

        return fresh

    def _whole(self, output: str) -> Value:
        return self.program.outputs[output].value


def _not_executed() -> Any:
    """Stands for an array that there will not be."""
    raise BackendError(
        "this has no value: the backend was made with compile_only or validate_only, so that steps are compiled and "
        "not executed."
    )


def _leaves(what: str) -> str:
    return f"it leaves {what}, which cannot be made anew at each call"


def _on_argument(number: int, name: str, make: Callable[[Env], Any]) -> Callable[[Env], Bind]:
    return lambda env: setting(env.arguments[number], name, make(env))


def _own_memory(viewer: Viewer, make: Callable[[Env], Any]) -> Callable[[Env], Bind]:
    """Lets a tensor look at what it looked at when the weight beneath it was given other memory."""

    def bind(shows: Any) -> None:
        tensor = viewer.tensor()
        if tensor is not None and tensor._store is viewer.before:
            reseat(tensor, shows._store, viewer.geometry)

    return lambda env: functools.partial(bind, make(env))


def _taking(memory: HostMemory, kept: DeferredTensor) -> Bind:
    """Lets those who look at what a weight was before the step do so in the memory that others were handed."""

    def bind() -> None:
        cell = kept._store.resident
        if cell.handed_out is None:
            cell.take_memory(memory)
            note_memory(kept._store)

    return bind


def _is_held(store: DeferredStorage) -> bool:
    """Whether an object of Python's holds a tensor of `store`, and not autograd's graph alone, which nobody reads: the
    results of a step have none."""
    tensors = store.alive()
    return any(referrer is not tensors for referrer in gc.get_referrers(*tensors))


def _differ(a: DeferredStorage | torch.Tensor, b: DeferredStorage | torch.Tensor) -> bool:
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
    return whole and storage_use_count(storage) <= 2  # the tensor's own, and `storage`


@functools.cache
def _no_seed(on_device: bool) -> Any:
    """For a step that draws nothing."""
    return jax.device_put(np.zeros(2, np.uint32)) if on_device else np.zeros(2, np.uint32)


def _home(tensor: torch.Tensor) -> DeferredStorage | torch.Tensor:
    return tensor._store if type(tensor) is DeferredTensor else tensor


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
