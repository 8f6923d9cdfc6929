"""Execution of a step as a transaction: it donates the old state and commits the new one, or neither.

The memory of weights and optimizer state is donated to a compiled step, which writes the new state there. From then
until every device buffer has its new array, the old state is gone and the new one has no owner. Meanwhile, signals such
as Ctrl-C are put off (`interpreter.Uninterrupted`). If the device fails, or another thread injects an exception, after
the old state has been donated, the state is lost: reading it raises a StateLostError.

Transactions run one at a time, also across threads: no thread sees a partial one.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...capture import session
from ...interpreter import Uninterrupted
from ..lazy_jax import is_array, is_imported

lock: Any = session.tracing  # held by transactions and traces: a trace must not see the gradients of a partial step


class StepRun(Protocol):
    """One execution of a compiled step."""

    def prepare(self) -> None:
        """Compile, and run what changes no state. It may be interrupted."""

    def early(self) -> Sequence[Any]:
        """After `prepare`: the outputs that decide whether the run is to be finished."""

    def finish(self) -> None:
        """Run the rest, to which the state is donated."""

    def outputs(self) -> Sequence[Sequence[Any]]:
        """The step's outputs, in groups, of which the first is the new state."""


def execute(
    run: StepRun,
    state: Sequence[Any],
    commit: Callable[[Sequence[Sequence[Any]]], None],
    lose: Callable[[BaseException], None],
    check: Callable[[], None],
) -> Sequence[Sequence[Any]]:
    """Run a step, commit it, and return its outputs. Requires `lock`.

    Args:
        state: the arrays that are donated.
        commit: stores the outputs.
        lose: called if the run fails after the old state has been donated, so that no state is left.
        check: called before that; if it raises, nothing has changed.
    """
    global _thread
    try:
        run.prepare()
        check()
        with Uninterrupted():
            _thread = threading.get_ident()
            try:
                run.finish()
                outputs = run.outputs()
            except BaseException as error:
                if any(is_array(array) and array.is_deleted() for array in state):
                    lose(error)
                raise
            else:
                commit(outputs)
                _executed(outputs)
            finally:
                _thread = None
    except BaseException as error:
        if is_imported():
            from ..mesh.peers import explain_loss

            if (explained := explain_loss(error)) is not error:
                raise explained from error
        raise
    return outputs


_thread: int | None = None  # which runs a step
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


def wait() -> None:
    """Wait for another thread's step, to which state may have been donated."""
    if _thread is not None and _thread != threading.get_ident():
        with lock:
            pass
