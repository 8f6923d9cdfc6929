"""A step whose Python would do something else now: noticed, explained, and traced again.

A compiled step repeats what its Python did when it was traced. Two things watch over that:

- At each call all that its Python has read is compared with what it was (`guards/`, some 0.2 ms for a transformer of
  24 layers). Where something has changed the step is traced again, which takes a fraction of a second, and the two
  Programs are compared. The same Program: nothing is compiled. Another one: it is compiled, and a `GraphChangeWarning`
  names what has changed and where the Programs part.
- What cannot be seen so (the time, a file) is found by tracing again at the second call, while the device
  runs the first, and later as often as takes less than 1% of the time. Where the Programs part then, steps may have
  been run that should have been others, and that is a `GraphChangedError`.
"""

from __future__ import annotations

import time
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...compat.torch_names import parameters_of
from ...errors import GraphChangedError, GraphChangeWarning
from ...program.compare import Parting, parting
from ...program.source import here
from ..guards.effects import Effects, put_back
from ..guards.guard_set import GuardSet
from ..guards.guards import Change
from ..guards.left import Left
from ..guards.reads import Reads, generators
from ..guards.recording import Recording, functions_of
from ..guards.snapshot import Snapshot

# Of the time that passes, this part at most is spent on checking for changes that cannot be seen.
_CHECKING = 0.01


class Surroundings:
    """The Python around one trace of a step: what was there before, what the step reads, and what it leaves."""

    def __init__(self, name: str, roots: Iterable[Any], functions: Iterable[types.FunctionType], profile: bool) -> None:
        """
        Args:
            roots: where to begin to look for what the step's Python can reach.
            functions: that an earlier trace has met.
            profile: note which code runs.
        """
        self._name = name
        self._generators = generators()
        self.snapshot = Snapshot(roots, functions)
        self.recording = Recording(self.snapshot.classes, profile)
        self.guards: GuardSet | None = None

    def effects(self, left: Left, weights: set[int]) -> Effects:
        """What the step has changed in Python; from here on there are guards.

        Args:
            weights: the ids of the backend's weights.
        """
        reads = Reads(self.snapshot, self.recording)
        effects = Effects(self.snapshot, reads, left)
        self.guards = reads.guards(self._generators, weights)
        self.recording.forget()
        return effects

    def restore(self, left: Left) -> None:
        """A step that could not be traced leaves nothing behind."""
        Effects(self.snapshot, None, left).undo()

    def put_back(self) -> bool:
        """Likewise, what is in arrays, buffers and the like; whether nothing else has changed."""
        return put_back(self.snapshot)


