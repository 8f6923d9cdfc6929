"""PyTorch's schedulers in a traced step: their Python code runs at each call, after the step.

What the step reads of them afterwards is computed before it, by copies (`scheduler_results.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...capture import session
from ...capture.tensor import DeferredTensor
from ...errors import TraceError
from ...interpreter import Undo
from ...program.source import Source, here
from ..guards.bytecode import with_inner
from ..guards.equality import same_items
from ..guards.reconstruct import UnavailableNumber
from .scheduler_results import (
    STEPPED,
    STEPPED_NOW,
    ChangesMoreError,
    ReadsSchedulerError,
    Result,
    Results,
    SchedulerRun,
    is_number_list,
    optimizer_of,
    run_of,
    schedulers_in,
)

if TYPE_CHECKING:
    from ...capture.step import StepTrace
    from ..guards.effects import Bind
    from ..guards.reconstruct import CallFrame, Make, Reconstructor
    from ..guards.recording import Recording
    from ..guards.snapshot import Snapshot


class _SchedulerCall(NamedTuple):
    """A call of a scheduler's step() in the traced step."""

    step: Callable[..., Any]  # of the scheduler's class
    scheduler: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Source
    error: type[TraceError]  # for reads that are refused
    results: list[Result] | None  # of which it may read some
    with_groups: bool  # also those in parameter groups

    def waits(self) -> bool:
        """Whether it needs a value that the step computes, as `ReduceLROnPlateau` does."""
        return any(type(value) is DeferredTensor for value in (*self.args, *self.kwargs.values()))

    def refusal(self) -> TraceError:
        """The error about reads of the scheduler afterwards."""
        return self.error(
            f"{self.source}: the traced step reads something of this {type(self.scheduler).__name__} after its "
            "step(), which runs in Python after the step has run. Read it before, or outside of the traced "
            "step."
        )


class _Shown(NamedTuple):
    """What the step finds in a place, an entry of a dict, instead of what was there before."""

    scheduler: Any
    table: dict[str, Any]
    key: str
    before: Any
    shown: Any
    items: list[Any] | None  # of a list
    is_result: bool  # of a scheduler's step


