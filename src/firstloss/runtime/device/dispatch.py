"""Execution of a step as a transaction: it donates the old state and commits the new one, or neither.

The memory of weights and optimizer state is donated to a compiled step, which writes the new state there. From then
until every device buffer has its new array, the old state is gone and the new one has no owner. KeyboardInterrupt, or
whatever a signal handler raises, may be raised between any two instructions, there too. Therefore

- a compiled function is called and its results are stored by a single instruction (a slice assignment from an iterator
  written in C): either it has not been called, or its results are stored;
- the stored results tell which functions have been called, so that an interrupted step can be resumed;
- a step is the open transaction from its first donation until it is committed. On an interrupt it is settled: if
  nothing was donated, the state is the old one; otherwise the step is finished, and the state is the new one. If that
  is interrupted too, the next access to a weight settles it.

Transactions run one at a time, also across threads: no thread sees a partial one.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...capture import session
from ...compat.python_names import getframe
from ...errors import StateLostError
from ..lazy_jax import is_array, is_imported

lock = session.tracing  # held by transactions and traces: a trace must not see the gradients of a partial step


class StepRun(Protocol):
    """One execution of a compiled step."""

    def advance(self) -> None:
        """Run what has not run yet. May be called again after an interrupt."""

    def has_donated(self) -> bool:
        """After an interrupt: whether state has been donated, so that the step must be finished."""

    def outputs(self) -> Sequence[Sequence[Any]]:
        """The step's outputs, in groups, of which the first is the new state."""


class Transaction:
    """One execution of a step, including its effect on weights, optimizer state and gradients."""

    def __init__(
        self,
        run: StepRun,
        state: Sequence[Any],
        commit: Callable[[Sequence[Sequence[Any]]], None],
        lose: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            state: the arrays that are donated.
            commit: stores the outputs; may be called twice.
            lose: called if the device fails after the old state has been donated, so that no state is left.
        """
        self._run = run
        self._state = state
        self._commit = commit
        self._lose = lose

    def execute(self) -> Sequence[Sequence[Any]]:
        """Run the step, commit it, and return its outputs. Requires `lock`."""
        global _open
        _open = self
        self._run.advance()
        outputs = self._run.outputs()
        self._commit(outputs)
        _open = None
        _executed(outputs)
        return outputs

    def execute_or_settle(self) -> Sequence[Sequence[Any]]:
        """Like `execute`; if it is interrupted, the state is the one before the step or the one after it.

        (A separate function: in Python 3.11, an exception raised on the line of a `try` does not reach an enclosing
        `with`.)
        """
        try:
            return self.execute()
        except BaseException as error:
            self.settle(error)
            if is_imported():
                from ..mesh.peers import explain_loss

                if (explained := explain_loss(error)) is not error:
                    raise explained from error
            raise

    def settle(self, error: BaseException) -> None:
        """After `error`, restore the state before the step or complete the step."""
        global _open
        if _open is not self:  # already committed
            return
        if self._run.has_donated():
            for _ in range(3):  # the error may come from a signal handler rather than the step
                try:
                    self._run.advance()
                    break
                except Exception as failure:
                    error = failure
            else:
                self._lose(error)
                _open = None
                return
            self._commit(self._run.outputs())
        elif any(is_array(array) and array.is_deleted() for array in self._state):
            self._lose(error)
        _open = None


_open: Transaction | None = None
_latest: Any = None  # the smallest array of the last execution, to wait for
_finish_registered = False


def _executed(outputs: Sequence[Sequence[Any]]) -> None:
    global _latest
    arrays = outputs[-1] or outputs[0][-1:] or outputs[1][-1:]
    if is_imported():
        finish_at_exit()
    _latest = min(arrays, key=_size) if arrays else False


def finish_at_exit() -> None:
    """Wait for the device at exit. Call this once JAX is imported, so that it runs before JAX's own exit handlers."""
    global _finish_registered
    if not _finish_registered:
        _finish_registered = True
        atexit.register(_finish)


def _size(array: Any) -> int:
    return getattr(array, "size", 0)


def _finish() -> None:
    """At exit, wait for the device. Otherwise a live array could keep the device from shutting down in order, and its
    threads would go on in freed memory."""
    import jax

    with contextlib.suppress(Exception):  # a failed step raises where its results are used
        jax.block_until_ready([_latest] if is_array(_latest) and not _latest.is_deleted() else [])
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()


def settled() -> None:
    """Wait for another thread's transaction, and settle one that an interrupt left open."""
    if _open is not None:
        with lock:
            if _open is not None and not _in_progress():
                _open.settle(StateLostError("the step was interrupted"))


def _in_progress() -> bool:
    """Whether this thread is inside a transaction (for example, in a finalizer that reads a weight)."""
    frame: Any = getframe(1)
    while frame is not None:
        if frame.f_code in _EXECUTING:
            return True
        frame = frame.f_back
    return False


_EXECUTING = (Transaction.execute.__code__, Transaction.settle.__code__)
