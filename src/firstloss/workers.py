"""Threads that work for a block of the calling thread, which signals may interrupt anywhere.

The locks of `concurrent.futures` are Python code. If a signal's handler raises in it, as that of Ctrl-C does, a lock
may stay held in the calling thread, and the workers wait for it forever. What both sides share here is C: a queue, and
a lock for each task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from .interpreter import Uninterrupted

T = TypeVar("T")
S = TypeVar("S")


class Task(Generic[T]):
    """A call in a worker."""

    def __init__(self, function: Callable[..., T], args: tuple) -> None:
        self._call: tuple[Callable[..., T], tuple] | None = (function, args)
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
    """A context with threads. Its end waits for them; after an exception they begin nothing more."""

    def __init__(self, count: int, name: str, initialize: Callable[[], Any] | None = None) -> None:
        """
        Args:
            count: the number of threads.
            name: begins their names.
            initialize: called in each thread first.
        """
        self._count, self._name, self._initialize = count, name, initialize
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._alive: list[threading.Lock] = []

    def __enter__(self) -> Workers:
        try:
            with Uninterrupted():
                for number in range(self._count):
                    alive = threading.Lock()
                    alive.acquire()
                    threading.Thread(target=self._work, args=(alive,), name=f"{self._name}_{number}").start()
                    self._alive.append(alive)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is not None:
                self._drop()
        finally:
            self._end()

    def submit(self, function: Callable[..., T], *args: Any) -> Task[T]:
        """Call a function in one of the threads."""
        task = Task(function, args)
        self._tasks.put(task)
        return task

    def map(self, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """The results for all items, in order."""
        return [task.result() for task in [self.submit(function, item) for item in items]]

    def _work(self, alive: threading.Lock) -> None:
        try:
            if self._initialize is not None:
                self._initialize()
            while (task := self._tasks.get()) is not None:
                task.run()
        finally:
            alive.release()

    def _drop(self) -> None:
        while True:
            try:
                self._tasks.get_nowait()
            except Empty:
                return

    def _end(self) -> None:
        for _ in self._alive:
            self._tasks.put(None)
        for alive in self._alive:
            with alive:
                pass