class Schedulers:
    """The schedulers that step in a trace.

    Attributes:
        has_inputs: whether the step may have seen numbers of schedulers that are inputs.
        reads_now: an error about its reads of what they are at this call only; None if there are none.
    """

    def __init__(self, trace: StepTrace, inputs: tuple[type, ...]) -> None:
        """`inputs`: as of `tracing.trace_step`."""
        self._trace = trace
        self._inputs = inputs
        self._are_shown = STEPPED in inputs or STEPPED_NOW in inputs
        self._results = Results(trace.numbers, are_inputs=STEPPED in inputs)
        self.reads_now: TraceError | None = None
        self._is_computing = False  # results
        self._is_known = True  # what all that have stepped have set
        self.has_inputs: bool = False
        self._calls: list[_SchedulerCall] = []
        self._shown: list[_Shown] = []
        self._replaced: list[_Shown] = []  # where the step has left something else
        self._set: list[tuple[dict[str, Any], str, _SchedulerCall]] = []  # in groups, what schedulers set
        self.afterwards: list[Callable[[CallFrame], Bind]] = []

    @contextmanager
    def watched(self, recording: Recording, snapshot: Snapshot) -> Iterator[None]:
        """Context in which a scheduler's `step()` is recorded instead of run.

        Args:
            recording: records what the step reads.
            snapshot: was taken before the trace.
        """

        read: list[tuple[_SchedulerCall, int]] = []  # how often, before a call

        def times_read(scheduler: Any) -> int:
            return sum(map(recording.times_read, schedulers_in(scheduler)))

        def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                if session.trace is None or schedulers._is_computing:  # called in another thread, or on a copy
                    return original(self, *args, **kwargs)
                schedulers._step(original, self, args, kwargs, recording, snapshot)
                if not schedulers._are_shown or schedulers._calls[-1].results is None:
                    read.append((schedulers._calls[-1], times_read(self)))

            return step

        schedulers = self
        with Undo() as undo, undo:
            undo(self._restore)
            kinds: set[Any] = {kind for kind in vars(torch.optim.lr_scheduler).values() if isinstance(kind, type)}
            for kind in kinds:
                method = vars(kind).get("step")
                if method is not None:
                    undo(setattr, kind, "step", method)
                    kind.step = functools.wraps(method)(recorded(method))
            for state in snapshot.tables("attributes") if self._are_shown else ():
                if isinstance(state.owner, torch.optim.lr_scheduler.LRScheduler):
                    self._show_lists(state.owner, recording)
            yield
            for call, times in read:
                if times_read(call.scheduler) == times:
                    continue
                self.reads_now = call.refusal()
                if call.results is None:
                    raise self.reads_now

    def _step(
        self,
        step: Callable[..., Any],
        scheduler: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recording: Recording,
        snapshot: Snapshot,
    ) -> None:
        """Record a call of a scheduler's `step`, and show its results: input numbers, or what they are at this call."""
        run = None if kwargs or not self._is_known else run_of(step, scheduler, args, self._trace.numbers)
        results = None
        if run is not None and (self._are_shown or self._trace.may_read()):
            results = self._results_of(run)
            run = None if results is None else run
        self._is_known = run is not None
        with_groups = results is not None and (self._are_shown or _mentions_groups(snapshot))
        error = TraceError if run is None else ReadsSchedulerError
        call = _SchedulerCall(step, scheduler, args, kwargs, here(), error, results, with_groups)
        self._calls.append(call)
        for owner, table, key, number in results or ():
            if owner is not None:
                recording.show(owner, key)
            elif with_groups:
                self._set.append((table, key, call))
            if owner is not None or with_groups:
                self._show(scheduler, table, key, number, is_result=True)
        if not with_groups:
            self._make_unavailable(call)
        elif not self._are_shown:  # who reads a parameter group is not known
            self.reads_now = call.refusal()

    def _results_of(self, run: SchedulerRun) -> list[Result] | None:
        """What a scheduler's step sets; None if that is more than numbers."""
        self._is_computing = True
        try:
            return list(self._results.run(run))
        except ChangesMoreError:
            return None
        finally:
            self._is_computing = False

    def _show_lists(self, scheduler: Any, recording: Recording) -> None:
        """Let input numbers stand for those in a scheduler's lists, of which it makes new ones for its rates."""
        for key, value in list(vars(scheduler).items()):
            if is_number_list(value):
                recording.show(scheduler, key)
                self._show(scheduler, vars(scheduler), key, self._results.of_list(scheduler, key, value))

    def _show(self, scheduler: Any, table: dict[str, Any], key: str, shown: Any, is_result: bool = False) -> None:
        items = list(shown) if type(shown) is list else None
        self.has_inputs = STEPPED in self._inputs
        self._shown.append(_Shown(scheduler, table, key, table[key], shown, items, is_result))
        table[key] = shown

    def _make_unavailable(self, call: _SchedulerCall) -> None:
        """Make reads of what the scheduler sets an error from here on."""
        scheduler = call.scheduler
        optimizer = optimizer_of(scheduler)
        for group in optimizer.param_groups if optimizer is not None else ():
            for key in ("lr", "momentum", "betas") if hasattr(scheduler, "cycle_momentum") else ("lr",):
                self._set.append((group, key, call))
                is_shown = any(place.table is group and place.key == key for place in self._shown)
                if key in group and not is_shown:
                    number = UnavailableNumber(f"{key!r} of a parameter group", type(scheduler).__name__, call.error)
                    self._show(scheduler, group, key, number, is_result=True)

    def _restore(self) -> None:
        while self._shown:
            place = self._shown[-1]
            is_there = place.table.get(place.key) is place.shown
            is_changed = place.items is not None and not same_items(place.items, place.shown)
            if is_changed or not is_there and place.is_result:
                self._replaced.append(place)
            if is_there:
                place.table[place.key] = place.before
            self._shown.pop()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before an optimizer steps, that none of its schedulers has stepped yet."""
        for call in self._calls:
            if not call.with_groups and optimizer_of(call.scheduler) is optimizer:
                raise call.error(
                    f"{call.source}: {type(call.scheduler).__name__}.step() is called before its optimizer's step() in "
                    "the traced step, but runs in Python, after the step has run: call it after optimizer.step(), as "
                    "PyTorch requires."
                )

    def check(self, sets: Callable[[dict[str, Any], str], bool]) -> None:
        """Check, after the trace, that the step itself sets nothing that a scheduler sets.

        Args:
            sets: whether it sets an entry of a parameter group.
        """
        places = [(p.key, p.scheduler, "" if p.table is vars(p.scheduler) else " in a parameter group")
                  for p in self._replaced]  # fmt: skip
        places += [(key, call.scheduler, " in a parameter group") for table, key, call in self._set if sets(table, key)]
        for key, scheduler, where in places:
            source = next((call.source for call in self._calls if call.scheduler is scheduler), here())
            raise TraceError(
                f"{source}: the step sets {key!r}{where}, and so does this {type(scheduler).__name__}, whose step() "
                "runs in Python after the compiled step. Set it outside of the traced step, or by the scheduler alone."
            )
        self._set.clear()
        self._replaced.clear()

    def check_results(self, arguments: Sequence[Any]) -> None:
        """Check, when the trace's effects have been undone, that calls can compute what the step reads of schedulers.

        Args:
            arguments: the leaves of the arguments of this call.
        """
        self._results.check(arguments)

    def traced(self, name: str, effects: Any, reconstructor: Reconstructor) -> None:
        """Record the schedulers' steps, which each call runs at its end. `name` is that of the step."""
        for call in self._calls:
            make = reconstructor.make((call.args, call.kwargs))
            if call.waits():
                self.afterwards.append(_stepping(call, make))
            else:
                effects.add(lambda: None, _stepping(call, make))
        if (check := self._results.checking(name)) is not None:
            self.afterwards.append(check)
        self._calls.clear()


