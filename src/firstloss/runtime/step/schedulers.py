"""PyTorch's schedulers in a traced step: their Python runs at each call, after the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from ...capture import session
from ...capture.tensor import DeferredTensor
from ...errors import TraceError
from ...program.source import Source, here
from ...undo import Undo
from ..guards.reconstruct import UnavailableNumber

if TYPE_CHECKING:
    from ..guards.bindings import Bind
    from ..guards.reconstruct import CallFrame, Make, Reconstructor


class _SchedulerCall(NamedTuple):
    """A scheduler's step in the step's Python."""

    step: Callable[..., Any]  # of the scheduler's class
    scheduler: Any
    args: tuple
    kwargs: dict[str, Any]
    source: Source
    reads: int  # how often the step had read something of the scheduler before

    def waits(self) -> bool:
        """Whether it needs a value that the step computes, as `ReduceLROnPlateau` does."""
        return any(type(value) is DeferredTensor for value in (*self.args, *self.kwargs.values()))

    def refuse_reads(self) -> NoReturn:
        """Make later reads of the scheduler in the step an error."""
        raise TraceError(
            f"{self.source}: the traced step reads something of this {type(self.scheduler).__name__} after its "
            "step(), which runs in Python when the step has been run. Read it before, or outside of the traced "
            "step."
        )


class Schedulers:
    """The schedulers that step in one trace."""

    def __init__(self) -> None:
        self._calls: list[_SchedulerCall] = []
        self._spoiled: list[tuple[dict[str, Any], str, Any]] = []
        self.afterwards: list[Callable[[CallFrame], Bind]] = []

    @contextmanager
    def watched(self, reads: Callable[[Any], int]) -> Iterator[None]:
        """In the block, a scheduler's `step()` is recorded and does nothing.

        Args:
            reads: how often the step has read something of an object so far.
        """

        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                if session.trace is None:  # another thread's
                    return original(self, *args, **kwargs)
                ours._calls.append(_SchedulerCall(original, self, args, kwargs, here(), reads(self)))
                ours._spoil(self)

            step._firstloss = True  # type: ignore[attr-defined]
            step.__wrapped__ = original  # type: ignore[attr-defined]
            return step

        ours = self
        with Undo() as undo, undo:
            undo(self._mend)
            for kind in vars(torch.optim.lr_scheduler).values():
                own = vars(kind).get("step") if isinstance(kind, type) else None
                if own is not None and not hasattr(own, "_firstloss"):
                    undo(setattr, kind, "step", own)
                    kind.step = noting(own)
            yield
            for call in self._calls:
                if reads(call.scheduler) != call.reads:
                    call.refuse_reads()

    def _spoil(self, scheduler: Any) -> None:
        """From here on the step must not read what the scheduler sets."""
        optimizer = _optimizer_of(scheduler)
        for group in optimizer.param_groups if optimizer is not None else ():
            for key in ("lr", "momentum", "betas") if hasattr(scheduler, "cycle_momentum") else ("lr",):
                if key in group and type(group[key]) is not UnavailableNumber:
                    self._spoiled.append((group, key, group[key]))
                    group[key] = UnavailableNumber(f"{key!r} of a parameter group", type(scheduler).__name__)

    def _mend(self) -> None:
        while self._spoiled:
            group, key, value = self._spoiled[-1]
            if type(group.get(key)) is UnavailableNumber:
                group[key] = value
            self._spoiled.pop()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: none of its schedulers may have stepped before."""
        for call in self._calls:
            if _optimizer_of(call.scheduler) is optimizer:
                raise TraceError(
                    f"{call.source}: {type(call.scheduler).__name__}.step() is called before its optimizer's step() in "
                    "the traced step. It runs in Python, when the step has been run: call it after "
                    "optimizer.step(), as PyTorch asks for."
                )

    def traced(self, effects: Any, left: Reconstructor) -> None:
        """The step has been traced: each call of it calls the schedulers at its end."""
        for call in self._calls:
            make = left.make((call.args, call.kwargs))
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
    """A scheduler's step: done once, even if it is interrupted and restarted."""

    def __init__(self, step: Callable[[], Any], scheduler: Any) -> None:
        self._step = step
        self._tables = list(_tables(scheduler))
        self._before = [_copy(table) for table in self._tables]
        self._done = False

    def __call__(self) -> None:
        if self._done:
            return
        for table, before in zip(self._tables, self._before, strict=True):
            _restore_state(table, before)
        self._step()
        self._done = True


def _tables(scheduler: Any) -> Iterator[dict]:
    """What a scheduler's step changes: its attributes, those of nested schedulers, and parameter groups."""
    yield vars(scheduler)
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _tables(inner)
    optimizer = _optimizer_of(scheduler)
    yield from () if optimizer is None else optimizer.param_groups


def _copy(table: dict) -> dict:
    copied: dict[Any, tuple[Any, Any]] = {}
    for key, value in table.items():
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                copied[key] = (value, value.detach().clone())
        else:
            copied[key] = (value, list(value) if type(value) is list and key != "params" else None)
    return copied


def _restore_state(table: dict, before: dict) -> None:
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
    found: torch.optim.Optimizer | None = object.__getattribute__(scheduler, "__dict__").get("optimizer")
    return found
