"""Ctrl-C and SIGTERM: finish the step, save, and only then obey."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from ..runtime.processes import Processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Holds back the first signal until the block has ended; the second one is obeyed at once.

    Only Python's main thread can do so; in another thread signals do what they always do.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\n{self.received.name}: saving after this step (again: stop at once)\n".encode())

    def __exit__(self, *exception: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._former.clear()

    def received_by_any(self, processes: Processes) -> signal.Signals | None:
        """The signal that has come; with several processes all of them have to ask, and all get the answer."""
        if processes.count > 1:
            number = processes.highest(self.received or 0)
            self.received = signal.Signals(number) if number else None
        return self.received

    def obey(self) -> None:
        """Let the signal do what it would have done: KeyboardInterrupt for Ctrl-C, the end for SIGTERM."""
        if self.received is not None:
            signal.raise_signal(self.received)