class Known:
    """An executable, and the guards of the trace that it came from."""

    def __init__(self, executable: Any, around: Surroundings, seconds: float) -> None:
        assert around.guards is not None
        self.executable = executable
        self.guards = around.guards
        self.modules = around.snapshot.modules
        self.optimizers = around.snapshot.optimizers
        self.uses = 0
        self.again = 0  # how often it was traced again for what it has changed itself
        self.seconds = seconds  # that a trace takes
        self._checked = time.perf_counter()

    def changes(self) -> list[Change]:
        """What has changed since it was traced, of what it reads."""
        return self.guards.changes(self.executable.move)

    @property
    def traced_each_time(self) -> str | None:
        """Why it has to be traced at each call, if so."""
        if self.executable.why_not is not None:
            return str(self.executable.why_not)
        for held, what in self.guards.unwatchable.values():
            kind = type(held).__qualname__
            return f"it reads {what}, an object of type {kind}, of which cannot be told whether it has changed"
        return None

    def own(self, changes: list[Change]) -> list[Change]:
        """Those of `changes` that the step itself has made; but for new tensors in the place of others, with which it
        can go on."""
        own = [change for change in changes if change.place in self.executable.effects.places]
        return [c for c in own if not (isinstance(c.old, torch.Tensor) and isinstance(c.new, torch.Tensor))]

    def may_ask(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether its Python can reach a module or an optimizer that holds one of these."""
        held = [p for module in self.modules for p in parameters_of(module).values()]
        held += [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return not set(map(id, held)).isdisjoint(map(id, parameters))

    def check_is_due(self) -> bool:
        """Whether to trace again although nothing is seen to have changed."""
        if self.uses == 1:
            return True
        return time.perf_counter() - self._checked > self.seconds / _CHECKING


class Changes:
    """Keeps the executables of one step for one kind of batch, each with what it was traced with."""

    def __init__(self, name: str, refuse: bool, check: bool | str) -> None:
        self._name = name
        self._refuse = refuse
        self._check = bool(check)
        self._always = check == "always"
        self._known: list[Known] = []
        self._fitting: Known | None = None
        self._told: set[str] = set()
        self._functions: list[types.FunctionType] = []

    def fits(self) -> bool:
        """Whether there is an executable that does what the step's Python would do now."""
        self._fitting = None
        if not self._always:
            self._fitting = next((known for known in self._known if self._does_fit(known)), None)
        return self._fitting is not None

    @staticmethod
    def _does_fit(known: Known) -> bool:
        if known.executable.outdated() or known.guards.unknown or known.traced_each_time is not None:
            return False
        return not known.changes()

    def reads(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether one of the executables reads or writes one of these, or its Python may ask something of them."""
        return any(known.executable.reads(parameters) or known.may_ask(parameters) for known in self._known)

    def executable(self, trace: Any, roots: tuple, alike: Iterable[Changes] = ()) -> Any:
        """The executable that does what the step's Python would do now; to be called after `fits`.

        Args:
            trace: traces the step; called with its Surroundings and a function that finds an equal executable.
            roots: where to begin to look for what the step's Python reads.
            alike: executables for the same kind of batch, traced with weights in another state.
        """
        known = self._fitting
        if known is None:
            known = self._trace(trace, roots, alike)
        elif self._check and known.check_is_due():
            known = self._verify(known, trace, roots)
        known.uses += 1
        if known not in self._known:
            return known.executable
        if known is not self._known[0]:
            self._known.remove(known)
            self._known.insert(0, known)
        return known.executable

    def latest(self) -> Any:
        """The executable used last."""
        return self._known[0].executable

    def _trace(self, trace: Any, roots: tuple, alike: Iterable[Changes]) -> Known:
        """Trace the step, since no executable fits."""
        last = self._known[0] if self._known else None
        outdated = last is not None and last.executable.outdated()
        why = [] if last is None or outdated else last.changes()
        twin: list[Known] = []

        def find(traced: Any) -> Any:
            for known in (*self._known, *(known for changes in alike for known in changes._known)):
                if same_step(known.executable, traced):
                    twin.append(known)
                    return known.executable
            if last is not None and not outdated and not self._meant(why) and traced.raised is None:
                where = parting(last.executable.program, traced.program)
                self._tell_parting(self._reasons(last, why) or [last.traced_each_time or "it cannot be seen"], where)
            return None

        known = self._traced(trace, roots, find)
        if known.executable.raised is not None:  # it may not be so the next time
            return known
        if last is not None and last.own(why):
            known.again = last.again + 1
            if known.again > 1:
                self._tell_again(last, last.own(why))
        if twin:
            known.uses = max(twin[0].uses, 1)
        if twin and twin[0] in self._known:
            self._known[self._known.index(twin[0])] = known
        else:
            self._known.insert(0, known)
        self._tell_unwatched(known)
        return known

    @staticmethod
    def _meant(why: list[Change]) -> bool:
        """Whether all that has changed is a module's mode: train() and eval() are meant to make another step of it."""
        return bool(why) and all(change.name == "training" for change in why)

    def _verify(self, known: Known, trace: Any, roots: tuple) -> Known:
        """Trace the step again; the same Program is expected."""

        def find(traced: Any) -> Any:
            if traced.raised is not None:
                return None
            if not same_step(known.executable, traced):
                where: Any = parting(known.executable.program, traced.program)
                if where is None or where.old is None and where.new is None:
                    return None  # it computes the same, and somebody keeps more or less of it
            elif known.executable.reads_other_tensors(traced):
                where = "the same operations on another tensor, which is no argument"
            else:
                return known.executable
            raise GraphChangedError(
                f"{self._name} does something else now than when it was traced, {known.uses} "
                f"step{'s' if known.uses > 1 else ''} ago: {where}. Its Python reads something that changes and cannot "
                f"be seen from outside: the time, a file, a loader, a random number. {_ADVICE}"
            )

        fresh = self._traced(trace, roots, find)
        if fresh.executable.raised is not None:
            return fresh
        fresh.uses = known.uses
        self._known[self._known.index(known)] = fresh
        self._tell_unwatched(fresh)
        return fresh

    def _traced(self, trace: Any, roots: tuple, find: Callable[[Any], Any]) -> Known:
        # The code that runs is noted when there is no hurry: the first loss is there, or nobody checks it later.
        around = Surroundings(self._name, roots, self._functions, bool(self._known) or not self._check)
        begin = time.perf_counter()
        executable = trace(around, find)
        known = Known(executable, around, time.perf_counter() - begin)
        if known.guards.unknown:
            self._functions += functions_of(known.guards.unknown)
            if len(self._functions) > _MOST_FUNCTIONS:
                known.guards.unknown = []
        return known

    # -- what is said --

    def _reasons(self, known: Known, changes: list[Change]) -> list[str]:
        reasons = []
        for change in changes:
            if change.name == "training":
                continue
            reason = f"{change.what} {_change(change.old, change.new)}"
            read, written = (
                known.guards.lines.where_read(change.name),
                known.guards.lines.where_written(change.name),
            )
            places = [f"read at {read}"] * (read is not None) + [f"written at {written}"] * (written is not None)
            reasons.append(reason + (f" ({', '.join(places)})" if places else ""))
        return reasons

    def _tell_parting(self, why: list[str], where: Parting | None) -> None:
        text = f"{self._name} does something else now than when it was traced: {where}. What has changed: {_some(why)}."
        if self._refuse:
            raise GraphChangedError(f"{text} {_ADVICE}")
        _warn(f"{text} It is compiled anew. {_ADVICE}")

    def _tell_again(self, known: Known, own: list[Change]) -> None:
        """What the step itself changes and reads, so that it has to be traced again."""
        if all(change.what in self._told for change in own):
            return
        self._told.update(change.what for change in own)
        _warn(
            f"{self._name} changes what it reads itself: {_some(self._reasons(known, own))}. A compiled step runs no "
            f"Python, so this one is traced at each call ({known.seconds:.2f} s) to see whether it still does the "
            f"same. {_ADVICE}"
        )

    def _tell_unwatched(self, known: Known) -> None:
        """What the step reads that cannot be compared at each call."""
        why = known.traced_each_time
        if why is not None and why not in self._told:
            self._told.add(why)
            _warn(f"{self._name} is traced at each call ({known.seconds:.2f} s): {why}. {_ADVICE}")
        for name, what in known.guards.unwatched:
            line = known.guards.lines.where_read(name, own=True)
            if line is not None and what not in self._told:
                self._told.add(what)
                _warn(
                    f"{line}: {self._name} reads {what}, which is too much to look through at each call. A change in "
                    "it that decides what the step does is noticed only when the step is traced again to see, in less "
                    "than 1% of the time. Keep what decides in something smaller, or pass it as an argument."
                )


# Functions that are met anew at each trace are made by the step itself, or by a library that never ends.
_MOST_FUNCTIONS = 10_000

_ADVICE = (
    "A compiled step has one graph: keep what changes in a tensor, and choose with torch.where(condition, a, b) "
    "instead of `if condition:`; count in a tensor (step = torch.zeros(()), then step += 1), not in a Python number; "
    "pass a batch as an argument."
)


def same_step(known: Any, traced: Any) -> bool:
    """Whether two executables compute the same from the same."""
    return known.signature() == traced.signature() and parting(known.program, traced.program) is None


def _change(old: Any, new: Any) -> str:
    texts = [t if len(t := repr(v)) <= 40 and isinstance(v, (int, float, str, bool)) else None for v in (old, new)]
    return f"({texts[0]}, now {texts[1]})" if None not in texts else "is another"


def _some(texts: list[str]) -> str:
    shown = "; ".join(texts[:3])
    return shown if len(texts) <= 3 else f"{shown}; and {len(texts) - 3} more"


def _warn(text: str) -> None:
    warnings.warn(GraphChangeWarning(f"{here()}: {text}"), stacklevel=6)
