"""`Request`: a call of a step that no compiled step fits, and how it is traced, checked and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import timeline
from ...capture.input_numbers import NUMBERS
from ...capture.step import Contents
from ...errors import LoweringError, NotTraceableError, TraceError
from ...program.compare import Constant, first_difference
from ...program.source import here
from ..backend import Backend
from ..guards.equality import same_items
from ..guards.packages import is_installed
from ..guards.places import Place
from ..lazy_jax import on_cpu
from . import tracing
from .arguments import Arguments
from .mesh_reads import MeshContents
from .reads import ComputedStep, Reads, TracedContents
from .scheduler_results import STEPPED, STEPPED_NOW
from .traced_program import TracedProgram
from .tracing import TraceObserver

if TYPE_CHECKING:
    from .compiled_step import CompiledStep

# How often a call looks for the compiled step of other outcomes, before it is run by PyTorch's kernels.
MAX_RETRIES = 2


class Request(NamedTuple):
    """A call of a step, for which a compiled step is looked up."""

    step: Callable[..., Any]
    arguments: Arguments
    backend: Backend
    retried: bool = False  # traced already at this call, and now again with some arguments as inputs themselves
    places: Sequence[Place] = ()  # of numbers that are inputs
    inputs: tuple[type, ...] = NUMBERS  # see `tracing.trace_step`
    reads: bool = False  # whether it may read any values
    reads_by_all: bool = False  # whether it may read values which all processes of a mesh compute together
    values_read: Sequence[Any] = ()  # at a call whose outcomes were others than those of a compiled step
    retries: int = 0  # how often they were
    once: bool = False  # whether the compiled step may be called only once; see `compiling.compile_step`
    then_inputs: bool = False  # whether what varies becomes an input at this call, if it can be traced again
    then_reads: bool = False  # and whether what it reads does
    constants: Set[Constant] = frozenset()  # that are inputs
    specialized: TracedProgram | None = None  # an abandoned trace of this call, specialized on all numbers and texts

    def roots(self) -> tuple[Any, ...]:
        """The roots of everything that the step's Python code can reach."""
        # Code reaches by `sys.stdout`, where the search does not follow it, what users have put there.
        streams = [file for file in (sys.stdout, sys.stderr) if not is_installed(type(file).__module__)]
        return (self.step, *self.arguments.guarded(), *self.backend.models, *streams)

    @property
    def runs_where_weights_are(self) -> bool:
        """Whether its Python may run at each call, and computes where the weights are: on this host, unsharded. Then
        that is no slower than to trace the step at each call."""
        return self.reads and self.backend.mesh is None and on_cpu()

    def compiled(self, observer: TraceObserver, find: Callable[[TracedProgram], CompiledStep | None]) -> CompiledStep:
        """Trace the step, and compile it.

        Args:
            observer: observes the Python side of the trace.
            find: finds an equivalent earlier step, whose executable is reused; or raises.
        """
        with timeline.span("trace"):
            traced = tracing.trace_step(
                self.step, self.arguments, self.backend, observer, self.places, self.inputs,
                self._may_read(self.values_read), prints=self.specialized is None, constants=self.constants,
            )  # fmt: skip
            try:
                same = self._accept(traced, observer, find)
            except BaseException:
                tracing.abandon(traced, observer)
                raise
        try:
            computed = self.reads and self._is_for_one_call(traced)
            return self._computed(traced) if computed else self._bound(traced, same)
        except BaseException as error:
            if tracing.abandon(traced, observer) and isinstance(error, LoweringError) and self.reads:
                raise NotTraceableError(str(error)) from error
            raise

    def _may_read(self, known: Sequence[Any]) -> Reads | None:
        """Which values the step may read; `known` are the first."""
        seed, mesh = self.backend.keys.next, self.backend.mesh
        if self.reads:
            return Reads(lambda trace: TracedContents(trace, seed), known=known)
        if self.reads_by_all and mesh is not None:
            return Reads(lambda trace: MeshContents(trace, mesh, seed), runs_eagerly=False, known=known)
        return None

    def _is_for_one_call(self, traced: TracedProgram) -> bool:
        return traced.is_for_one_call or self.retries > MAX_RETRIES and self.reads

    def _accept(
        self, traced: TracedProgram, observer: TraceObserver, find: Callable[[TracedProgram], CompiledStep | None]
    ) -> CompiledStep | None:
        """Check whether a trace can be used; returns an equivalent earlier step, if there is one.

        Raises:
            InputNumberError: if it cannot, with these inputs, but can be traced again without them.
            ReadsSchedulerError: likewise, or with what it reads of schedulers, too.
            Repeatable: if it has no inputs, but can be traced again, with them.
            TraceError: if it cannot.
        """
        self._refuse_twice(observer)
        traced.modes.undo()  # set again after the step has run
        if (draws := traced.trace.numbers.draws) is not None and not draws.complete:
            raise InputNumberError
        if self._is_for_one_call(traced):
            may_repeat = self.then_reads and _reads_are_repeatable(traced, observer)
            # Nothing shows that its Python treats them as it does numbers. What it has consumed is gone, though.
            if has_inputs(traced) and not observer.has_consumed() and not (may_repeat and STEPPED in self.inputs):
                raise traced.optimizers.schedulers.reads_now or InputNumberError
            if may_repeat:
                traced.trace.contents = None
                raise Repeatable(traced)
            return None if self.reads else find(traced)
        if self.then_inputs and traced.raised is None and _can_run_twice(traced, observer):
            traced.trace.contents = None
            raise Repeatable(traced)
        same = find(traced)
        self._prove_inputs(traced, same, observer)
        return same

    def _prove_inputs(self, traced: TracedProgram, same: CompiledStep | None, observer: TraceObserver) -> None:
        """Check that the step's Python treats the numbers and texts that are inputs as it treats others, unless it has
        consumed something, which another trace would not find.

        Raises:
            InputNumberError: if it does not, or if that cannot be found out.
        """
        contents = traced.trace.contents
        traced.trace.contents = None
        if not has_inputs(traced) or observer.has_consumed():
            return
        if traced.raised is not None:
            raise InputNumberError
        if same is not None and _inputs_of(traced) <= _inputs_of(same.traced):
            return
        if not _can_run_twice(traced, observer) or traced.trace.number_reads and observer.recording.writes.calls:
            must_be_proved = self.reads or STEPPED not in self.inputs  # else it can only be refused
            if traced.trace.number_reads or _creates_state(traced) and must_be_proved:
                raise InputNumberError
        elif not self._is_the_same_without_inputs(traced, contents):
            raise InputNumberError

    def _bound(self, traced: TracedProgram, same: CompiledStep | None) -> CompiledStep:
        """The step that runs a trace; by the executable of an equivalent earlier one, if there is one."""
        from . import compiling  # imported late, because it imports JAX
        from .compiled_step import CompiledStep
        from .inputs import Inputs

        inputs = Inputs(self.backend, traced.owners, traced.numbers)
        if same is not None and not (
            inputs.same_shardings(same.inputs) and traced.outputs.same_shardings(same.traced.outputs)
        ):
            same = None
        executable = (
            compiling.compile_step(traced, inputs, self.backend, self.once) if same is None else same.executable
        )
        return CompiledStep(traced, inputs, executable, self.backend, ran=same is not None)

    def _computed(self, traced: TracedProgram) -> CompiledStep:
        """A step that has read values, for this call only."""
        from .compiled_step import CompiledStep
        from .inputs import Inputs

        inputs = Inputs(self.backend, traced.owners, traced.numbers)
        contents, mesh = traced.trace.contents, self.backend.mesh
        assert isinstance(contents, TracedContents)
        shardings = dict(zip(traced.groups.outputs[0], map(inputs.where.get, traced.owners.changed), strict=True))
        shardings |= traced.outputs.where
        whole = None if mesh is None else mesh.whole
        executable = ComputedStep(contents, traced, lambda name: shardings.get(name, whole))
        traced.trace.contents = None
        return CompiledStep(traced, inputs, executable, self.backend, ran=False)

    def _is_the_same_without_inputs(self, traced: TracedProgram, contents: Contents | None) -> bool:
        """Whether a trace that is specialized on all numbers and texts gives the same Program, and leaves the same
        numbers and texts in Python: whether the step's Python does not see the difference between a number and an input
        number (`type(x) is float`)."""
        if self.specialized is not None:
            return self._is_the_same(traced, self.specialized, contents)
        observer = TraceObserver(self.roots(), (), False)
        reads = traced.trace.numbers.reads if self.reads_by_all else ()  # known, without asking the other processes
        values_read = [read.example for read in reads] or self.values_read
        specialized = tracing.trace_step(
            self.step, self.arguments, self.backend, observer, (), (STEPPED_NOW,), self._may_read(values_read),
            prints=False,
        )  # fmt: skip
        try:
            return self._is_the_same(traced, specialized, contents)
        finally:
            tracing.abandon(specialized, observer)

    def _is_the_same(self, traced: TracedProgram, specialized: TracedProgram, contents: Contents | None) -> bool:
        arguments = self.arguments
        traced.trace.numbers.read_all(arguments.leaves, arguments.known)
        numbers = {value: number.read(arguments.leaves, arguments.known) for value, number in traced.numbers.items()}
        for expression, ref in traced.trace.numbers.reads.items():
            assert contents is not None
            numbers[ref.value] = contents.of(ref.value) if ref.value.shape else expression.example
        left, expected = (one.effects.reconstructor.plain for one in (traced, specialized))
        difference = first_difference(specialized.program, traced.program, numbers, specialized.constants)
        return difference is None and same_items(left, expected)

    def _refuse_twice(self, observer: TraceObserver) -> None:
        """Reject a second trace at one call if the first may have changed files that the second reads."""
        calls = observer.guards.external_calls if self.retried and observer.guards is not None else ()
        for function, line in calls:
            raise TraceError(
                f"{line or here()}: {getattr(self.step, '__name__', 'the step')} calls {function}(), and edits an "
                "argument that shares memory with another tensor that it uses, so its Python code would run twice at "
                "this call. Edit a clone of it, or read before the step, and pass what was read."
            )