def _mentions_groups(snapshot: Snapshot) -> bool:
    """Whether code that the step may call mentions parameter groups; PyTorch's does, of course."""
    codes = [code for code, f in snapshot.functions.items() if not str(f[0].__module__).startswith("torch.")]
    return any("param_groups" in inner.co_names for code in codes for inner in with_inner(code))


def _stepping(call: _SchedulerCall, make: Make) -> Callable[[CallFrame], Bind]:
    step, scheduler = call.step, call.scheduler

    def apply(env: CallFrame) -> Bind:
        args, kwargs = make(env)
        return _SchedulerStep(lambda: step(scheduler, *args, **kwargs), scheduler)

    return apply


class _SchedulerStep:
    """A scheduler's step, which is run exactly once, even if it is interrupted and restarted."""

    def __init__(self, step: Callable[[], Any], scheduler: Any) -> None:
        self._step = step
        self._tables = list(_tables(scheduler))
        self._before: list[dict[Any, Any]] | None = None  # once the bindings before this one have been executed
        self._done = False

    def __call__(self) -> None:
        if self._done:
            return
        if self._before is None:
            self._before = [_copy(table) for table in self._tables]
        for table, before in zip(self._tables, self._before, strict=True):
            _restore_state(table, before)
        self._step()
        self._done = True


def _tables(scheduler: Any) -> Iterator[dict[Any, Any]]:
    """The dicts that a scheduler's step changes: its attributes, those of nested schedulers, and parameter groups."""
    for held in schedulers_in(scheduler):
        yield vars(held)
        optimizer = optimizer_of(held)
        yield from () if optimizer is None else optimizer.param_groups


def _copy(table: dict[Any, Any]) -> dict[Any, Any]:
    copied: dict[Any, tuple[Any, Any]] = {}
    for key, value in table.items():
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                copied[key] = (value, value.detach().clone())
        else:
            copied[key] = (value, list(value) if type(value) is list and key != "params" else None)
    return copied


def _restore_state(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in table.keys() - before.keys():
        del table[key]
    for key, (value, content) in before.items():
        table[key] = value
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(content)
        elif content is not None:
            value[:] = content
