"""Execute a step as a transaction: it donates the old state and commits the new one, or does neither.

The memory of weights and optimizer state is donated to a compiled step, which writes the new state there. From then
until the last device buffer has its new array, the old state is gone and the new one has no owner. Python can raise
KeyboardInterrupt, or whatever a signal handler raises, between any two instructions, there too. Therefore

- a compiled function is called and its results are stored by a single instruction (an assignment to a slice from an
  iterator written in C): either it has not been called, or its results are stored;
- the stored results tell which functions have been called, so that an interrupted step can be resumed;
- a step is the open transaction from its first donation until it is committed. The handler of an interrupt settles it:
  nothing was donated, and the state is the old one; or the step is finished, and the state is the new one. If that is
  interrupted too, the next access to a weight settles it.

Transactions run one at a time, whichever threads they are in: no thread sees half of another's.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ...capture import session
from ...compat.jax_names import ExecuteReplicated, executable_of, make_cpp_call
from ...compat.python_names import getframe
from ...errors import StateLostError, StepMemoryError
from ..jaxlib import on_cpu, x64
from ..mesh.peers import lost

called = itertools.starmap  # yields the results of calls, from C
flat = itertools.chain.from_iterable
lock = session.tracing  # held by transactions and traces: a trace must not see half a step's gradients


class Run(Protocol):
    """One execution of a compiled step."""

    def advance(self) -> None:
        """Run what has not been run yet. May be called again after an interrupt."""

    def begun(self) -> bool:
        """After an interrupt: whether state has been donated, so that the rest has to be run."""

    def outputs(self) -> Sequence[Sequence[Any]]:
        """The step's outputs, in groups, of which the first is the new state."""


