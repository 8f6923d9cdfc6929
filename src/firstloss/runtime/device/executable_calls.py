"""Calls of executables: interrupts lose no results, and the number in flight stays within XLA's limit."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ...compat.jax_names import ExecuteReplicated, executable_of, make_cpp_call
from ...errors import StepMemoryError
from ..jax_support import on_cpu, x64

# Calls functions and yields their results, entirely in C.
call_each = itertools.starmap
flatten = itertools.chain.from_iterable


class _ThreadLocal(threading.local):
    """State of this thread.

    Attributes:
        run: the run that is calling compiled functions, which sets this; None if there is none.
    """

    run: Any = None


this_thread = _ThreadLocal()


# XLA's CPU client runs up to 32 executions per device, and launches the 33rd in a thread that the others need to
# finish: several devices in one process would deadlock.
_MAX_IN_FLIGHT = 16


class _InFlight:
    """The executions in flight on a mesh of CPU devices, limited in number."""

    def __init__(self) -> None:
        self._arrays: collections.deque[jax.Array] = collections.deque()

    def wait(self) -> None:
        """Wait until another execution may start."""
        while len(self._arrays) >= _MAX_IN_FLIGHT:
            array = self._arrays.popleft()
            if array.is_deleted():  # donated to a later execution
                continue
            with contextlib.suppress(Exception):  # errors are raised where the result is used
                array.block_until_ready()

    def add(self, array: jax.Array) -> None:
        """Register an execution that produces `array`."""
        self._arrays.append(array)


in_flight = _InFlight()


class UninterruptibleCall:
    """A call through JAX's Python code, in a thread of its own, where signals do not interrupt it.

    From the second call on with the same argument types, a compiled function runs entirely in C++. The first call runs
    Python code of JAX, in which an interrupt would lose the results; they are stored here.
    """

    def __init__(self, number: int) -> None:
        self.number = number  # the call's number within the run
        self._decided = threading.Lock()  # never released: the first to acquire it makes the call, or cancels it
        self._done = threading.Event()
        self._outcome: tuple[Any, BaseException | None] = (None, None)

    def call(self, function: Callable[..., Any], args: tuple) -> Any:
        """Return `function(*args)`."""
        threading.Thread(target=self._work, args=(function, args), name="firstloss-dispatch").start()
        return self.result()

    def _work(self, function: Callable[..., Any], args: tuple) -> None:
        if not self._decided.acquire(blocking=False):
            return
        try:
            with x64():
                self._outcome = function(*args), None
        except BaseException as error:  # re-raised by `result`
            self._outcome = None, error
        del function, args
        self._done.set()

    def result(self) -> Any:
        """Wait for the call and return its results."""
        self._done.wait()
        results, error = self._outcome
        if error is not None:
            raise error
        return results

    def results_or_cancel(self) -> Any:
        """After an interrupt: the results as a flat list; None if the call had not started, and is now canceled."""
        if self._decided.acquire(blocking=False):
            return None
        self._done.wait()
        return self._outcome[0]


class _UninterruptibleExecute(ExecuteReplicated):
    """JAX's Python entry point of an executable, uninterruptible while a run is calling compiled functions."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return _call_uninterrupted(super().__call__, args)


def _call_uninterrupted(function: Callable[..., Any], args: tuple) -> Any:
    run = this_thread.run
    if run is None:
        return function(*args)
    run.python_call = UninterruptibleCall(run.next_call())
    return run.python_call.call(function, args)


def direct(compiled: Any) -> Callable[..., Any]:
    """A function that calls `compiled` without Python code in between; first calls are uninterruptible."""
    executable: Any = executable_of(compiled)
    execute = getattr(executable, "unsafe_call", None)
    if getattr(execute, "has_host_callbacks", False):
        return compiled  # nothing is donated
    if type(execute) is ExecuteReplicated:
        execute.__class__ = _UninterruptibleExecute
    if type(execute) is _UninterruptibleExecute and (call := make_cpp_call(compiled, executable)) is not None:
        return call
    return lambda *args: _call_uninterrupted(compiled, args)  # an unknown version of JAX


def probe_memory(executables: Iterable[Any]) -> None:
    """Check that there is memory for the executables' temporaries, before state is donated to them.

    Raises:
        StepMemoryError: if there is not. If a device ran out of memory within a step, the state would be lost.
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
