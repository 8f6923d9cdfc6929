"""The loop over steps: the current step, and closures that wait for its values.

Steps are dispatched asynchronously: while the device runs one, Python continues with the next. Functions that need
values (step closures) wait in a queue, and run in order in the user's thread as soon as the values are available; at
the latest when Python is `AHEAD` steps further, which also bounds the batches and results that wait on the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# By how many steps Python may run ahead of the values it has read. One is enough to keep a device busy whose steps take
# longer than Python's; two allow for a slow batch or closure.
AHEAD = 2


class Waiting(NamedTuple):
    """A function to run when `arrays` are computed: a closure, or nothing (for a step that is only waited for)."""

    step: int
    arrays: tuple[Any, ...]
    run: Callable[[], None] | None


class Loop:
    """The steps of a `DataExecutor`'s loop.

    Attributes:
        owner: the executor.
        latest: the current step of the loop's body.
        passed: the dicts and lists with which closures were called that have not run.
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner: Any = owner
        self.passed: list[Any] = []
        self.latest: int = 0  # the current step of the loop's body
        self._closing: int | None = None
        self._waiting: deque[Waiting] = deque()
        self.prefetch: Callable[[], None] = lambda: None  # called while the device is busy

    @property
    def step(self) -> int:
        """The step's number, from 1; inside a closure, that of the step that the closure belongs to."""
        return self.latest if self._closing is None else self._closing

    def begin(self, step: int) -> None:
        """Start the `step`-th iteration of the loop's body."""
        self.latest = step
        self._run_until(step - AHEAD)

    def dispatched(self, results: Iterable[Any]) -> None:
        """Note that a traced step has been dispatched, which will return `results` (arrays)."""
        arrays = tuple(results)
        if arrays:
            self._waiting.append(Waiting(self.latest, arrays[:1], None))
        self.prefetch()
        self._run_until(self.latest - AHEAD)

    def when_ready(self, arrays: Iterable[Any], run: Callable[[], None]) -> None:
        """Call `run` when `arrays` have values, after everything queued before."""
        self._waiting.append(Waiting(self.latest, tuple(arrays), run))
        self._run_until(self.latest - AHEAD)

    def detach(self) -> None:
        """Drop the references to the executor, which refers to this loop: its loader's workers are not to wait for the
        garbage collector."""
        self.owner, self.prefetch = None, lambda: None

    def flush(self) -> None:
        """Wait for all steps, and run what waits for them."""
        self._run_until(self.latest)

    def _run_until(self, step: int) -> None:
        """Run what is ready; wait for what belongs to `step` or an earlier one."""
        if self._closing is not None:  # called from a closure that runs steps itself
            return
        while self._waiting:
            first = self._waiting[0]
            if first.step > step and not all(_ready(a) for a in first.arrays):
                return
            self._waiting.popleft()
            if first.run is None:
                for array in first.arrays:
                    array.block_until_ready()
                continue
            self._closing = first.step
            try:
                first.run()
            finally:
                self._closing = None


def _ready(array: Any) -> bool:
    return array.is_deleted() or array.is_ready()


class _Running(threading.local):
    """The loops running in a thread, the innermost last."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []


_running = _Running()
under_way: list[Loop] = []  # in all threads


def current() -> Loop | None:
    """The innermost loop running in this thread."""
    loops = _running.loops
    return loops[-1] if loops else None


@contextmanager
def running(loop: Loop) -> Iterator[Loop]:
    """Make `loop` the current one; when the block ends without an error, everything that waits has run."""
    outer = current()
    if outer is not None:
        outer.flush()  # for a validation within training, report training first
    _running.loops.append(loop)
    under_way.append(loop)
    try:
        yield loop
    finally:
        # Also when the body raises or breaks: steps that ran have closures, which come before what follows.
        try:
            loop.flush()
        finally:
            _running.loops.remove(loop)
            under_way.remove(loop)
            loop.detach()