class Transaction:
    """One execution of a step, and its effect on the state of weights, optimizers and gradients."""

    def __init__(
        self,
        run: Run,
        state: Sequence[Any],
        commit: Callable[[Sequence[Sequence[Any]]], None],
        lose: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            state: the arrays that are donated.
            commit: stores the outputs; may be called twice.
            lose: called if the device fails after the old state has been donated: there is no state any more.
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
        """As `execute`; if it is interrupted, the state is the one before the step or the one after it.

        (A function of its own: in Python 3.11, an exception raised in the very line of a `try` does not reach a `with`
        around it.)
        """
        try:
            return self.execute()
        except BaseException as error:
            self.settle(error)
            if (told := lost(error)) is not error:
                raise told from error
            raise

    def settle(self, error: BaseException) -> None:
        """After `error`, restore the state before the step or complete the one after it."""
        global _open
        if _open is not self:  # already committed
            return
        if self._run.begun():
            for _ in range(3):  # the error may be a signal handler's and no failure of the step
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
        elif any(isinstance(array, jax.Array) and array.is_deleted() for array in self._state):
            self._lose(error)
        _open = None


_open: Transaction | None = None
_latest: Any = None  # the smallest array of the last execution, which is running until that is ready


def _executed(outputs: Sequence[Sequence[Any]]) -> None:
    global _latest
    arrays = outputs[-1] or outputs[0][-1:] or outputs[1][-1:]
    if _latest is None:
        atexit.register(_finish)
    _latest = min(arrays, key=_size) if arrays else False


def _size(array: Any) -> int:
    return getattr(array, "size", 0)


def _finish() -> None:
    """At exit, wait for the device. Otherwise an array that somebody still holds would keep the device from shutting
    down in order, and its threads would go on in freed memory."""
    with contextlib.suppress(Exception):  # of a failed step; raised where its results are used
        jax.block_until_ready([_latest] if isinstance(_latest, jax.Array) and not _latest.is_deleted() else [])
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()


def settled() -> None:
    """Wait for another thread's transaction, and settle one that an interrupt has left open."""
    if _open is not None:
        with lock:
            if _open is not None and not _under_way():
                _open.settle(StateLostError("the step was interrupted"))


def _under_way() -> bool:
    """Whether this thread is inside a transaction, in which a finalizer, say, reads a weight."""
    frame: Any = getframe(1)
    while frame is not None:
        if frame.f_code in _EXECUTING:
            return True
        frame = frame.f_back
    return False


_EXECUTING = (Transaction.execute.__code__, Transaction.settle.__code__)


class _ThreadLocal(threading.local):
    """The run that is calling compiled functions in this thread."""

    run: Any = None


_this_thread = _ThreadLocal()


def calling(run: Any) -> None:
    """Note that `run` is about to call compiled functions in this thread; None when it is done."""
    _this_thread.run = run


# XLA's CPU client lets each device have 32 executions begun, and launches the 33rd in a thread that the others need to
# end: with several devices in a process all would wait for ever.
_MOST_BEGUN = 16


class _Begun:
    """The latest executions on a mesh of CPU devices, of which so many are under way at a time."""

    def __init__(self) -> None:
        self._arrays: collections.deque[jax.Array] = collections.deque()

    def wait(self) -> None:
        """Until another one may begin."""
        while len(self._arrays) >= _MOST_BEGUN:
            array = self._arrays.popleft()
            if array.is_deleted():  # donated to a later one, which is waited for
                continue
            with contextlib.suppress(Exception):  # raised where what it makes is needed
                array.block_until_ready()

    def add(self, array: jax.Array) -> None:
        """One has begun that makes `array`."""
        self._arrays.append(array)


begun = _Begun()


class Shield:
    """A call through JAX's Python code, in a thread of its own, where nothing interrupts it.

    From the second call on, with arguments of the same types, a compiled function runs in C++ only. The first call runs
    Python code of JAX, where an interrupt would lose the results; so they are kept here.
    """

    def __init__(self, number: int) -> None:
        self.number = number  # of the call within the run
        self._decided = threading.Lock()  # never released: the first to acquire it makes the call, or cancels it
        self._done = threading.Event()
        self._outcome: tuple[Any, BaseException | None] = (None, None)

    def call(self, function: Callable[..., Any], args: tuple) -> Any:
        """`function(*args)`."""
        threading.Thread(target=self._work, args=(function, args), name="firstloss-dispatch").start()
        return self.result()

    def _work(self, function: Callable[..., Any], args: tuple) -> None:
        if not self._decided.acquire(blocking=False):
            return
        try:
            with x64():
                self._outcome = function(*args), None
        except BaseException as error:  # raised by `result`
            self._outcome = None, error
        del function, args
        self._done.set()

    def result(self) -> Any:
        """What the call has returned; waits for that."""
        self._done.wait()
        results, error = self._outcome
        if error is not None:
            raise error
        return results

    def rescued(self) -> Any:
        """After an interrupt: the results in a flat list; None if the call has not begun, which cancels it."""
        if self._decided.acquire(blocking=False):
            return None
        self._done.wait()
        return self._outcome[0]


class _Shielded(ExecuteReplicated):
    """JAX's Python entry to an executable, shielded while a run is calling compiled functions."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return _shield(super().__call__, args)


def _shield(function: Callable[..., Any], args: tuple) -> Any:
    run = _this_thread.run
    if run is None:
        return function(*args)
    run.shield = Shield(run.next_call())
    return run.shield.call(function, args)


def direct(compiled: Any) -> Callable[..., Any]:
    """A function that calls `compiled` without Python in between; first calls are shielded."""
    executable: Any = executable_of(compiled)
    execute = getattr(executable, "unsafe_call", None)
    if getattr(execute, "has_host_callbacks", False):
        return compiled  # nothing is donated
    if type(execute) is ExecuteReplicated:
        execute.__class__ = _Shielded
    if type(execute) is _Shielded and (call := make_cpp_call(compiled, executable)) is not None:
        return call
    return lambda *args: _shield(compiled, args)  # a version of JAX that is not known


def probe_memory(executables: Iterable[Any]) -> None:
    """Check that there is memory for the temporaries of these, before state is donated to them.

    Raises:
        StepMemoryError: if there is not. When a device runs out of memory within a step, the state is gone already.
    """
    if not on_cpu():
        return
    for executable in executables:
        analysis = executable.memory_analysis()
        if analysis is None:
            continue
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        try:
            np.empty(max(needed, 0), np.uint8)
        except (MemoryError, ValueError):
            raise StepMemoryError(
                f"the step needs {needed / 2**30:.1f} GiB of memory for temporaries, which the device "
                "does not have. Nothing has been changed: call the step with a smaller batch."
            ) from None
