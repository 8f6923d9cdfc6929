"""A timeline of the time to first loss: named spans on named tracks.

Spans are recorded with `with timeline.span("trace"):`. The process has one current timeline, which
`with timeline.record() as t:` replaces temporarily. Times are seconds since the process started, so that the import of
torch, which ends before any of our code runs, is included.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .compat.locks import fork_safe_lock
from .files import atomic_write

FIRST_LOSS = "first loss"
"""The name of the mark at the first loss."""

REST = "rest of the step"
"""The name of the span from the first loss until the weights have been updated."""

PHASES = ("import", "construct", "move", "capture", "trace", "lower", "compile", "materialize", "first step")
"""The phases in the order of tables and pictures; other names follow, ordered by time."""

_imported = time.perf_counter()
_log = logging.getLogger("firstloss")


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on a track.

    Attributes:
        name: the phase's name.
        track: the row in which it is drawn.
        start: seconds since the process started.
        end: seconds since the process started.
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
    """A moment.

    Attributes:
        name: the event's name.
        at: seconds since the process started.
    """

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase in a table.

    Attributes:
        name: the phase's name.
        begin: when it first began, in seconds since the process started.
        seconds: its total duration, with overlaps counted once.
    """

    name: str
    begin: float
    seconds: float


def process_started() -> float:
    """When this process started, on the clock of `time.perf_counter()`.

    Accurate to 10 ms on Linux; elsewhere, when this module was imported.

    Returns:
        Seconds.
    """
    now, age = time.perf_counter(), _process_age()
    return _imported if age is None else min(now - age, _imported)


def _process_age() -> float | None:
    try:
        with open("/proc/self/stat", "rb") as file:
            # The second field is the program's name in parentheses, which may contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    # Some sandboxes report a start time of zero, which would make this the machine's uptime.
    return age if started > 0 and age >= 0 else None


class Timeline:
    """Spans and marks of one process. Any thread may record; reading returns a copy.

    Args:
        start: the origin on the clock of `time.perf_counter()`; by default the process's start.
    """

    def __init__(self, start: float | None = None) -> None:
        self.start: float = process_started() if start is None else start
        self._lock = fork_safe_lock()
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
        """Record the duration of the block, also if it raises.

        Args:
            name: the phase's name.
            track: the row in which it is drawn; by default the thread's name.

        Yields:
            None.
        """
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, self.now(), track)

    def add(self, name: str, start: float, end: float | None = None, track: str | None = None) -> Span:
        """Record a span whose times are already known.

        Args:
            name: the phase's name.
            start: in seconds since `self.start`.
            end: likewise; by default now.
            track: the row in which it is drawn; by default the thread's name.

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
        _log.debug("%s: %.3f s", name, span.seconds)
        return span

    def mark(self, name: str, at: float | None = None) -> Mark:
        """Record a moment.

        Args:
            name: the event's name.
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
        """All finished spans, ordered by start."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: (span.start, span.end)))

    @property
    def marks(self) -> tuple[Mark, ...]:
        with self._lock:
            return tuple(sorted(self._marks, key=lambda mark: mark.at))

    @property
    def losses(self) -> tuple[Mark, ...]:
        """The marks of losses: the first, and those called "loss 2", "loss 3" and so on."""
        return tuple(mark for mark in self.marks if mark.name == FIRST_LOSS or mark.name.startswith("loss "))

    @property
    def first_loss(self) -> float | None:
        """Seconds from the process's start to the first loss; None if there is none yet."""
        return next((mark.at for mark in self.marks if mark.name == FIRST_LOSS), None)

    def seconds(self, name: str) -> float:
        """The duration of a phase, with overlapping spans (of several threads) counted once.

        Args:
            name: the phase's name.

        Returns:
            Seconds; 0 if there is no such span.
        """
        return _union((span.start, span.end) for span in self.spans if span.name == name)

    def table(self) -> list[PhaseRow]:
        """One row per phase.

        Returns:
            In the order of `PHASES`; other phases follow, ordered by time.
        """
        begins: dict[str, float] = {}
        for span in self.spans:
            begins.setdefault(span.name, span.start)
        return [PhaseRow(name, begins[name], self.seconds(name)) for name in _in_order(begins)]

    def to_dict(self) -> dict[str, Any]:
        """The spans and marks as plain data, for `from_dict`.

        Returns:
            A dict of lists, strings and floats.
        """
        return {"spans": [asdict(span) for span in self.spans], "marks": [asdict(mark) for mark in self.marks]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """A timeline from the data of another.

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
        other_name: str = "eager",
    ) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing: one process per timeline, one row per track.

        The file is the JSON object form of the Trace Event Format, times in microseconds.

        Args:
            path: the file's path; it is written atomically.
            name: this timeline's name in the trace.
            other: another timeline to include.
            other_name: its name in the trace.
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
        other_name: str = "eager",
        title: str | None = None,
    ) -> None:
        """Draw the phases as bars over time, `other` below on the same axis.

        Args:
            path: the file's path; it is written atomically.
            name: this timeline's name in the picture.
            other: another timeline to include.
            other_name: its name in the picture.
            title: the picture's title.

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
    """The total length covered by possibly overlapping intervals."""
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
    """The first row of the span's track in which it nests properly, as the format does not allow spans that cross."""
    number = 0
    while True:
        ends = open_ends.setdefault((span.track, number), [])
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return span.track, number
        number += 1


_current = _of_process = Timeline()


def current() -> Timeline:
    """The timeline into which all threads of the process record.

    Returns:
        That of the innermost `record`, or the process's own.
    """
    return _current


def span(name: str, track: str | None = None):
    """Record the block in the timeline that is current at its beginning.

    Args:
        name: the phase's name.
        track: the row in which it is drawn; by default the thread's name.
    """
    return _current.span(name, track)


def mark(name: str) -> Mark:
    """Record a moment in the current timeline.

    Args:
        name: the event's name.

    Returns:
        The mark.
    """
    return _current.mark(name)


def records_reads() -> bool:
    """Whether a step's reads of values are recorded. They come at each step, without end.

    Returns:
        Whether a `record` block is open.
    """
    return _current is not _of_process


@contextmanager
def record() -> Iterator[Timeline]:
    """Record the block (in all threads) into a new timeline, and restore the previous one.

    It also has the time that compiled steps wait for each value that their Python reads, with its line, which the
    process's own timeline has not.

    Yields:
        The new timeline.
    """
    global _current
    former, _current = _current, Timeline()
    try:
        yield _current
    finally:
        _current = former
