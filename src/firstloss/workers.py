"""Threads that work for a block of the calling thread, which signals may interrupt anywhere.

The locks of `concurrent.futures` are Python code. If a signal's handler raises in it, as that of Ctrl-C does, a lock
may stay held in the calling thread, and the workers wait for it forever. What both sides share here is C: locks, and a
queue.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from .interpreter import Uninterrupted

T = TypeVar("T")
S = TypeVar("S")

# Address space that must be left for a thread: its stack, mostly of 8 MiB, and what Python allocates at its start.
# Where these find no memory, the thread is gone, and `Thread.start` waits for it forever.
_ROOM = 24 << 20


class Task(Generic[T]):
    """A call in a worker."""

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call: tuple[Callable[..., T], tuple[Any, ...]] | None = (function, args)
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Make the call, in a worker."""
        assert self._call is not None
        (function, args), self._call = self._call, None
        try:
            self._outcome.append(function(*args))
        except BaseException as error:
            self._error = error
        finally:
            self._running.release()

    def result(self) -> T:
        """Wait for the call; returns its result, or raises its exception."""
        with self._running:
            if self._error is not None:
                raise self._error
            return self._outcome[0]


class Workers:
    """A context with threads. Its end waits for them; after an exception they begin nothing more.

    A thread ends as soon as there is nothing to do, so that none is left waiting, whatever is interrupted.
    """

    def __init__(self, count: int, name: str, initialize: Callable[[], Any] | None = None) -> None:
        """
        Args:
            count: the number of threads.
            name: begins their names.
            initialize: called in each thread first.
        """
        self._count, self._name, self._initialize = count, name, initialize
        self._tasks: deque[Task[Any]] = deque()
        self._lock = threading.Lock()  # held while `_tasks` and `_running` change together
        self._running = 0
        self._alive: list[threading.Lock] = []  # for each thread, a lock that it holds

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is not None:
                self._tasks.clear()
        finally:
            for alive in self._alive:
                with alive:
                    pass

    def submit(self, function: Callable[..., T], *args: Any) -> Task[T]:
        """Call a function in one of the threads."""
        task = Task(function, args)
        self._add([task])
        return task

    def map(self, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """The results for all items, in order."""
        tasks = [Task(function, (item,)) for item in items]
        self._add(tasks)
        return [task.result() for task in tasks]

    def _add(self, tasks: Sequence[Task[Any]]) -> None:
        """Add tasks, and start threads for them. These take no task, which may need much memory, before all have begun,
        since the lock is held."""
        with Uninterrupted(), self._lock:
            self._tasks.extend(tasks)
            for _ in range(min(self._count - self._running, len(tasks))):
                self._start()

    def _start(self) -> None:
        alive = threading.Lock()
        alive.acquire()
        try:
            mmap.mmap(-1, _ROOM).close()
        except OSError as error:
            raise MemoryError("not enough memory to start a thread") from error
        threading.Thread(target=self._work, args=(alive,), name=f"{self._name}_{len(self._alive)}").start()
        self._running += 1
        self._alive.append(alive)

    def _work(self, alive: threading.Lock) -> None:
        try:
            if self._initialize is not None:
                self._initialize()
            while (task := self._next()) is not None:
                task.run()
        finally:
            alive.release()

    def _next(self) -> Task[Any] | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._running -= 1
            return None
