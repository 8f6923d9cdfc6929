"""A timeline of the way to the first loss: named spans on named tracks.

Every room records what it does with `with timeline.span("trace"):`; the process keeps one current timeline, and
`with timeline.record() as t:` puts a fresh one in its place for a while. Times are seconds since the process
started, so that the import of torch, which is over before any of our code runs, is on the axis too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .files import atomic_write

FIRST_LOSS = "first loss"
"""The mark that ends the road."""

PHASES = ("import", "construct", "move", "capture", "trace", "lower", "compile", "materialize", "first step")
"""The phases in the order of the road; tables and pictures list them so. Other names come after, by time."""

_imported = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took some time on one track.

    Attributes:
        name: of the phase.
        track: the row it belongs to.
        start: in seconds since the process started.
        end: in seconds since the process started.
    """

    name: str
    track: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment.

    Attributes:
        name: of what happened.
        at: in seconds since the process started.
    """

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase in a table.

    Attributes:
        name: of the phase.
        begin: when it first began, in seconds since the process started.
        seconds: how long it was under way, overlaps counted once.
    """

    name: str
    begin: float
    seconds: float


def process_started() -> float:
    """When this process started, on the clock of `time.perf_counter()`.

    Linux tells to 10 ms; elsewhere it is the moment at which this module was imported.

    Returns:
        Seconds.
    """
    now, age = time.perf_counter(), _process_age()
    return _imported if age is None else min(now - age, _imported)


def _process_age() -> float | None:
    try:
        with open("/proc/self/stat", "rb") as file:
            # The second field is the program's name in parentheses, and may itself hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    # Some sandboxes show a start time of zero: the "age" would be the machine's.
    return age if started > 0 and age >= 0 else None


