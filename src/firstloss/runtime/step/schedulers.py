"""PyTorch's schedulers in a traced step: their Python code runs at each call, after the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from ...capture import session
from ...capture.tensor import DeferredTensor
from ...errors import TraceError
from ...interpreter import Undo
from ...program.source import Source, here
from ..guards.reconstruct import UnavailableNumber

if TYPE_CHECKING:
    from ..guards.effects import Bind
    from ..guards.reconstruct import CallFrame, Make, Reconstructor


class _SchedulerCall(NamedTuple):
    """A call of a scheduler's step() in the traced step."""

    step: Callable[..., Any]  # of the scheduler's class
    scheduler: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Source
    reads: int  # reads of the scheduler by the step so far

    def waits(self) -> bool:
        """Whether it needs a value that the step computes, as `ReduceLROnPlateau` does."""
        return any(type(value) is DeferredTensor for value in (*self.args, *self.kwargs.values()))

    def refuse_reads(self) -> NoReturn:
        """Make later reads of the scheduler in the step an error."""
        raise TraceError(
            f"{self.source}: the traced step reads something of this {type(self.scheduler).__name__} after its "
            "step(), which runs in Python after the step has run. Read it before, or outside of the traced "
            "step."
        )


class Schedulers:
    """The schedulers that step in a trace."""

    def __init__(self) -> None:
        self._calls: list[_SchedulerCall] = []
        self._unavailable: list[tuple[dict[str, Any], str, Any]] = []
        self._set: list[tuple[dict[str, Any], str, _SchedulerCall]] = []  # what they set
        self._replaced: list[tuple[dict[str, Any], str]] = []  # what the step sets after them
        self.afterwards: list[Callable[[CallFrame], Bind]] = []

    @contextmanager
    def watched(self, reads: Callable[[Any], int]) -> Iterator[None]:
        """Context in which a scheduler's `step()` is recorded instead of run.

        Args:
            reads: returns how often the step has read an object so far.
        """

        def recording(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                if session.trace is None:  # called in another thread
                    return original(self, *args, **kwargs)
                call = _SchedulerCall(original, self, args, kwargs, here(), reads(self))
                schedulers._calls.append(call)
                schedulers._make_unavailable(call)

            step._firstloss = True  # type: ignore[attr-defined]
            step.__wrapped__ = original  # type: ignore[attr-defined]
            return step

        schedulers = self
        with Undo() as undo, undo:
            undo(self._restore)
            for kind in vars(torch.optim.lr_scheduler).values():
                method = vars(kind).get("step") if isinstance(kind, type) else None
                if method is not None and not hasattr(method, "_firstloss"):
                    undo(setattr, kind, "step", method)
                    kind.step = recording(method)
            yield
            for call in self._calls:
                if reads(call.scheduler) != call.reads:
                    call.refuse_reads()

    def _make_unavailable(self, call: _SchedulerCall) -> None:
        """Make reads of what the scheduler sets an error from here on."""
        scheduler = call.scheduler
        optimizer = _optimizer_of(scheduler)
        for group in optimizer.param_groups if optimizer is not None else ():
            for key in ("lr", "momentum", "betas") if hasattr(scheduler, "cycle_momentum") else ("lr",):
                self._set.append((group, key, call))
                if key in group and type(group[key]) is not UnavailableNumber:
                    self._unavailable.append((group, key, group[key]))
                    group[key] = UnavailableNumber(f"{key!r} of a parameter group", type(scheduler).__name__)

    def _restore(self) -> None:
        while self._unavailable:
            group, key, value = self._unavailable[-1]
            if type(group.get(key)) is UnavailableNumber:
                group[key] = value
            else:
                self._replaced.append((group, key))
            self._unavailable.pop()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before an optimizer steps, that none of its schedulers has stepped yet."""
        for call in self._calls:
            if _optimizer_of(call.scheduler) is optimizer:
                raise TraceError(
                    f"{call.source}: {type(call.scheduler).__name__}.step() is called before its optimizer's step() in "
                    "the traced step, but runs in Python, after the step has run: call it after optimizer.step(), as "
                    "PyTorch requires."
                )

    def check(self, sets: Callable[[dict[str, Any], str], bool]) -> None:
        """Check, after the trace, that the step itself sets nothing that a scheduler sets.

        Args:
            sets: whether it sets an entry of a parameter group.
        """
        for group, key, call in self._set:
            replaced = any(g is group and k == key for g, k in self._replaced)
            if replaced or sets(group, key):
                raise TraceError(
                    f"{call.source}: the step sets {key!r} in a parameter group, and so does this "
                    f"{type(call.scheduler).__name__}, whose step() runs in Python after the compiled step. Set it "
                    "outside of the traced step, or by the scheduler alone."
                )
        self._set.clear()
        self._replaced.clear()

    def traced(self, effects: Any, reconstructor: Reconstructor) -> None:
        """Record the schedulers' steps, which each call runs at its end."""
        for call in self._calls:
            make = reconstructor.make((call.args, call.kwargs))
            if call.waits():
                self.afterwards.append(_stepping(call, make))
            else:
                effects.add(lambda: None, _stepping(call, make))
        self._calls.clear()


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
    yield vars(scheduler)
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _tables(inner)
    optimizer = _optimizer_of(scheduler)
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


def _optimizer_of(scheduler: Any) -> torch.optim.Optimizer | None:
    optimizer: torch.optim.Optimizer | None = object.__getattribute__(scheduler, "__dict__").get("optimizer")
    return optimizer
