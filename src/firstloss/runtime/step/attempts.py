"""Which of what a step reads become inputs of its Program: what its traces have shown, and what is tried at a call.

A step is traced with the kinds of inputs that it may have. If its Python does not treat them as it does the values, it
is traced again at the same call, with fewer.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from ...capture.input_numbers import NUMBERS
from ...capture.input_texts import TEXTS
from ...capture.python_generators import GENERATORS
from ...errors import TraceError, ValueReadError
from ...program.compare import Constant, changed_constants
from ...program.source import here
from ..guards.guard_set import GuardSet
from ..guards.guards import Change
from ..guards.places import Place
from ..guards.recording import functions_of
from .reads import READ
from .request import Request
from .retrace_reports import Reports
from .scheduler_results import STEPPED, ReadsSchedulerError, is_number_list
from .traced_program import TracedProgram
from .tracing import TraceObserver

# The number of traces after which functions that are new in each are assumed to be created by the step itself.
_MAX_FUNCTIONS = 10_000


class Learned:
    """What the traces of a step have shown of its inputs, for one kind of call.

    Attributes:
        kinds: the classes of inputs that its Python may treat as it does the values; see `tracing.trace_step`.
        places: of numbers that have changed, and are inputs from then on.
        constants: those of operations that were others in at least two traces, and are inputs from then on.
        is_repeatable: whether a trace that has read values has shown that its Python may run twice at a call.
        reads_schedulers: whether it has read numbers of schedulers that it has stepped; see `STEPPED`.
        reads_by_all: whether it has read values on several processes, which compute them together.
        functions: those that earlier traces have called.
    """

    def __init__(self) -> None:
        self.kinds: tuple[type, ...] = (*NUMBERS, *TEXTS, *GENERATORS, READ, STEPPED)
        self.places: dict[tuple[int, Any], Place] = {}
        self.constants: set[Constant] = set()
        self.is_repeatable: bool = False
        self.reads_schedulers: bool = False
        self.reads_by_all: bool = False
        self.functions: list[types.FunctionType] = []
        self._changed: set[Constant] = set()  # those that were others in one trace

    def changed(self, why: Sequence[Change]) -> dict[tuple[int, Any], Place]:
        """Learn from what has changed since the last trace; returns the places of numbers that are new among these."""
        self.reads_schedulers |= any(is_number_list(change.old) and is_number_list(change.new) for change in why)
        changed = [change.place for change in why if change.place is not None]
        places = {place.id: place for place in changed if place.id not in self.places}
        self.places |= places
        return places

    def compare_constants(self, before: TracedProgram, now: TracedProgram) -> None:
        """Learn from the constants of a trace, and of one before."""
        changed = changed_constants(before.program, now.program)
        self.constants |= changed & self._changed  # two values may be those of a branch
        self._changed |= changed

    def called(self, guards: GuardSet) -> None:
        """Learn from the functions that a trace has called."""
        if guards.unknown:
            self.functions += functions_of(guards.unknown)
            if len(self.functions) > _MAX_FUNCTIONS:
                guards.unknown = []


class Attempts:
    """The traces of a step at one call, until one can be used.

    Attributes:
        records_code: whether the next one records the executed code.
    """

    def __init__(
        self,
        request: Request,
        learned: Learned,
        reports: Reports,
        records_code: bool,
        may_have_inputs: bool,
        specializes_first: bool,
        ran_untraced: bool,
    ) -> None:
        """
        Args:
            may_have_inputs: whether numbers and texts may be inputs, as something varies.
            specializes_first: whether to trace it without inputs first, where it may have some. If that trace shows
                that its Python may not run twice at this call, it is the only one.
            ran_untraced: whether its Python has run untraced at earlier calls.
        """
        self._request = request
        self._learned = learned
        self._reports = reports
        self._may_have_inputs = may_have_inputs
        self._ran_untraced = ran_untraced
        self.records_code: bool = records_code or learned.reads_by_all or learned.reads_schedulers
        self._wanted = tuple(filter(self._is_wanted, learned.kinds))
        is_first = specializes_first and may_have_inputs and not request.reads_by_all and STEPPED not in self._wanted
        self._then_inputs = is_first and bool(self._wanted)
        self._inputs = self._tried = () if self._then_inputs else self._wanted

    def _is_wanted(self, kind: type) -> bool:
        if kind is READ:
            return self._learned.is_repeatable or self._learned.reads_by_all
        return self._learned.reads_schedulers if kind is STEPPED else self._may_have_inputs

    def _is_untried(self, kind: type) -> bool:
        return kind in self._learned.kinds and kind not in self._tried

    def request(self) -> Request:
        """The call, for the next trace."""
        has_numbers = self._may_have_inputs and NUMBERS[0] in self._inputs
        reads_by_all = READ in self._tried or self._learned.reads_by_all and READ not in self._learned.kinds
        return self._request._replace(
            places=tuple(self._learned.places.values()) if has_numbers else (),
            inputs=self._inputs,
            reads_by_all=self._request.reads_by_all and reads_by_all,
            then_inputs=self._then_inputs,
            then_reads=self._is_untried(READ),
        )

    def repeat(self, traced: TracedProgram) -> None:
        """Trace the step again, since it had no inputs, and has shown that its Python may run twice at this call.

        Args:
            traced: the trace, which has been abandoned.
        """
        self._then_inputs = False
        self._request = self._request._replace(specialized=None if STEPPED in self._inputs else traced)
        if traced.optimizers.schedulers.reads_now is not None and STEPPED in self._learned.kinds:
            self._learned.reads_schedulers = True
            self._wanted = (*self._wanted, STEPPED)
        self._inputs = self._wanted
        if traced.trace.number_reads:
            self._learned.is_repeatable = True
            values = [read.example for read in traced.trace.numbers.reads]
            self._request = self._request._replace(values_read=values)
            self._inputs = (*(kind for kind in self._wanted if kind is not READ), READ)
        self._tried = self._inputs

    def retry(self, error: Exception, observer: TraceObserver) -> bool:
        """Trace the step again after an error, with other inputs; returns whether there are any to try.

        Raises:
            TraceError: if the trace has consumed something.
        """
        learned, inputs, request = self._learned, self._inputs, self._request
        if request.reads_by_all and isinstance(error, ValueReadError):
            if not self._is_untried(READ):
                return False
            self._check_consumed(
                observer,
                "reads a value, for which its Python would have to run twice at this call on this backend",
                error,
            )
            self._inputs = self._tried = (*inputs, READ)
            self.records_code = learned.reads_by_all = True
            return True
        if isinstance(error, ReadsSchedulerError) and self._is_untried(STEPPED) and (inputs or not request.reads):
            self._check_consumed(
                observer,
                "reads something of a scheduler that has stepped in it, for which its Python would have to run twice "
                "at this call on this backend",
                error,
            )
            self._inputs = self._tried = (*inputs, STEPPED)
            self.records_code = learned.reads_schedulers = True
            return True
        if not inputs:
            return False
        self._check_consumed(
            observer,
            "cannot be traced with the numbers and texts that vary as inputs, so that its Python would have to run "
            "twice at this call",
            error,
        )
        writes = observer.recording.writes.calls.values()
        if writes and (READ in inputs or self._ran_untraced):  # it reads values, and each trace writes
            self._reports.report_written_twice(writes)
            learned.is_repeatable = False
            self._inputs = ()
        elif READ in inputs:
            self._inputs = tuple(kind for kind in inputs if kind is not READ)
        else:
            self._inputs = NUMBERS if inputs != NUMBERS else ()
        return True

    def used(self, traced: TracedProgram) -> None:
        """Learn which inputs could be had, from the trace that is used."""
        if self._tried and traced.raised is None:
            could_be_had = (kind for kind in self._learned.kinds if kind in self._inputs or kind not in self._tried)
            self._learned.kinds = tuple(could_be_had)

    def _check_consumed(self, observer: TraceObserver, why: str, error: Exception) -> None:
        """Check that a trace that failed has consumed nothing, before the step is traced once more at this call.

        Raises:
            TraceError: if it has.
        """
        if (consumed := observer.snapshot.consumed()) is not None:
            raise TraceError(
                f"{here()}: {self._reports.name} consumes or changes {consumed}, and {why}. Take from it before the "
                "step, and pass what was taken."
            ) from error
