"""`Retrace`: a trace at a call that no entry fits: why that is, and whether an earlier step does the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...program.compare import first_difference
from .attempts import Learned
from .cache_entry import CacheEntry, weights_read
from .request import Request, has_inputs
from .retrace_reports import Reports, reasons
from .traced_program import TracedProgram

if TYPE_CHECKING:
    from .compiled_step import CompiledStep


class Retrace:
    """A trace of a step at a call that none of the entries for its kind fits.

    Attributes:
        last: the entry that is nearest to the call, to be compared with; None if there are none.
        is_for_other_gradients: whether that would fit if other weights required gradients, or had some.
        why: what has changed since.
        places: those of numbers among that, which are inputs from now on.
        twin: the entry that does the same, once `find` has found one.
    """

    def __init__(
        self,
        request: Request,
        entries: Sequence[CacheEntry],
        known: Sequence[CacheEntry],
        for_one_call: CompiledStep | None,
        learned: Learned,
        reports: Reports,
    ) -> None:
        """
        Args:
            entries: those for this kind of call.
            known: also those for similar kinds.
            for_one_call: the last step that was valid for its own call only.
        """
        arguments = request.arguments
        self._request = request
        self._entries = entries
        self._known = known
        self._for_one_call = for_one_call
        self._learned = learned
        self._reports = reports
        nearest = next((entry for entry in entries if entry.differs_in_gradients(arguments)), None)
        in_numbers = next((entry for entry in entries if entry.differs_in_new_numbers(arguments, learned.places)), None)
        self.last: CacheEntry | None = nearest or in_numbers or next(iter(entries), None)
        self.is_for_other_gradients: bool = nearest is not None
        self._outdated = self.last is not None and self.last.step.outdated()
        self.why = [] if self.last is None or self._outdated else self.last.changes(arguments)
        self.places = learned.changed(self.why)
        self.twin: CacheEntry | None = None

    def specializes_first(self) -> bool:
        """Whether to trace it without inputs first; see `Attempts`."""
        return bool(self.places) or not any(has_inputs(entry.step.traced) for entry in self._known)

    def descriptions_of_places(self) -> list[str]:
        """What numbers have changed, in words."""
        return [change.place.description for change in self.why if change.place is not None]

    def is_for_others(self, traced: TracedProgram) -> bool:
        """Whether it is for other models, or does the same to other weights, as for the next of an ensemble."""
        read = weights_read(traced, self._request.backend.models)
        if self.twin is None:
            return bool(read) and all(entry.models.isdisjoint(read) for entry in self._entries)
        weights = {id(weight) for weights in read.values() for weight in weights}
        return all(entry.weights != weights for entry in self._entries)

    def find(self, traced: TracedProgram) -> CompiledStep | None:
        """An earlier step that does the same. If there is none, and that was not to be expected, it is reported."""
        self.twin = None
        for entry in self._known:
            if entry.step.traced.does_the_same(traced):
                self.twin = entry
                return entry.step
        if traced.is_for_one_call:
            before = self._for_one_call
            return before if before is not None and before.traced.does_the_same(traced) else None
        last = self.last
        if last is not None and self._has_more_inputs(last, traced):
            return None  # compiled once more for any numbers
        if self._known:
            self._learned.compare_constants(self._known[0].step.traced, traced)
        is_expected = self._outdated or self._is_intended() or traced.raised is not None
        if last is not None and not is_expected and not self._request.values_read and not self.is_for_others(traced):
            difference = first_difference(last.step.traced.program, traced.program)
            why = reasons(last.guards, self.why) or [last.traced_each_time or "it cannot be seen"]
            self._reports.report_difference(why, difference)
        return None

    def _has_more_inputs(self, last: CacheEntry, traced: TracedProgram) -> bool:
        """Whether it does what the last step does, but with numbers as inputs that were constants."""
        newly_drawn = last.moves_generators and last.step.traced.trace.numbers.draws is None
        if not (traced.trace.constants or (self.places or newly_drawn) and self._learned.kinds):
            return False
        numbers = dict.fromkeys(traced.numbers)
        return first_difference(last.step.traced.program, traced.program, numbers) is None

    def _is_intended(self) -> bool:
        """Whether only modes of modules, numbers in parameter groups, and which weights have or require gradients have
        changed: train() and eval() are to change the step, and so are another weight decay, and a frozen weight."""
        optimizers = [] if self.last is None else self.last.optimizers
        groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
        return bool(self.why) and all(
            change.name == "training" or change.container_id in groups or change.of_gradients for change in self.why
        )
