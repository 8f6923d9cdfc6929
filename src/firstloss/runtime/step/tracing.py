"""`trace_step`: run a step's Python code once, on tensors without values, observed, to get a `TracedProgram`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Protocol

import torch

from ...capture import control_flow as _control_flow  # noqa: F401 - for its patches
from ...capture import direct_memory_access, python_generators
from ...capture.deferred import named_tensors
from ...capture.input_numbers import NUMBERS
from ...capture.python_generators import GENERATORS, Draws
from ...capture.step import StepTrace, is_traced
from ...capture.tensor import DeferredTensor
from ...compat.torch_names import disable_dynamo
from ...errors import CaptureError, FirstlossError, MaterializeError, TraceError
from ...interpreter import Undo, is_raised_by_handler
from ...program.compare import Constant
from ...program.graph import Ref, Value
from ...program.program import Program
from ...program.source import here, raised_at
from ..backend import Backend
from ..device import host_tensors
from ..guards.effects import Effects, always
from ..guards.external_state import set_state, state_of
from ..guards.guard_set import GuardSet
from ..guards.places import Place, Varying
from ..guards.process_state import restore_environment
from ..guards.reconstruct import Reconstructor
from ..guards.recording import Recording
from ..guards.snapshot import Snapshot
from ..guards.sources import GuardSources
from .arguments import Arguments, TracedArguments
from .closures import find_existing
from .optimizer_state import entries_of
from .optimizers import Optimizers
from .owners import Gradients, Owners, Shared
from .process_settings import ModesLeft
from .reads import READ, Reads
from .traced_program import Outputs, TracedProgram, names_read

# How many functions outside of installed packages a step may reach for the code that runs not to be recorded.
_MOST_UNRECORDED = 200

# How much of an error's first line is quoted.
_QUOTED = 200


class TraceObserver:
    """Created before a trace, and queried after it.

    Attributes:
        records_code: whether the executed code is recorded.
        moves_generators: whether the step has moved Python's or NumPy's generator.
    """

    def __init__(self, roots: Iterable[Any], functions: Iterable[types.FunctionType], profile: bool) -> None:
        """
        Args:
            roots: where to start the search for what the step's Python code can reach.
            functions: functions that an earlier trace has called.
            profile: whether to record the executed code in any case. It is also recorded where the step can reach so
                much code that recording what runs costs less than guarding what might.
        """
        host_tensors.end()
        self._generators = python_generators.states()
        self.moves_generators: bool = False
        self.snapshot = Snapshot(roots, functions)
        self.records_code: bool = profile or self.snapshot.functions_of_users() > _MOST_UNRECORDED
        self.recording = Recording(self.snapshot.classes, self.snapshot.holds, self.records_code)
        self.guards: GuardSet | None = None
        self.varying: Varying | None = None
        self.has_run: bool = False  # the step's Python

    def effects(
        self, reconstructor: Reconstructor, optimizers: Optimizers, weights: set[int], draws: Draws | None = None
    ) -> Effects:
        """The step's side effects in Python. Guards are created as well.

        Args:
            optimizers: those that have stepped.
            weights: the ids of the backend's weights.
            draws: the draws that each call repeats.
        """
        reads = GuardSources(self.snapshot, self.recording)
        for optimizer in optimizers.seen:
            expected = optimizers.groups.expected
            reads.parameter_groups(optimizer, [expected[id(g)] for g in optimizer.param_groups if id(g) in expected])
            reads.optimizer_state(optimizer)
        effects = self.snapshot.compare(reads, reconstructor)
        for generator, state in reads.generators:
            if state != (now := state_of(generator)):
                effects.replaced(generator, functools.partial(set_state, generator), state, now)
        before, after = self._generators, python_generators.states()
        self.moves_generators = before != after
        repeated = draws is not None and draws.complete
        if before != after:
            leave = (lambda: None) if repeated else lambda: python_generators.restore(after)
            effects.add(lambda: python_generators.restore(before), always(leave))
        self.guards = reads.guards(after if repeated else before, weights, self.varying)
        self.recording.forget()
        return effects

    def has_consumed(self) -> bool:
        """Whether the step's Python has taken something from outside that a second run at this call would not find.
        What C functions take, of files and queues, is known if `records_code`."""
        taken = self.snapshot.consumed() is not None
        return taken or not all(call.is_repeatable for call in self.recording.outside.calls.values())

    def restore_contents(self) -> bool:
        """Undo changes of arrays, buffers, the environment and generators; returns whether nothing else has changed."""
        restore_environment(self.snapshot.environment.before)
        python_generators.restore(self._generators)
        return self.snapshot.restore_contents()


def trace_step(
    step: Callable[..., Any],
    arguments: Arguments,
    backend: Backend,
    observer: TraceObserver,
    places: Iterable[Place] = (),
    inputs: tuple[type, ...] = NUMBERS,
    reads: Reads | None = None,
    prints: bool = True,
    constants: Set[Constant] = frozenset(),
) -> TracedProgram:
    """Run the step's Python code once, on tensors without values. All its side effects are undone.

    The process's modes (`TracedProgram.modes`) are not, because they may affect the rest of this call.

    Args:
        observer: observes the Python side of the trace.
        places: the places of numbers that are inputs of the step.
        inputs: the classes of the arguments that are inputs if they vary, besides tensors, and of the generators whose
            draws are inputs; `READ`, and `STEPPED` or `STEPPED_NOW`.
        reads: which values it may read; None for none.
        prints: whether its `print` prints what is known while it is traced.
        constants: those that are inputs.

    Raises:
        Shared: if some arguments must be inputs themselves.
    """
    runs_eagerly = reads is not None and reads.runs_eagerly
    trace = _Trace(
        getattr(step, "__name__", "step"),
        backend,
        observer,
        places,
        inputs,
        runs_eagerly=runs_eagerly,
    )
    trace.trace.prints = prints
    trace.trace.constants = constants
    trace.trace.numbers_are_inputs = READ in inputs
    if reads is not None:
        trace.trace.contents = reads.contents_of(trace.trace)
        trace.trace.runs_eagerly = reads.runs_eagerly
        trace.trace.values_read = iter(reads.known)
    try:
        return trace.run(step, arguments)
    except BaseException as error:
        trace.undo()
        restored = observer.restore_contents()
        if isinstance(error, TraceError):
            error.can_run_eagerly = restored  # eager PyTorch may do what cannot be compiled
            if not restored and runs_eagerly and len(error.args) == 1:
                error.args = (
                    f"{error} And {trace.name} cannot run without a trace at this call, since it has taken an item "
                    "from an iterator, or something else from outside. Take it before the step, and pass it.",
                )
        elif isinstance(error, (CaptureError, MaterializeError)) and restored and reads:
            raised = StepRaisedError(str(error))
            raised.can_run_eagerly = True
            raise raised from error
        if not restored and isinstance(error, Shared):
            raise TraceError(
                f"{here()}: {trace.name} takes an item from an iterator (or changes something else that cannot be "
                "restored), and edits an argument that shares memory with another tensor that it uses. Edit a clone of "
                "it, or take the item before the step, and pass it."
            ) from None
        raise


class StepRaisedError(TraceError):
    """The step's Python has raised an error while it was traced; whether it does so otherwise, a run of it shows."""


