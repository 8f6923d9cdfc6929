"""`CacheEntries`: the compiled steps for one kind of call, with their guards, and when one is traced again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import GraphChangedError, TraceError
from ...program.compare import first_difference
from ..guards.equality import same_items
from ..guards.external_writes import ExternalWrites
from .attempts import Attempts, Learned
from .cache_entry import CacheEntry
from .owners import Shared
from .reads import READ, OutcomeChanged, check_outcomes
from .request import MAX_RETRIES, Repeatable, Request
from .retrace import Retrace
from .retrace_reports import ADVICE, Reports, reasons
from .scheduler_results import ReadsSchedulerError
from .traced_program import TracedProgram
from .tracing import StepRaisedError, TraceObserver
from .untraced_calls import NewKinds, TraceCounts, UntracedCalls

if TYPE_CHECKING:
    from .compiled_step import CompiledStep

# How many entries, of different guards, are kept for one Program and the same weights: a step that changes a setting
# at every third call, and sets it back at the next, comes back to the same few states.
_MAX_STATES = 4


class CacheEntries:
    """The compiled steps for one kind of call, each with its guards; the most recently used one first.

    Attributes:
        called: the number of the last call of this kind.
    """

    def __init__(self, name: str, refuse: bool, check: bool | str, new_kinds: NewKinds) -> None:
        self.called: int = 0
        self._check = bool(check)
        self._always = check == "always"
        self._entries: list[CacheEntry] = []
        self._fitting: CacheEntry | None = None
        self._untraceable: TraceError | None = None  # of this call's trace
        self._held: frozenset[int] | None = None  # the ids of what it could reach, if it has run the step's Python
        self._refuse = refuse
        self._name = name
        self._learned = Learned()
        self._new_kinds = new_kinds
        self._counts = TraceCounts(new_kinds)
        self._untraced = UntracedCalls()
        self._newest = 0  # the number of the newest model at the last call that was to be traced
        self._for_one_call: CompiledStep | None = None  # on several processes, the last valid for its own call only

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
            self._counts.fits()

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
        if isinstance(self._untraceable, ReadsSchedulerError) and not self._learned.reads_schedulers:
            self._learned.reads_schedulers = True  # from the next call on
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
        newest = request.backend.models.newest
        self._new_kinds.note_newest(newest)
        if newest > self._newest:  # a model that is new may be one for which it can be compiled
            self._newest, self._untraced = newest, UntracedCalls()
            self._counts.begin_anew()
        if request.values_read:
            if self._entries and self._counts.outcomes_vary(len(self._entries[0].step.traced.outcomes)):
                self._untraced.begin_late()
                self.reports.report_in_vain(["what it reads decides otherwise"])
            elif self._counts.may_have_other_outcomes(len(self._entries)):
                return False
        return self._untraced.is_next()

    def _trace(self, request: Request, similar: Sequence[CacheEntries]) -> CacheEntry:
        """Trace the step, because no entry's guards hold; the new entry is kept, if other calls may fit it."""
        known = [*self._entries, *(entry for entries in similar for entry in entries._entries)]
        retrace = Retrace(request, self._entries, known, self._for_one_call, self._learned, self.reports)
        once = self._counts.are_in_vain() and request.runs_where_weights_are and not self._always
        request = request._replace(constants=frozenset(self._learned.constants), once=once)
        entry = self._traced(request, retrace.find, similar, retrace.specializes_first())
        if entry.records_code:
            self._learned.is_repeatable = entry.traced_each_time is None and not entry.writes
        self._note_scheduler_reads(entry)
        if entry.step.is_for_one_call:
            self._note_reads(entry, request)
        elif entry.step.traced.raised is None and not self._is_given_up(entry, retrace, request):
            self._keep(entry, retrace.twin, request)
        return entry  # one that raises may not raise the next time

    def _note_scheduler_reads(self, entry: CacheEntry) -> None:
        """Note what a new step has read of schedulers, as it is at this call only."""
        error = entry.step.traced.optimizers.schedulers.reads_now
        if error is None:
            return
        if self._learned.reads_schedulers:  # its Python does not treat them as it does numbers
            self._untraced.begin()
            self.reports.report_eager(str(error))
        self._learned.reads_schedulers = True

    def _note_reads(self, entry: CacheEntry, request: Request) -> None:
        """Report what a step reads that is for one call only, if that is why."""
        trace, learned = entry.step.traced.trace, self._learned
        reads = [*trace.reads, *trace.number_reads]
        if not reads:  # an optimizer's first step
            return
        self._untraced.begin()
        if not request.reads:
            self._for_one_call = entry.step
            self.reports.report_compiled_reads(reads, entry.seconds)
        elif trace.reads or entry.records_code and not learned.is_repeatable or READ not in learned.kinds:
            self.reports.report_reads(reads, entry.seconds)

    def _is_given_up(self, entry: CacheEntry, retrace: Retrace, request: Request) -> bool:
        """Report why a new step will not last, if it will not; returns whether its Python runs from now on, since it
        would be traced at each call."""
        runs = False
        last, outcomes = retrace.last, len(entry.step.traced.outcomes)
        by_step = [] if last is None else last.changes_by_step(retrace.why)
        if last is not None and by_step and not (retrace.places and self._learned.kinds):
            entry.again = last.again + 1
            if entry.again > 1:
                runs = self._runs_untraced_from_now_on(request)
                self.reports.report_own_writes(last.guards, by_step, None if runs else last.seconds)
        if retrace.is_for_others(entry.step.traced) or retrace.is_for_other_gradients:
            self._counts.begin_anew(of_all_kinds=last is not None, is_traced=True)
        if self._counts.is_in_vain(outcomes) and request.reads and last is not None:
            self._untraced.begin_at_once()
            self._entries = [entry for entry in self._entries if entry.uses > 1]  # else each call checks them
            self.reports.report_in_vain(reasons(last.guards, retrace.why) or retrace.descriptions_of_places())
        if not self._always:
            self._counts.traced()
        is_reported = last is None or entry.traced_each_time is not None or by_step
        if self._counts.is_traced_each_time() and last is not None and not is_reported:
            changing = "; ".join(dict.fromkeys(change.description for change in retrace.why)) or "what it reads"
            runs = self._runs_untraced_from_now_on(request)
            self.reports.report_each_time(f"this changes each time: {changing}", None if runs else last.seconds)
        return runs

    def _keep(self, entry: CacheEntry, twin: CacheEntry | None, request: Request) -> None:
        """Keep a new entry, and the newest of those for the same Program and weights.

        Args:
            twin: one that does the same.
        """
        if twin is not None and entry.records_code:
            entry.uses = max(twin.uses, 1)
        same = [e for e in self._entries if e.shares_program(entry) and e.weights == entry.weights]
        self._entries = [e for e in self._entries if e not in same[_MAX_STATES - 1 :]]
        self._entries.insert(0, entry)
        self._each_time(entry, request)

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
        specializes_first: bool = False,
    ) -> CacheEntry:
        """Trace the step.

        Args:
            find: finds an earlier step that does the same.
            specializes_first: see `Attempts`.
        """
        earlier = [*self._entries[:1], *(entry for entries in similar for entry in entries._entries[:1])]
        draws = any(entry.moves_generators for entry in self._entries)
        may_have_inputs = bool(self._learned.places or request.arguments.varying or draws)
        untraced = [entries for entries in (self, *similar) if entries._untraced]
        is_known = self._learned.is_repeatable or all(entries._learned.is_repeatable for entries in untraced)
        if any(entry.traced_each_time is not None for entry in earlier) or not is_known:
            may_have_inputs = False  # its Python may not run twice at a call, and runs at each one anyway
        # The executed code is recorded when there is time, when the first loss has been returned; if there is no later
        # check; and where it may be traced again, which depends on what it consumes.
        records_code = bool(earlier or untraced or may_have_inputs) or not self._check or request.retried
        attempts = Attempts(
            request,
            self._learned,
            self.reports,
            records_code,
            may_have_inputs,
            specializes_first,
            ran_untraced=bool(self._untraced),
        )
        shared: list[CompiledStep] = []

        def find_shared(traced: TracedProgram) -> CompiledStep | None:
            shared[:] = [] if (step := find(traced)) is None else [step]
            return shared[0] if shared else None

        while True:
            observer = TraceObserver(request.roots(), self._learned.functions, attempts.records_code)
            begin = time.perf_counter()
            try:
                compiled = attempts.request().compiled(observer, find_shared)
                break
            except Shared:
                raise
            except Repeatable as repeatable:
                attempts.repeat(repeatable.traced)
            except Exception as error:
                self._held = frozenset(observer.snapshot.seen) if observer.has_run else None
                if not attempts.retry(error, observer):
                    raise
        attempts.used(compiled.traced)
        if not compiled.is_for_one_call:
            self._counts.compiled(len(compiled.traced.outcomes), is_new=not shared)
            self._fitting = None
        entry = CacheEntry(compiled, observer, time.perf_counter() - begin, request.backend.models)
        self._learned.called(entry.guards)
        return entry