class Timeline:
    """Spans and marks of one process. Any thread may record; what is read is a copy.

    Args:
        start: the zero of the axis on the clock of `time.perf_counter()`; by default the process's start.
    """

    def __init__(self, start: float | None = None) -> None:
        self.start = process_started() if start is None else start
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._marks: list[Mark] = []

    def now(self) -> float:
        """Seconds since `start`.

        Returns:
            A float, from the clock of `time.perf_counter()`.
        """
        return time.perf_counter() - self.start

    @contextmanager
    def span(self, name: str, track: str | None = None) -> Iterator[None]:
        """Record how long the block takes, also when it raises.

        Args:
            name: of the phase.
            track: the row it belongs to; by default the thread's name.

        Yields:
            None, once; to be used in a `with` statement.
        """
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, self.now(), track)

    def add(self, name: str, start: float, end: float | None = None, track: str | None = None) -> Span:
        """Record a span whose times are already known.

        Args:
            name: of the phase.
            start: in seconds since `self.start`.
            end: the same; by default now.
            track: the row it belongs to; by default the thread's name.

        Returns:
            The span.

        Raises:
            ValueError: if it would end before it starts.
        """
        span = Span(name, track or _thread_name(), start, self.now() if end is None else end)
        if span.end < span.start:
            raise ValueError(f"span {name!r} would end at {span.end:.6f} s, before it starts at {span.start:.6f} s")
        with self._lock:
            self._spans.append(span)
        return span

    def mark(self, name: str, at: float | None = None) -> Mark:
        """Record a moment.

        Args:
            name: of what happens.
            at: in seconds since `self.start`; by default now.

        Returns:
            The mark.
        """
        mark = Mark(name, self.now() if at is None else at)
        with self._lock:
            self._marks.append(mark)
        return mark

    @property
    def spans(self) -> tuple[Span, ...]:
        """What has ended so far, by start."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: (span.start, span.end)))

    @property
    def marks(self) -> tuple[Mark, ...]:
        with self._lock:
            return tuple(sorted(self._marks, key=lambda mark: mark.at))

    @property
    def first_loss(self) -> float | None:
        """Seconds from the process's start to the first loss, or None if it has not come."""
        return next((mark.at for mark in self.marks if mark.name == FIRST_LOSS), None)

    def seconds(self, name: str) -> float:
        """How long a phase was under way, overlapping spans (of several threads) counted once.

        Args:
            name: of the phase.

        Returns:
            0 for a phase that there is none of.
        """
        return _union((span.start, span.end) for span in self.spans if span.name == name)

    def table(self) -> list[PhaseRow]:
        """One row per phase.

        Returns:
            In the order of the road; phases that the road does not know follow by time.
        """
        begins: dict[str, float] = {}
        for span in self.spans:
            begins.setdefault(span.name, span.start)
        return [PhaseRow(name, begins[name], self.seconds(name)) for name in _in_order(begins)]

    def to_dict(self) -> dict[str, Any]:
        """The spans and marks as plain data, for `from_dict`, in another process too.

        Returns:
            Of dicts, lists, strings and floats.
        """
        return {"spans": [asdict(span) for span in self.spans], "marks": [asdict(mark) for mark in self.marks]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """A timeline of what another one recorded.

        Args:
            data: what `to_dict` returned.

        Returns:
            A new timeline.
        """
        timeline = cls()
        timeline._spans = [Span(**span) for span in data["spans"]]
        timeline._marks = [Mark(**mark) for mark in data["marks"]]
        return timeline

    def to_perfetto(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "Firstloss",
        other: Timeline | None = None,
        other_name: str = "eager way",
    ) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open: one process per timeline, one row per track.

        The file is the JSON object form of the Trace Event Format, times in microseconds.

        Args:
            path: of the file, which appears when it is whole.
            name: what this timeline is called there.
            other: a timeline to show beside it.
            other_name: what that is called there.
        """
        events = _trace_events(self, 1, name)
        if other is not None:
            events += _trace_events(other, 2, other_name)
        with atomic_write(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file, indent=1)
            file.write("\n")

    def to_png(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "Firstloss",
        other: Timeline | None = None,
        other_name: str = "eager way",
        title: str | None = None,
    ) -> None:
        """Draw the phases as bars over time, `other` below on the same axis.

        Args:
            path: of the file, which appears when it is whole.
            name: what this timeline is called there.
            other: a timeline to show beside it.
            other_name: what that is called there.
            title: above the picture.

        Raises:
            ImportError: without matplotlib.
        """
        from .timeline_picture import Phases, draw

        groups: list[tuple[str, Phases]] = [(name, self)] if other is None else [(name, self), (other_name, other)]
        draw(path, groups, title)


def _thread_name() -> str:
    thread = threading.current_thread()
    return "main" if thread is threading.main_thread() else thread.name


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length covered by intervals of which some may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _in_order(begins: dict[str, float]) -> list[str]:
    known = [name for name in PHASES if name in begins]
    return known + sorted((name for name in begins if name not in PHASES), key=begins.__getitem__)


def _trace_events(timeline: Timeline, pid: int, name: str) -> list[dict[str, Any]]:
    """The timeline as one process of a Chrome trace."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    lanes: dict[tuple[str, int], int] = {}
    open_ends: dict[tuple[str, int], list[float]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start, -span.end)):
        lane = _lane(span, open_ends)
        if lane not in lanes:
            lanes[lane] = len(lanes) + 1
            label = span.track if lane[1] == 0 else f"{span.track} ({lane[1] + 1})"
            args = {"name": label}
            events.append({"ph": "M", "pid": pid, "tid": lanes[lane], "name": "thread_name", "args": args})
        times = {"ts": round(span.start * 1e6, 3), "dur": round(span.seconds * 1e6, 3)}
        events.append({"ph": "X", "pid": pid, "tid": lanes[lane], "name": span.name, "cat": "phase", **times})
    for mark in timeline.marks:
        events.append({"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": mark.name, "ts": round(mark.at * 1e6, 3)})
    return events


def _lane(span: Span, open_ends: dict[tuple[str, int], list[float]]) -> tuple[str, int]:
    """The first row of the span's track on which it nests: the format forbids spans that cross on one thread."""
    number = 0
    while True:
        ends = open_ends.setdefault((span.track, number), [])
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return span.track, number
        number += 1


_current = Timeline()


def current() -> Timeline:
    """The timeline that the whole process, all its threads, records into.

    Returns:
        That of the innermost `record`, or the process's own.
    """
    return _current


def span(name: str, track: str | None = None):
    """`current().span(name, track)`: the block is recorded where it began, whatever `record()` does meanwhile.

    Args:
        name: of the phase.
        track: the row it belongs to; by default the thread's name.
    """
    return _current.span(name, track)


def mark(name: str) -> Mark:
    """`current().mark(name)`.

    Args:
        name: of what happens.

    Returns:
        The mark.
    """
    return _current.mark(name)


@contextmanager
def record() -> Iterator[Timeline]:
    """Collect what the block (in any thread) records into a fresh timeline, then put the former one back.

    Yields:
        The fresh one.
    """
    global _current
    former, _current = _current, Timeline()
    try:
        yield _current
    finally:
        _current = former