def abandon(traced: TracedProgram, observer: TraceObserver) -> bool:
    """Undo all changes of a trace that is not usable; returns whether that was possible."""
    _undo(traced)
    return observer.restore_contents()


def _may_have_raised(error: Exception) -> bool:
    """Whether a trace may have caused an error: one of PyTorch's, or of Python's about a tensor. It causes none of
    other classes, of files and at ends of iterators. What a signal's handler raises must not be lost."""
    ours = type(error).__module__.partition(".")[0] in ("builtins", "torch")
    others = isinstance(error, (OSError, StopIteration, StopAsyncIteration, EOFError, MemoryError))
    return ours and not others and not is_raised_by_handler(error)


def _is_of_the_dispatcher(error: Exception) -> bool:
    """Whether PyTorch has no kernel of an operation for tensors without values."""
    return isinstance(error, NotImplementedError) and str(error).startswith("Could not run 'aten::")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:_QUOTED]


class _Trace:
    """A trace, from start to end."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        observer: TraceObserver,
        places: Iterable[Place],
        inputs: tuple[type, ...],
        runs_eagerly: bool,
    ) -> None:
        self.name = name
        self._places = places
        self._inputs = inputs
        self._runs_eagerly = runs_eagerly
        self.effects: Effects | None = None
        self.trace = StepTrace()
        self.optimizers = Optimizers(self.trace, observer.snapshot, inputs, keep_fused=backend.replays)
        weights = dict.fromkeys([*backend.parameters(), *observer.snapshot.weights()])
        self.gradients = Gradients(weights, observer.snapshot.tensors.values())
        self.modes = ModesLeft()
        self._backend = backend
        self._observer = observer

    def run(self, step: Callable[..., Any], arguments: Arguments) -> TracedProgram:
        """Trace `step`."""
        placeholders, result, raised = self._run(step, arguments)
        self.modes.traced()
        self.trace.refuse_overlaps()
        self.trace.new_memory.check()
        traced = self._collect(arguments, placeholders, result, raised)
        self.optimizers.end_trace()
        shared = traced.owners.shared(arguments)
        if shared:
            raise Shared(shared)
        if self.trace.contents is not None:
            self.trace.contents.keep_inputs()
        traced.owners.forget_arguments()
        return traced

    def _run(
        self, step: Callable[..., Any], arguments: Arguments
    ) -> tuple[TracedArguments, list[Any], Exception | None]:
        """Run the step's Python code; returns its result (in a list, to be emptied), or its exception."""
        snapshot, recording = self._observer.snapshot, self._observer.recording
        itself = {i for i, leaf in arguments.data() if leaf.requires_grad and leaf.is_leaf and snapshot.holds(leaf)}
        if itself:  # possibly an optimizer's parameters
            raise Shared(itself)
        raised = None
        active, watched = self.trace.active(), self.optimizers.watched(recording, snapshot)
        # TorchScript's optimizer runs another graph at a function's third call than at its first.
        unoptimized = torch.jit.optimized_execution(False)
        with Undo() as undo, undo, active, active, watched, watched, unoptimized:
            recording.begin(undo)
            disable_dynamo(undo)  # the step is compiled as a whole, with what torch.compile wraps
            placeholders = TracedArguments(arguments, self.trace, self._inputs)
            args, kwargs = placeholders.take()
            snapshot.add_root((args, kwargs))
            self.trace.existed = snapshot.holds
            self._observer.varying = Varying(self._places, self.trace.numbers)
            self._observer.varying.begin(undo)
            self.optimizers.groups.begin(undo, self._observer.varying)
            numbers = self.trace.numbers
            if set(GENERATORS) <= set(self._inputs):
                numbers.draws = Draws()
            self._observer.has_run = True
            try:
                result = [step(*args, **kwargs)]
            except FirstlossError:
                raise
            except Exception as error:
                if direct_memory_access.is_unallocated(error):
                    raise
                if self._runs_eagerly and _may_have_raised(error) and not self._observer.has_consumed():
                    raise StepRaisedError(
                        f"{raised_at(error)}: this raises {type(error).__name__} while {self.name} is traced, and not "
                        f"when it runs: {_first_line(error)}."
                    ) from error
                if self._runs_eagerly and _is_of_the_dispatcher(error):
                    raise TraceError(f"{raised_at(error)}: this cannot be traced ({_first_line(error)}).") from error
                # As in eager PyTorch, earlier effects remain, and the call raises it.
                raised, result = error, [None]
            if numbers.draws is not None:
                numbers.draws.check()
            self.trace.check_memory()
        numbers.is_open = False
        placeholders.check(self.name)
        self.optimizers.check()
        backend = self._backend
        if backend.mesh is not None:
            backend.mesh.follow(backend.parameters(), self.optimizers.seen)
        backend.move_to_device(self.optimizers.schedule_state)
        backend.move_to_device(self.optimizers.state.new, behind=True)
        return placeholders, result, raised

    def _collect(
        self, arguments: Arguments, placeholders: TracedArguments, result: list[Any], raised: Exception | None
    ) -> TracedProgram:
        """Determine inputs and outputs: results, changed state, and side effects in Python, which are undone and
        repeated at the end of each call. `result` is emptied, so that nothing keeps tensors alive."""
        trace, backend, snapshot = self.trace, self._backend, self._observer.snapshot
        reconstructor = Reconstructor(
            lambda tensor: is_traced(tensor, trace), snapshot.holds, placeholders.given(trace, snapshot.shares_memory)
        )
        make_result = reconstructor.make(result.pop())
        returned = len(reconstructor.tensors)
        self._observer.recording.passed = find_existing(trace.closures, reconstructor)
        self.trace.existed = lambda obj: False  # also releases what existed
        for owner in trace.inputs.values():
            if not isinstance(owner, torch.Tensor) or type(owner) is DeferredTensor:
                continue
            if snapshot.shares_memory(owner, edited=True):
                raise TraceError(
                    f"{here()}: {self.name} reads a tensor of shape {list(owner.shape)}, and edits its memory through "
                    "an array or a buffer that shares it, bypassing PyTorch. Edit the tensor itself, or the array "
                    "between two steps."
                )
        weights = {id(p) for p in backend.parameters()}
        effects = self.effects = self._observer.effects(reconstructor, self.optimizers, weights, trace.numbers.draws)
        owners = Owners(trace, placeholders.inputs)
        self.gradients.traced(trace.inputs, effects, reconstructor)
        self.optimizers.schedulers.traced(self.name, effects, reconstructor)
        if trace.set_final_generator_state is not None:
            effects.add(lambda: None, always(trace.set_final_generator_state))
        placeholders.follow(effects, reconstructor)
        copies = {storage: old.copy for storage, old in trace.new_memory.weights.items() if old.copy is not None}
        old_memory = {storage: reconstructor.make(copy) for storage, copy in copies.items()}
        effects.undo()
        self.optimizers.schedulers.check_results(arguments.leaves)
        if self._observer.guards is not None:
            self._observer.guards.begin(trace.numbers, owners.weights())
        kept = {id(copy._storage) for copy in copies.values()}
        reachable = _reachable(backend, self.optimizers.seen)
        outputs = Outputs(reconstructor, returned, trace, backend.mesh, kept, reachable)
        trace.new_memory.restore_views()
        owners.find_changed(backend.move_to_device if backend.is_xla else None, self.gradients.ids())
        refs = dict(outputs.refs)
        refs.update({f"new{i}": Ref.of(new) for i, new in enumerate(trace.changes.values())})
        for i, call in enumerate(trace.closures):
            refs.update({f"closure{i}.{j}": ref for j, ref in enumerate(call.refs)})
        names = names_read(trace)
        refs.update(zip(names, trace.numbers.reads.values(), strict=True))
        notes = {
            name: f"{read.text or 'read'} at {read.source}"
            for name, read in zip(names, trace.number_reads, strict=True)
        }
        inputs: dict[str, Value] = {}
        for value in trace.inputs:  # two groups' rates are of one name
            label = value.label or "in"
            inputs[label if label not in inputs else f"{label}_{len(inputs)}"] = value
        program = Program(inputs, refs, notes)
        if trace.cbfloat16:
            from ...lower import cbfloat16

            for value in (*trace.changes.values(), *(refs[name].value for name in outputs.made)):
                cbfloat16.refuse_state(value)
            program = cbfloat16.in_place_of_float16(program)
        owners.find_read(program.nodes, refs.values())
        return TracedProgram(
            name=self.name,
            program=program,
            owners=owners,
            outputs=outputs,
            result=make_result,
            effects=effects,
            modes=self.modes,
            optimizers=self.optimizers,
            gradients=self.gradients,
            for_closures=[name for name in refs if name.startswith("closure")],
            old_memory=old_memory,
            raised=raised,
            trace=trace,
        )

    def undo(self) -> None:
        """Undo all changes of a step that could not be traced."""
        if self.effects is None:
            self._observer.snapshot.undo()
        _undo(self)


class _Undoable(Protocol):
    trace: StepTrace
    optimizers: Optimizers
    gradients: Gradients
    modes: ModesLeft
    effects: Any


def _undo(traced: _Undoable) -> None:
    if traced.effects is not None:
        traced.effects.undo()
    traced.trace.restore_generators()
    traced.trace.new_layouts.undo()
    traced.trace.new_memory.restore_views()
    traced.gradients.undo()
    traced.modes.undo()
    traced.optimizers.state.undo()


def _reachable(backend: Backend, optimizers: list[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The tensors that outlive a step: gradients, buffers and attributes of the models, the optimizers' state."""
    for model in backend.models:
        for _, tensor, kind in named_tensors(model):
            yield tensor
            if kind == "parameter" and tensor.grad is not None:
                yield tensor.grad
    for optimizer in optimizers:
        yield from (value for _, _, value in entries_of(optimizer.state) if isinstance(value, torch.Tensor))
