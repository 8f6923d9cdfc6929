"""Graceful interruption: at Ctrl-C or SIGTERM finish the step, save, and stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from ..errors import LoaderError
from ..runtime.mesh.processes import Processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CHILD = getattr(signal, "SIGCHLD", None)  # absent on Windows


class Interrupted(BaseException):
    """Raised between two steps when a signal has asked the run to stop."""


class Interrupts:
    """Context manager that defers the first signal until the block has ended; a second one takes effect at once.

    Signal handlers can be set only in Python's main thread; in other threads nothing changes. Signals that the process
    ignores, such as Ctrl-C in the background of a shell script, stay ignored.

    Args:
        promise: what is done before the signal takes effect, in words.
        processes: the processes of the run.
        step: returns the number of steps so far.
    """

    def __init__(self, promise: str, processes: Processes, step: Callable[[], int]) -> None:
        self.received: signal.Signals | None = None
        self._promise = promise
        self._processes = processes
        self._step = step
        self._process = os.getpid()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:
                    self._former[number] = handler
                    signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._restore(*_SIGNALS)
        if os.getpid() != self._process:  # a fork, such as a loader's worker, ends when its parent does;
            if number != signal.SIGINT:  # Ctrl-C reaches both, and the parent still needs the worker for this step
                signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        if _CHILD is not None and callable(signal.getsignal(_CHILD)):
            # A signal to the process group, as `timeout` and Slurm send it, ends the workers too. torch's SIGCHLD
            # handler would then raise here, at an arbitrary line; whoever waits for a worker notices anyway.
            self._former[_CHILD] = signal.signal(_CHILD, _do_nothing)
        with suppress(OSError):  # in `python train.py | tee log`, Ctrl-C has ended tee
            # Not print, which is not reentrant.
            os.write(2, f"\n{self.received.name}: {self._promise} (again: stop at once)\n".encode())

    def __exit__(self, *exception: Any) -> None:
        self._restore(*self._former)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._former:
                handler = self._former[number]  # None: not set from Python, cannot be restored
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def check(self) -> None:
        """Raise if any process has received a signal. With several processes, all of them must call this.

        Raises:
            Interrupted: if one has.
        """
        if self._processes.count > 1:
            number = self._processes.highest(self.received or 0)
            self.received = signal.Signals(number) if number else None
        if self.received is not None:
            raise Interrupted(f"{self.received.name} at step {self._step()}")

    def unless_received(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Iterate over `batches`, treating a loader whose workers were ended by the signal as interrupted, not failed.

        Raises:
            Interrupted: if the loader fails after a signal.
        """
        try:
            yield from batches
        except LoaderError:
            if self.received is None or self._processes.count > 1:
                raise
        else:
            return
        self.check()

    def obey(self) -> None:
        """Raise a received signal again: by default KeyboardInterrupt for Ctrl-C and the end of the process for
        SIGTERM.

        If that does nothing (a handler that only takes note, or another process received it), raise KeyboardInterrupt
        or
        SystemExit all the same: the code after the run must not go on.
        """
        if self.received is None:
            return
        try:
            signal.raise_signal(self.received)
        except BaseException as end:
            raise end from None  # hide the Interrupted that ended the run
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """In place of SIG_DFL, which would not discard a signal that is already pending in Python."""
