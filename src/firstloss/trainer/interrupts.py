"""Ctrl-C and SIGTERM: finish the step, save, and then stop."""

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
_CHILD = getattr(signal, "SIGCHLD", None)  # Windows has none


class Interrupted(BaseException):
    """A signal has asked for the end, and the run is between two steps."""


class Interrupts:
    """Holds back the first signal until the block has ended; the second one is obeyed at once.

    Only Python's main thread can do so; in another thread signals do what they always do. What the process ignores, as
    one in the background of a shell script ignores Ctrl-C, it goes on ignoring.

    Args:
        promise: what is done before the signal is obeyed, in words.
        processes: the processes of the run.
        step: tells how many steps have been done.
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
        if os.getpid() != self._process:  # forked during the run, as a loader's worker: it ends when its parent does,
            if number != signal.SIGINT:  # but Ctrl-C reaches them both, and the parent still needs it for this step
                signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        if _CHILD is not None and callable(signal.getsignal(_CHILD)):
            # A signal to the whole group, as `timeout` and Slurm send it, ends the workers. torch's handler would raise
            # an error of that here, wherever Python is; whoever waits for a worker finds out by itself.
            self._former[_CHILD] = signal.signal(_CHILD, _do_nothing)
        with suppress(OSError):  # of `python train.py | tee log`, Ctrl-C has ended the tee
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"\n{self.received.name}: {self._promise} (again: stop at once)\n".encode())

    def __exit__(self, *exception: Any) -> None:
        self._restore(*self._former)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._former:
                handler = self._former[number]  # None: not made by Python, and not to be had back
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def check(self) -> None:
        """End the run if any process has received a signal. With several processes, all of them have to call this.

        Raises:
            Interrupted: where one has.
        """
        if self._processes.count > 1:
            number = self._processes.highest(self.received or 0)
            self.received = signal.Signals(number) if number else None
        if self.received is not None:
            raise Interrupted(f"{self.received.name} at step {self._step()}")

    def unless_received(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Iterate over `batches`. A signal to all processes ends a loader's workers at once: no error of theirs.

        Raises:
            Interrupted: where a loader fails for that.
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
        """If a signal has come, let it do what it would have done: KeyboardInterrupt for Ctrl-C, the end for SIGTERM.

        Where it would have done nothing (a handler that only takes note, or another process got it), the end comes as
        KeyboardInterrupt or SystemExit all the same: the run is over, and what follows it must not begin.
        """
        if self.received is None:
            return
        try:
            signal.raise_signal(self.received)
        except BaseException as end:
            raise end from None  # how the run came to its end is nobody's error
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """As no handler: but a signal that has come before it was taken away would be reported."""
