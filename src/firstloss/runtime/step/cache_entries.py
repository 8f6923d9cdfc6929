"""`CacheEntries`: the compiled steps for one kind of call, with their guards, and when one is traced again."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...capture.input_numbers import NUMBERS
from ...capture.input_texts import TEXTS
from ...capture.python_generators import GENERATORS
from ...errors import GraphChangedError, TraceError, ValueReadError
from ...program.compare import Constant, changed_constants, first_difference
from ...program.source import here
from ..guards.equality import same_items
from ..guards.external_writes import ExternalWrites
from ..guards.guard_set import GuardSet
from ..guards.guards import Change
from ..guards.places import Place
from ..guards.recording import functions_of
from .arguments import Arguments
from .owners import Shared
from .reads import READ, OutcomeChanged, check_outcomes
from .request import MAX_RETRIES, Repeatable, Request, has_inputs
from .retrace_reports import ADVICE, Reports, reasons
from .scheduler_results import STEPPED, ReadsSchedulerError, is_number_list
from .traced_program import TracedProgram
from .tracing import StepRaisedError, TraceObserver
from .untraced_calls import UntracedCalls

if TYPE_CHECKING:
    from ..backend import Models
    from .compiled_step import CompiledStep


# How many compiled steps there may be whose outcomes differ.
_MAX_OUTCOMES = 8

# How many steps are compiled in a row, none of which a later call fits, before the next calls run untraced; fewer if
# they differ in what they have read, as the steps of an adaptive solver do.
_MAX_UNUSED = 3
_MAX_OUTCOMES_UNUSED = 1

# How many steps that differ in their outcomes are compiled at first (one, if they have many outcomes, as an adaptive
# solver's do), and after how many calls that fit one of them one more is.
_OUTCOMES_AT_FIRST = 4
_MANY_OUTCOMES = 16
_CALLS_FOR_ONE_MORE = 8

# How many entries, of different guards, are kept for one Program and the same weights: a step that changes a setting
# at every third call, and sets it back at the next, comes back to the same few states.
_MAX_STATES = 4

# At how many calls in a row it is traced, for whatever reasons, before the next calls run untraced.
_MAX_IN_A_ROW = 8

# The number of traces after which functions that are new in each are assumed to be created by the step itself.
_MAX_FUNCTIONS = 10_000

# The fraction of time that is spent at most on checking for changes that cannot be seen.
_CHECKING = 0.01


class CacheEntry:
    """A compiled step, and the guards of its trace.

    Attributes:
        called: the number of the last call of it.
        models: the numbers of the models whose weights it reads.
        weights: the ids of these weights.
    """

    def __init__(self, step: CompiledStep, observer: TraceObserver, seconds: float, models: Models) -> None:
        """`models`: those of its backend."""
        assert observer.guards is not None
        self.step = step
        self.called = 0
        read = _weights_read(step.traced, models)
        self.models: frozenset[int] = frozenset(read)
        self.weights: frozenset[int] = frozenset(id(weight) for weights in read.values() for weight in weights)
        self.guards: GuardSet = observer.guards
        self.optimizers = observer.snapshot.optimizers
        # Whether the executed code is known. If not, names that it computes may be read unnoticed: the next call traces
        # again, and records the code.
        self.records_code: bool = observer.records_code
        self.writes: bool = bool(observer.recording.writes.calls)  # known where it records the code
        self.moves_generators: bool = observer.moves_generators
        self.uses = 0
        self._unseen: str | None = None
        self.again = 0  # how often it was retraced for its own changes
        self.seconds = seconds  # duration of a trace
        if self.guards.weak:  # holding objects would keep alive what the step may find dead
            self.guards.release()
        self._checked = time.perf_counter()

    def changes(self, arguments: Arguments) -> list[Change]:
        """What it reads that has changed since it was traced."""
        return self._other_changes(arguments) + self.guards.changes_of_gradients()

    def fits(self, arguments: Arguments) -> bool:
        """Whether nothing has changed. In this order: gradients differ most often between entries, and guards let go of
        tensors that the last call has replaced, which may be views of weights."""
        has_changed = self.guards.changes_of_gradients() or self._other_changes(arguments) or self.step.outdated()
        return not has_changed

    def differs_in_new_numbers(self, arguments: Arguments, known: Container[Any]) -> bool:
        """Whether only numbers that may become inputs are others than when it was traced, and not all do already, which
        are in the places `known`."""
        changed = [change.place for change in ([] if self.step.outdated() else self.changes(arguments))]
        return None not in changed and any(place is not None and place.id not in known for place in changed)

    def differs_in_gradients(self, arguments: Arguments) -> bool:
        """Whether it would fit if other weights required gradients, or had some."""
        return bool(self.guards.changes_of_gradients()) and not self._other_changes(arguments)

    def _other_changes(self, arguments: Arguments) -> list[Change]:
        return self.guards.changes(self.step.traced.owners.move, arguments.leaves, arguments.known)

    @property
    def traced_each_time(self) -> str | None:
        """Why it must be traced at each call, if it must."""
        if self.step.traced.retrace_reason is not None:
            return str(self.step.traced.retrace_reason)
        for held, description in self.guards.unguardable.values():
            kind = type(held).__qualname__
            return f"it reads {description}, an object of type {kind}, whose changes cannot be detected"
        for call in self.guards.external_calls:
            return f"{call.line or 'it'} calls {call.function}(), which may return something else each time"
        return self._unseen or self._too_large

    def differs_unseen(self) -> None:
        """Note that it behaved differently at the next call, although nothing that is guarded had changed."""
        self._unseen = "its second call behaved differently from its first for an unknown reason"

    @functools.cached_property
    def _too_large(self) -> str | None:
        """What user code reads that is too large to be compared at each call."""
        lines = self.guards.lines
        for name, description in self.guards.too_large:
            line = lines.where_read(name, user_code=True)
            if line is not None or lines.where_read(name) is None:  # not found in the code: read by a computed name
                return f"{line or 'it'} reads {description}, which is too large to compare at each call"
        return None

    def changes_by_step(self, changes: list[Change]) -> list[Change]:
        """Those of `changes` that the step itself has made, except replaced tensors with which it can continue."""
        changed_by_step = [change for change in changes if change.container_id in self.step.traced.effects.changed_ids]
        return [c for c in changed_by_step if not (isinstance(c.old, torch.Tensor) and isinstance(c.new, torch.Tensor))]

    def shares_program(self, other: CacheEntry) -> bool:
        """Whether only its guards are others: it has the same executable, and the same outcomes of what is read."""
        return self.step.executable is other.step.executable and self.step.traced.outcomes == other.step.traced.outcomes

    @property
    def made_for(self) -> tuple[frozenset[int], int]:
        """The models and weights that it is for: of those, a number, since there may be thousands."""
        return self.models, hash(self.weights)

    def check_is_due(self) -> bool:
        """Whether to trace again although no guard has failed."""
        if self.uses == 1:
            return True
        if not self.step.traced.trace.runs_eagerly:  # all processes must trace it at the same call
            return False
        return time.perf_counter() - self._checked > self.seconds / _CHECKING


def _weights_read(traced: TracedProgram, models: Models) -> dict[int, list[torch.Tensor]]:
    """The weights that, or whose gradients, are inputs, by the number of their model."""
    read = {number: traced.owners.among(model.parameters()) for number, model in models.numbered().items()}
    return {number: weights for number, weights in read.items() if weights}


_READS_SCHEDULER = (
    "reads something of a scheduler that has stepped in it, for which its Python would have to run twice at this call "
    "on this backend"
)


class CacheEntries:
    """The compiled steps for one kind of call, each with its guards; the most recently used one first.

    Attributes:
        called: the number of the last call of this kind.
    """

    def __init__(self, name: str, refuse: bool, check: bool | str) -> None:
        self.called: int = 0
        self._check = bool(check)
        self._always = check == "always"
        self._entries: list[CacheEntry] = []
        self._fitting: CacheEntry | None = None
        self._untraceable: TraceError | None = None  # of this call's trace
        self._held: frozenset[int] | None = None  # the ids of what it could reach, if it has run the step's Python
        self._refuse = refuse
        self._name = name
        self._functions: list[types.FunctionType] = []
        self._places: dict[tuple[int, Any], Place] = {}  # of numbers that have changed, and are inputs from then on
        self._changed: set[Constant] = set()  # those of operations that were others in another trace
        self._constants: set[Constant] = set()  # those that were at least twice, and are inputs from then on
        # Whether a trace that has read values has shown that its Python may run twice at a call.
        self._repeatable = False
        self._untraced = UntracedCalls()
        self._newest = 0  # the number of the newest model at the last call that was to be traced
        self._in_vain = 0  # the number of steps compiled in a row that no call has fitted
        self._in_a_row = 0  # the number of calls in a row at which it was traced
        self._for_outcomes = 0  # the number of steps compiled that have outcomes
        self._fitted = 0  # the number of calls that one fitted
        # What its Python treats as it does the values; see `tracing.trace_step`.
        self._inputs: tuple[type, ...] = (*NUMBERS, *TEXTS, *GENERATORS, READ, STEPPED)
        self._reads_schedulers = False  # numbers of schedulers; see `STEPPED`
        self._reads_by_all = False  # whether it has read values, on several processes
        self._for_one_call: CompiledStep | None = None  # there, the last that was valid for its own call only

    def entries(self) -> Sequence[CacheEntry]:
        """All entries."""
        return self._entries

    def entry_of(self, step: CompiledStep | None) -> CacheEntry | None:
        """The entry of a compiled step, if that is kept."""
        return next((entry for entry in self._entries if entry.step is step), None)

    def drop(self, entry: CacheEntry) -> None:
        """Drop an entry."""
        self._entries.remove(entry)

    def steps(self) -> list[CompiledStep]:
        """All compiled steps."""
        return [entry.step for entry in self._entries]

    def fits(self, request: Request) -> bool:
        """Whether the guards of one of them hold."""
        self._fitting = self._untraceable = None
        if not self._always and request.retries <= MAX_RETRIES:
            self._fitting = next((entry for entry in self._entries if self._does_fit(entry, request)), None)
        return self._fitting is not None

    @staticmethod
    def _does_fit(entry: CacheEntry, request: Request) -> bool:
        if entry.guards.unknown or entry.traced_each_time is not None:
            return False
        arguments, numbers = request.arguments, entry.step.traced.trace.numbers
        if request.values_read:
            numbers.read_all(arguments.leaves, arguments.known)
            read = zip(numbers.reads, request.values_read, strict=False)
            try:
                check_outcomes(numbers, arguments.known | {number: v for number, v in read if v is not None})
            except OutcomeChanged:
                return False
        return entry.fits(arguments)

    def step(self, request: Request, similar: Sequence[CacheEntries] = ()) -> CompiledStep | None:
        """The compiled step whose guards hold; to be called after `fits`. None if the call is to run untraced.

        Args:
            similar: those of kinds of calls that are this one, with other process settings or values of what varies.
        """
        entry = self._fitting
        try:
            if entry is None:
                entry = self._trace(request, similar)
            elif self._check and entry.check_is_due():
                entry = self._verify(entry, request)
        except TraceError as error:
            if not (request.reads and error.can_run_eagerly):
                raise
            self._untraceable = error
            return None
        entry.uses += 1
        if entry not in self._entries:
            return entry.step
        if entry is not self._entries[0]:
            self._entries.remove(entry)
            self._entries.insert(0, entry)
        return entry.step

    def ran(self) -> None:
        """Note that the step that was found has run."""
        if self._fitting is not None:
            self._in_vain = self._in_a_row = 0
            self._fitted += 1

    def writes_untraced(self) -> ExternalWrites | None:
        """What records the writes that this call's trace has done, and the step's Python is about to do again; None if
        there was no such trace."""
        if self._untraceable is None or self._held is None:
            return None
        held, self._held = self._held, None
        return ExternalWrites(lambda obj: id(obj) in held)

    def ran_untraced(self) -> None:
        """Note that the step's Python has run; if that was because it could not be traced, say so. (If it has raised an
        error itself, as in the trace, there is nothing to say.)"""
        if self._untraceable is None:
            return
        if isinstance(self._untraceable, ReadsSchedulerError) and not self._reads_schedulers:
            self._reads_schedulers = True  # from the next call on
            return
        if self._fitting in self._entries:  # it does something else now, though its guards hold
            self._entries.remove(self._fitting)
        self._untraced.begin()
        self.reports.report_eager(str(self._untraceable))

    def explain(self, error: Exception) -> None:
        """Add to an error that the step's Python has raised why it could not be traced: that may name the line."""
        if self._untraceable is not None and not isinstance(self._untraceable, StepRaisedError):
            error.add_note(f"It cannot be traced either. {self._untraceable}")

    def runs_untraced(self, request: Request) -> bool:
        """Whether a call that no step fits is run without a trace; see `UntracedCalls`."""
        if not request.reads:
            return False
        newest = max(request.backend.models.numbered(), default=0)
        if newest > self._newest:  # a model that is new may be one for which it can be compiled
            self._newest, self._untraced, self._in_vain = newest, UntracedCalls(), 0
        if request.values_read:
            if self._outcomes_vary():
                self._untraced.begin_late()
                self.reports.report_in_vain(["what it reads decides otherwise"])
            elif self._in_vain <= _MAX_OUTCOMES_UNUSED and len(self._entries) < _MAX_OUTCOMES:
                return False
        return self._untraced.is_next()

    def _outcomes_vary(self) -> bool:
        """Whether too few calls have fitted the steps compiled so far, which differ in their outcomes, to compile one
        more."""
        if not self._entries:
            return False
        has_many = len(self._entries[0].step.traced.outcomes) > _MANY_OUTCOMES
        most = 1 if has_many else _OUTCOMES_AT_FIRST
        return self._for_outcomes >= most + self._fitted // _CALLS_FOR_ONE_MORE

    def _trace(self, request: Request, similar: Sequence[CacheEntries]) -> CacheEntry:
        """Trace the step, because no entry's guards hold."""
        nearest = next((entry for entry in self._entries if entry.differs_in_gradients(request.arguments)), None)
        in_numbers = next((e for e in self._entries if e.differs_in_new_numbers(request.arguments, self._places)), None)
        last = nearest or in_numbers or (self._entries[0] if self._entries else None)
        outdated = last is not None and last.step.outdated()
        why = [] if last is None or outdated else last.changes(request.arguments)
        changed = [change.place for change in why if change.place is not None]
        self._reads_schedulers |= any(is_number_list(change.old) and is_number_list(change.new) for change in why)
        places = {place.id: place for place in changed if place.id not in self._places}
        self._places |= places
        twin: list[CacheEntry] = []

        def is_for_others(traced: TracedProgram) -> bool:
            """Whether it is for other models, or does the same to other weights, as for the next of an ensemble."""
            read = _weights_read(traced, request.backend.models)
            if not twin:
                return bool(read) and all(entry.models.isdisjoint(read) for entry in self._entries)
            weights = {id(weight) for weights in read.values() for weight in weights}
            return all(entry.weights != weights for entry in self._entries)

        def find(traced: TracedProgram) -> CompiledStep | None:
            for entry in (*self._entries, *(entry for versions in similar for entry in versions._entries)):
                if entry.step.traced.does_the_same(traced):
                    twin.append(entry)
                    return entry.step
            if traced.is_for_one_call:
                before = self._for_one_call
                return before if before is not None and before.traced.does_the_same(traced) else None
            newly_drawn = last is not None and last.moves_generators and last.step.traced.trace.numbers.draws is None
            constants = traced.trace.constants
            if last is not None and (constants or (places or newly_drawn) and self._inputs):
                numbers = dict.fromkeys(traced.numbers)
                if first_difference(last.step.traced.program, traced.program, numbers) is None:
                    return None  # compiled once more for any numbers
            if traced_before:
                changed_now = changed_constants(traced_before[0].program, traced.program)
                self._constants |= changed_now & self._changed  # two values may be those of a branch
                self._changed |= changed_now
            is_expected = outdated or self._only_intended(why, last) or traced.raised is not None
            if last is not None and not is_expected and not request.values_read and not is_for_others(traced):
                difference = first_difference(last.step.traced.program, traced.program)
                self.reports.report_difference(
                    reasons(last.guards, why) or [last.traced_each_time or "it cannot be seen"], difference
                )
            return None

        traced_before = [e.step.traced for entries in (self, *similar) for e in entries._entries]
        request = request._replace(constants=frozenset(self._constants))
        entry = self._traced(request, find, similar, bool(places) or not any(map(has_inputs, traced_before)))
        traced = entry.step.traced
        if entry.records_code:
            self._repeatable = entry.traced_each_time is None and not entry.writes
        if (error := traced.optimizers.schedulers.reads_now) is not None:
            if self._reads_schedulers:  # its Python does not treat them as it does numbers
                self._untraced.begin()
                self.reports.report_eager(str(error))
            self._reads_schedulers = True
        if entry.step.is_for_one_call and not (traced.trace.reads or traced.trace.number_reads):
            return entry  # an optimizer's first step
        if entry.step.is_for_one_call:
            self._untraced.begin()
            trace = traced.trace
            if not request.reads:
                self._for_one_call = entry.step
                self.reports.report_compiled_reads([*trace.reads, *trace.number_reads], entry.seconds)
            elif trace.reads or entry.records_code and not self._repeatable or READ not in self._inputs:
                self.reports.report_reads([*trace.reads, *trace.number_reads], entry.seconds)
            return entry
        if traced.raised is not None:  # it may not raise the next time
            return entry
        runs = False
        if last is not None and last.changes_by_step(why) and not (places and self._inputs):
            entry.again = last.again + 1
            if entry.again > 1:
                runs = self._runs_untraced_from_now_on(request)
                self.reports.report_own_writes(last.guards, last.changes_by_step(why), None if runs else last.seconds)
        most = _MAX_OUTCOMES_UNUSED if traced.outcomes else _MAX_UNUSED
        if is_for_others(traced) or nearest is not None:
            self._in_vain = self._in_a_row = 0
        if self._in_vain > most and request.reads and last is not None:
            self._untraced.begin_at_once()
            self._entries = [entry for entry in self._entries if entry.uses > 1]  # else each call checks them
            self.reports.report_in_vain(reasons(last.guards, why) or [place.description for place in changed])
        self._in_a_row += not self._always
        is_reported = last is None or entry.traced_each_time is not None or last.changes_by_step(why)
        if self._in_a_row > _MAX_IN_A_ROW and last is not None and not is_reported:
            changing = "; ".join(dict.fromkeys(change.description for change in why)) or "what it reads"
            runs = self._runs_untraced_from_now_on(request)
            self.reports.report_each_time(f"this changes each time: {changing}", None if runs else last.seconds)
        if runs:
            return entry
        if twin and entry.records_code:
            entry.uses = max(twin[0].uses, 1)
        same = [e for e in self._entries if e.shares_program(entry) and e.weights == entry.weights]
        self._entries = [e for e in self._entries if e not in same[_MAX_STATES - 1 :]]
        self._entries.insert(0, entry)
        self._each_time(entry, request)
        return entry

    @staticmethod
    def _only_intended(why: list[Change], entry: CacheEntry | None) -> bool:
        """Whether only modes of modules, numbers in parameter groups, and which weights have or require gradients have
        changed: train() and eval() are to change the step, and so are another weight decay, and a frozen weight."""
        optimizers = [] if entry is None else entry.optimizers
        groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
        return bool(why) and all(
            change.name == "training" or change.container_id in groups or change.of_gradients for change in why
        )

    def _verify(self, entry: CacheEntry, request: Request) -> CacheEntry:
        """Trace the step again, expecting the same Program."""
        unseen: list[bool] = []

        def find(traced: TracedProgram) -> CompiledStep | None:
            if traced.raised is not None:
                return None
            if entry.step.traced.outcomes != traced.outcomes:
                others = [e.step for e in self._entries if e.step.traced.does_the_same(traced)]
                return others[0] if others else None
            if not entry.step.traced.does_the_same(traced):
                difference: Any = first_difference(entry.step.traced.program, traced.program)
                if difference is None or difference.old is None and difference.new is None:
                    return None  # the same computation, with more or fewer results kept
            elif not same_items(list(entry.step.traced.constants.values()), list(traced.constants.values())):
                difference = "the same operations on another number"
            elif entry.step.traced.reads_other_tensors(traced):
                difference = "the same operations on another tensor, which is not an argument"
            else:
                return entry.step
            if entry.uses == 1:  # nothing wrong has run: the first step was that of its own trace
                unseen.append(True)
                self.reports.report_difference(["it cannot be seen"], difference)
                return None
            raise GraphChangedError(
                f"{self._name} does something else now than when it was traced, {entry.uses} "
                f"step{'s' if entry.uses > 1 else ''} ago: {difference}. Its Python code reads something whose changes "
                f"cannot be seen from outside: the time, a file, a loader, a random number. {ADVICE}"
            )

        fresh = self._traced(request._replace(constants=entry.step.traced.trace.constants), find)
        if fresh.step.is_for_one_call:
            self._entries.remove(entry)
        if fresh.step.is_for_one_call or fresh.step.traced.raised is not None:
            return fresh
        fresh.uses = entry.uses
        if unseen and fresh.traced_each_time is None:
            fresh.differs_unseen()
        if fresh.step.traced.outcomes == entry.step.traced.outcomes:
            self._entries[self._entries.index(entry)] = fresh
        else:
            self._entries.insert(0, fresh)
        self._each_time(fresh, request)
        return fresh

    @functools.cached_property
    def reports(self) -> Reports:
        return Reports(self._name, self._refuse)

    def _each_time(self, entry: CacheEntry, request: Request) -> None:
        """If the step has to be traced at each call, report why; or run its Python from now on."""
        if entry.traced_each_time is None:
            return
        # Where its code was not recorded, the next trace may find that it reads less.
        runs = self._runs_untraced_from_now_on(request, at_once=entry.records_code)
        self.reports.report_each_time(entry.traced_each_time, None if runs else entry.seconds)

    def _runs_untraced_from_now_on(self, request: Request, at_once: bool = True) -> bool:
        """Whether the step's Python may run at each call, where it would have to be traced at each; if so, it will.

        Args:
            at_once: whether beginning with the next call.
        """
        if not request.runs_where_weights_are or self._always or self._refuse:
            return False
        if at_once:
            self._entries.clear()  # else each call checks them
            self._untraced.begin_at_once()
        else:
            self._untraced.begin()
        return True

    def _traced(
        self,
        request: Request,
        find: Callable[[TracedProgram], CompiledStep | None],
        similar: Sequence[CacheEntries] = (),
        specialize_first: bool = False,
    ) -> CacheEntry:
        """Trace the step.

        Args:
            specialize_first: whether to trace it without inputs first, where it may have some. If that trace shows that
                its Python may not run twice at this call, it is the only one.
        """
        earlier = [*self._entries[:1], *(entry for entries in similar for entry in entries._entries[:1])]
        draws = any(entry.moves_generators for entry in self._entries)
        may_have = bool(self._places or request.arguments.varying or draws)
        untraced = [entries for entries in (self, *similar) if entries._untraced]
        is_known = self._repeatable or all(entries._repeatable for entries in untraced)
        if any(entry.traced_each_time is not None for entry in earlier) or not is_known:
            may_have = False  # its Python may not run twice at a call, and runs at each one anyway
        # The executed code is recorded when there is time, when the first loss has been returned; if there is no later
        # check; and where it may be traced again, which depends on what it consumes.
        records_code = bool(earlier or untraced or may_have) or not self._check or request.retried
        records_code |= self._reads_by_all or self._reads_schedulers
        wanted = self._inputs if may_have else tuple(k for k in (READ, STEPPED) if k in self._inputs)
        if not (self._repeatable or self._reads_by_all):
            wanted = tuple(kind for kind in wanted if kind is not READ)
        if not self._reads_schedulers:
            wanted = tuple(kind for kind in wanted if kind is not STEPPED)
        then_inputs = specialize_first and may_have and bool(wanted) and not request.reads_by_all
        then_inputs = then_inputs and STEPPED not in wanted
        inputs = tried = () if then_inputs else wanted
        shared: list[CompiledStep] = []

        def find_shared(traced: TracedProgram) -> CompiledStep | None:
            shared[:] = [] if (step := find(traced)) is None else [step]
            return shared[0] if shared else None

        while True:
            observer = TraceObserver(request.roots(), self._functions, records_code)
            begin = time.perf_counter()
            try:
                places = tuple(self._places.values()) if may_have and NUMBERS[0] in inputs else ()
                numbers = request.reads_by_all and (READ in tried or self._reads_by_all and READ not in self._inputs)
                then_reads = READ in self._inputs and READ not in tried
                this = request._replace(
                    places=places,
                    inputs=inputs,
                    reads_by_all=numbers,
                    then_inputs=then_inputs,
                    then_reads=then_reads,
                )
                compiled = this.compiled(observer, find_shared)
                break
            except Shared:
                raise
            except Repeatable as repeatable:
                then_inputs, traced = False, repeatable.traced
                request = request._replace(specialized=None if STEPPED in inputs else traced)
                if traced.optimizers.schedulers.reads_now is not None and STEPPED in self._inputs:
                    self._reads_schedulers = True
                    wanted = (*wanted, STEPPED)
                inputs = tried = wanted
                if traced.trace.number_reads:
                    self._repeatable = True
                    values = [read.example for read in traced.trace.numbers.reads]
                    request = request._replace(values_read=values)
                    inputs = tried = (*(kind for kind in wanted if kind is not READ), READ)
            except Exception as error:
                self._held = frozenset(observer.snapshot.seen) if observer.has_run else None
                if request.reads_by_all and isinstance(error, ValueReadError):
                    if READ in tried or READ not in self._inputs:
                        raise
                    self._check_consumed(
                        observer,
                        "reads a value, for which its Python would have to run twice at this call on this backend",
                        error,
                    )
                    inputs = tried = (*inputs, READ)
                    records_code = self._reads_by_all = True
                    continue
                is_untried = STEPPED in self._inputs and STEPPED not in tried
                if isinstance(error, ReadsSchedulerError) and is_untried and (inputs or not request.reads):
                    self._check_consumed(observer, _READS_SCHEDULER, error)
                    inputs = tried = (*inputs, STEPPED)
                    records_code = self._reads_schedulers = True
                    continue
                if not inputs:
                    raise
                self._check_consumed(
                    observer,
                    "cannot be traced with the numbers and texts that vary as inputs, so that its Python would have to "
                    "run twice at this call",
                    error,
                )
                writes = observer.recording.writes.calls.values()
                if writes and (READ in inputs or self._untraced):  # it reads values, and each trace writes
                    self.reports.report_written_twice(writes)
                    self._repeatable = False
                    inputs = ()
                elif READ in inputs:
                    inputs = tuple(kind for kind in inputs if kind is not READ)
                else:
                    inputs = NUMBERS if inputs != NUMBERS else ()
        if tried and compiled.traced.raised is None:
            self._inputs = tuple(kind for kind in self._inputs if kind in inputs or kind not in tried)
        if not compiled.is_for_one_call:
            self._in_vain = 0 if shared else self._in_vain + 1
            self._for_outcomes += bool(compiled.traced.outcomes) and not shared
            self._fitting = None
        entry = CacheEntry(compiled, observer, time.perf_counter() - begin, request.backend.models)
        if entry.guards.unknown:
            self._functions += functions_of(entry.guards.unknown)
            if len(self._functions) > _MAX_FUNCTIONS:
                entry.guards.unknown = []
        return entry

    def _check_consumed(self, observer: TraceObserver, why: str, error: Exception) -> None:
        """Check that a trace that failed has consumed nothing, before the step is traced once more at this call.

        Raises:
            TraceError: if it has.
        """
        if (consumed := observer.snapshot.consumed()) is not None:
            raise TraceError(
                f"{here()}: {self._name} consumes or changes {consumed}, and {why}. Take from it before the step, and "
                "pass what was taken."
            ) from error