def _inputs_of(traced: TracedProgram) -> set[tuple[Any, ...]]:
    """The numbers and texts that were inputs in its trace: in words, and where they are read."""
    trace = traced.trace
    sources = [expression.source for expression in trace.numbers.sources if expression.source is not None]
    inputs: set[tuple[Any, ...]] = {(s.description, _where(s.read)) for s in sources if not s.trusted}
    if traced.optimizers.schedulers.has_inputs:  # also those that it has not computed with
        inputs.add(("of schedulers",))
    return inputs | {(read.text, read.source) for read in trace.number_reads if trace.numbers_are_inputs}


def _where(read: Any) -> Any:
    """What tells apart places that are described alike: two lists, or two arguments."""
    place = getattr(read, "__self__", None)
    return place.id if isinstance(place, Place) else read.__reduce__()[1] if type(read) is itemgetter else None


def has_inputs(traced: TracedProgram) -> bool:
    """Whether numbers or texts were inputs in its trace."""
    return bool(_inputs_of(traced))


def _can_run_twice(traced: TracedProgram, observer: TraceObserver) -> bool:
    """Whether the step's Python can run twice at one call: whether all that it changes is restored exactly, and the
    optimizers' state that was created for it need not be created again."""
    assert observer.guards is not None
    unrestored = traced.retrace_reason or observer.guards.unguardable
    consumes = not all(call.is_repeatable for call in observer.guards.external_calls)
    return not (unrestored or consumes or _creates_state(traced))


def _creates_state(traced: TracedProgram) -> bool:
    """Whether an optimizer's state is created for it."""
    return bool(traced.optimizers.state.new) and traced.trace.runs_eagerly


def _reads_are_repeatable(traced: TracedProgram, observer: TraceObserver) -> bool:
    """Whether a step has read numbers only, and its Python can run once more at this call, unnoticed."""
    assert observer.guards is not None
    trace = traced.trace
    if trace.reads or trace.printed or not trace.number_reads or traced.raised is not None:
        return False
    if observer.recording.writes.calls:
        return False
    return observer.records_code and not observer.guards.external_calls and _can_run_twice(traced, observer)


class Repeatable(Exception):
    """A step without inputs may be traced again at this call: with those that vary, and what it reads, as inputs.

    Attributes:
        traced: the trace, which has been abandoned.
    """

    def __init__(self, traced: TracedProgram) -> None:
        super().__init__()
        self.traced = traced


class InputNumberError(Exception):
    """The step's Python does not treat an input number as it does a number, or an input text as a text."""
