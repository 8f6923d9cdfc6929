"""A step whose Python would do something else now: noticed, explained, and traced again.

A compiled step repeats what its Python did when it was traced. Two things watch over that:

- At each call the Python values that the step may read are compared with those that it was traced with (`watch.py`,
  about 0.2 ms for a transformer of 24 layers). Where one has changed that code of the step reads, the step is traced
  again, which takes a fraction of a second, and the two Programs are compared. The same Program: nothing is compiled.
  Another one: it is compiled, and a `GraphChangeWarning` names what has changed and where the Programs part.
- What cannot be seen so (the time, a file) is found by tracing again at the second call, while the device
  runs the first, and later as often as takes less than 1% of the time. Where the Programs part then, steps may have
  been run that should have been others, and that is a `GraphChangedError`.
"""

from __future__ import annotations

import sys
import time
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..capture.compare import Parting, parting
from ..capture.source import here
from ..errors import GraphChangedError, GraphChangeWarning
from .watch import Watch

# Of the time that passes, this part at most is spent on checking for changes that cannot be seen.
_CHECKING = 0.01


class Known:
    """An executable, and the Python values with which it was traced."""

    def __init__(self, executable: Any, watch: Watch, seconds: float) -> None:
        self.executable = executable
        self.watch = watch
        self.state = watch.before
        self.forgotten: list[Any] = []
        self.uses = 0
        self.seconds = seconds  # that a trace takes
        self._checked = time.perf_counter()

    def misfit(self) -> list[int]:
        """The slots that hold something else than when it was traced."""
        if self.watch.unchanged(self.state):
            return []
        return self.watch.changed(self.state, self.watch.read())

    def forget(self, slots: list[int]) -> None:
        """Watch these no longer: the traced Python does not read them."""
        self.forgotten += [self.watch.slots[i] for i in slots]
        gone = {id(slot) for slot in self.forgotten}
        kept = {id(s): v for s, v in zip(self.watch.slots, self.state, strict=True)}
        self.watch.keep(lambda slot: id(slot) not in gone)
        self.state = [kept[id(slot)] for slot in self.watch.slots]

    def may_ask(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether its Python can reach a module or an optimizer that holds one of these."""
        held = [p for module in self.watch.reach.modules for p in module._parameters.values()]
        for value in self.state:
            if isinstance(value, torch.optim.Optimizer):
                held += [p for group in value.param_groups for p in group["params"]]
        return not set(map(id, held)).isdisjoint(map(id, parameters))

    def check_is_due(self) -> bool:
        """Whether to trace again although nothing is seen to have changed."""
        if self.uses == 1:
            return True
        return time.perf_counter() - self._checked > self.seconds / _CHECKING


class Changes:
    """Keeps the executables of one step for one kind of batch, each with what it was traced with."""

    def __init__(self, name: str, refuse: bool, check: bool) -> None:
        self._name = name
        self._refuse = refuse
        self._check = check
        self._known: list[Known] = []
        self._fitting: Known | None = None
        self._told: set[str] = set()

    def fits(self) -> bool:
        """Whether there is an executable that does what the step's Python would do now."""
        self._fitting = next(
            (k for k in self._known if not k.executable.outdated() and not self._read_slots(k)),
            None,
        )
        return self._fitting is not None

    def reads(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether one of the executables reads or writes one of these, or its Python may ask something of them."""
        return any(known.executable.reads(parameters) or known.may_ask(parameters) for known in self._known)

    def executable(self, trace: Any, roots: tuple, alike: Iterable[Changes] = ()) -> Any:
        """The executable that does what the step's Python would do now; to be called after `fits`.

        Args:
            trace: traces the step; called with the Watch and a function that finds an equal executable.
            roots: where to begin to look for what the step's Python reads.
            alike: executables for the same kind of batch, traced with weights in another state.
        """
        known = self._fitting
        if known is None:
            known = self._trace(trace, roots, alike)
        elif self._check and known.check_is_due():
            known = self._verify(known, trace, roots)
        known.uses += 1
        if known is not self._known[0]:
            self._known.remove(known)
            self._known.insert(0, known)
        return known.executable

    def latest(self) -> Any:
        """The executable used last."""
        return self._known[0].executable

    def _read_slots(self, known: Known) -> list[int]:
        """The slots that have changed, of those that code of the step reads; the others are forgotten."""
        changed = known.misfit()
        if not changed:
            return changed
        unread = known.watch.unread(changed)
        if not unread:
            return changed
        known.forget(unread)
        return known.misfit()

    def _trace(self, trace: Any, roots: tuple, alike: Iterable[Changes]) -> Known:
        """Trace the step, since no executable fits."""
        last = self._known[0] if self._known else None
        why = [] if last is None or last.executable.outdated() else self._reasons(last)
        twin: list[Known] = []

        def find(traced: Any) -> Any:
            for known in (*self._known, *(known for changes in alike for known in changes._known)):
                if same_step(known.executable, traced):
                    twin.append(known)
                    return known.executable
            if why and last is not None:
                self._tell_parting(why, parting(last.executable.program, traced.program))
            return None

        with _executed(bool(self._known)) as codes:
            known = _traced(trace, roots, find)
        if twin:
            known.uses = twin[0].uses
        if twin and twin[0] in self._known:
            self._known[self._known.index(twin[0])] = known
            if codes:
                known.forget(known.watch.unread(known.misfit(), codes))
                self._tell_again(known)
        else:
            self._known.insert(0, known)
        self._tell_unwatched(known)
        return known

    def _verify(self, known: Known, trace: Any, roots: tuple) -> Known:
        """Trace the step again; the same Program is expected."""

        def find(traced: Any) -> Any:
            if not same_step(known.executable, traced):
                where = _place(known.executable, traced)
            elif known.executable.reads_other_tensors(traced):
                where = "the same operations on another tensor, which is no argument"
            else:
                return known.executable
            raise GraphChangedError(
                f"{self._name} does something else now than when it was traced, {known.uses} "
                f"step{'s' if known.uses > 1 else ''} ago: {where}. Its Python reads something that changes and cannot "
                f"be seen from outside: the time, a file, a loader, a random number. {_ADVICE}"
            )

        fresh = _traced(trace, roots, find)
        fresh.uses = known.uses
        gone = {(id(s.table), s.key) for s in known.forgotten}
        fresh.forget([i for i, s in enumerate(fresh.watch.slots) if (id(s.table), s.key) in gone])
        self._known[self._known.index(known)] = fresh
        return fresh

    # -- what is said --

    def _reasons(self, known: Known) -> list[str]:
        watch = known.watch
        now = watch.read()
        reasons = []
        for i in watch.changed(known.state, now):
            slot = watch.slots[i]
            if slot.name == "training":  # model.train() and model.eval() are meant to make another step of it
                continue
            reason = f"{slot.what} {_change(known.state[i], now[i])}"
            read, written = watch.where_read(slot.name), watch.where_written(slot.name)
            places = [f"read at {read}"] * (read is not None) + [f"written at {written}"] * (written is not None)
            reasons.append(reason + (f" ({', '.join(places)})" if places else ""))
        return reasons

    def _tell_parting(self, why: list[str], where: Parting | None) -> None:
        text = f"{self._name} does something else now than when it was traced: {where}. What has changed: {_some(why)}."
        if self._refuse:
            raise GraphChangedError(f"{text} {_ADVICE}")
        _warn(f"{text} It is compiled anew. {_ADVICE}")

    def _tell_again(self, known: Known) -> None:
        """What the step itself has changed while it was traced, so that it will have to be traced again."""
        reasons = self._reasons(known)
        fresh = [known.watch.slots[i].what for i in known.misfit()]
        if not reasons or all(what in self._told for what in fresh):
            return
        self._told.update(fresh)
        _warn(
            f"{self._name} changes what it reads itself: {_some(reasons)}. A compiled step runs no Python, so "
            f"this one is traced at each call ({known.seconds:.2f} s) to see whether it still does the same. {_ADVICE}"
        )

    def _tell_unwatched(self, known: Known) -> None:
        """What the step reads that is too large to be compared at each call."""
        for name, what in known.watch.unwatched:
            line = known.watch.where_read(name, own=True)
            if line is not None and what not in self._told:
                self._told.add(what)
                _warn(
                    f"{line}: {self._name} reads {what}, which is too much to look through at each call. A change in "
                    "it that decides what the step does is noticed only when the step is traced again to see, in less "
                    "than 1% of the time. Keep what decides in something smaller, or pass it as an argument."
                )


_ADVICE = (
    "A compiled step has one graph: keep what changes in a tensor, and choose with torch.where(condition, a, b) "
    "instead of `if condition:`; count in a tensor (step = torch.zeros(()), then step += 1), not in a Python number; "
    "pass a batch as an argument."
)


def same_step(known: Any, traced: Any) -> bool:
    """Whether two executables compute the same from the same."""
    return known.signature() == traced.signature() and parting(known.program, traced.program) is None


def _traced(trace: Any, roots: tuple, find: Any) -> Known:
    watch = Watch(*roots)
    watch.begin()
    begin = time.perf_counter()

    def settled(traced: Any) -> Any:
        watch.end()
        return find(traced)

    executable = trace(watch, settled)
    return Known(executable, watch, time.perf_counter() - begin)


@contextmanager
def _executed(wanted: bool) -> Iterator[set[types.CodeType]]:
    """The code that runs in the block; none if it is not `wanted`, or if somebody else is profiling."""
    codes: set[types.CodeType] = set()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    if not wanted or sys.getprofile() is not None:
        yield codes
        return
    sys.setprofile(note)
    try:
        yield codes
    finally:
        sys.setprofile(None)


def _place(known: Any, traced: Any) -> Any:
    return parting(known.program, traced.program) or "other state is carried from step to step"


def _change(old: Any, new: Any) -> str:
    texts = [t if len(t := repr(v)) <= 40 and isinstance(v, (int, float, str, bool)) else None for v in (old, new)]
    return f"({texts[0]}, now {texts[1]})" if None not in texts else "is another"


def _some(texts: list[str]) -> str:
    shown = "; ".join(texts[:3])
    return shown if len(texts) <= 3 else f"{shown}; and {len(texts) - 3} more"


def _warn(text: str) -> None:
    warnings.warn(GraphChangeWarning(f"{here()}: {text}"), stacklevel=6)
