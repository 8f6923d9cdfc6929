"""A step on its way: from handing over the old state to keeping the new one, all of it or nothing.

A compiled step is given the memory of the weights and of the optimizer's state, and writes the new ones there. Between
that and the moment when the last device buffer knows its new array, the old state is gone and the new one has no owner.
Python raises KeyboardInterrupt, or whatever a signal's handler raises, between any two of its instructions, there too.
So

- a compiled function is called and its results are stored within one instruction (the assignment to a slice of what an
  iterator written in C gives): either it has not been called, or its results are there;
- what has been called can be told from what is stored, so that an interrupted step can be gone on with;
- a step that begins to hand over state is the open one until it is committed. Who is interrupted meanwhile puts it in
  order: nothing has been handed over, and the state is as it was; or the step is finished, and the state is the new
  one. Should that be interrupted as well, whoever next looks at a weight does it.

Steps hand over state one at a time, in whatever thread they are called: no thread sees half of another's.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ...capture import session
from ...compat.jax_names import ExecuteReplicated, cpp_call_of, executable_of, make_cpp_call
from ...compat.python_names import getframe
from ...errors import StateLostError, StepMemoryError
from ..jaxlib import on_cpu, x64

called = itertools.starmap  # gives the results of calls, from C
flat = itertools.chain.from_iterable
lock = session.tracing  # of whoever hands over state, or traces: a trace sees no gradients of half a step


class Run(Protocol):
    """One execution of a compiled step."""

    def advance(self) -> None:
        """Do what has not been done yet. May be called again after an interrupt."""

    def begun(self) -> bool:
        """After an interrupt: whether state has been handed over, so that what is left has to be done."""

    def outputs(self) -> Sequence[Sequence[Any]]:
        """The step's outputs, in groups, of which the first is the new state."""


class Transaction:
    """One execution of a step, with what follows from it for the state of weights, optimizers and gradients."""

    def __init__(
        self,
        run: Run,
        state: Sequence[Any],
        commit: Callable[[Sequence[Sequence[Any]]], None],
        lose: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            state: the arrays that are handed over.
            commit: keeps the outputs; may be called twice.
            lose: called if the device has failed when it had been given the old state: there is none any more.
        """
        self._run = run
        self._state = state
        self._commit = commit
        self._lose = lose

    def execute(self) -> Sequence[Sequence[Any]]:
        """Run the step and commit it; the outputs. To be called under `lock`."""
        global _open
        _open = self
        self._run.advance()
        outputs = self._run.outputs()
        self._commit(outputs)
        _open = None
        _executed(outputs)
        return outputs

    def execute_or_settle(self) -> Sequence[Sequence[Any]]:
        """As `execute`; whatever interrupts it, the state is that before the step or after it.

        (A function of its own: an exception that is raised in the very line of a `try` is in no `with` around it, as
        Python 3.11 compiles that.)
        """
        try:
            return self.execute()
        except BaseException as error:
            self.settle(error)
            raise

    def settle(self, error: BaseException) -> None:
        """After `error`, leave the state before the step or after it."""
        global _open
        if _open is not self:  # it has been committed
            return
        if self._run.begun():
            for _ in range(3):  # what was raised may have come from outside: a signal's handler raises what it likes
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
_latest: Any = None  # of what the last execution makes, the smallest array: as long as it is not there, that runs


def _executed(outputs: Sequence[Sequence[Any]]) -> None:
    global _latest
    arrays = outputs[-1] or outputs[0][-1:] or outputs[1][-1:]
    if _latest is None:
        atexit.register(_finish)
    _latest = min(arrays, key=_size) if arrays else False


def _size(array: Any) -> int:
    return getattr(array, "size", 0)


def _finish() -> None:
    """At the end of the process: what the device computes is waited for. Whoever holds an array then keeps the device
    from being taken down in order, and its threads would run on in memory that is gone."""
    with contextlib.suppress(Exception):  # of a step that failed: it was raised where its results are needed, or nobody
        jax.block_until_ready([_latest] if isinstance(_latest, jax.Array) and not _latest.is_deleted() else [])
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()


def settled() -> None:
    """Wait for another thread's step that hands over state, and finish what an interrupt has left unfinished."""
    if _open is not None:
        with lock:
            if _open is not None and not _under_way():
                _open.settle(StateLostError("the step was interrupted"))


def _under_way() -> bool:
    """Whether this thread is executing a step, in whose middle something (a finalizer) asks for a weight."""
    frame: Any = getframe(1)
    while frame is not None:
        if frame.f_code in _EXECUTING:
            return True
        frame = frame.f_back
    return False


_EXECUTING = (Transaction.execute.__code__, Transaction.settle.__code__)


class _Mine(threading.local):
    """Of this thread: the run that is calling compiled functions."""

    run: Any = None


_mine = _Mine()


def calling(run: Any) -> None:
    """`run` is about to call compiled functions in this thread; None: that is over."""
    _mine.run = run


class Shield:
    """A call that goes through JAX's Python, in a thread of its own, in which nothing interrupts it.

    From the second call on with the same kinds of arguments a compiled function is all C++. The first one goes through
    Python of JAX's, where an interrupt would lose the results on their way; so they are kept here.
    """

    def __init__(self, turn: int, in_tree: bool) -> None:
        self.turn = turn  # which of the run's calls it is
        self.in_tree = in_tree  # whether it returns what the function does, and not a flat list of that
        self._claim = threading.Lock()  # whoever has it first decides: the call is made, or it is not
        self._done = threading.Event()
        self._outcome: tuple[Any, BaseException | None] = (None, None)

    def call(self, function: Callable[..., Any], args: tuple) -> Any:
        """`function(*args)`."""
        threading.Thread(target=self._work, args=(function, args), name="firstloss-dispatch").start()
        return self.result()

    def _work(self, function: Callable[..., Any], args: tuple) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            with x64():
                self._outcome = function(*args), None
        except BaseException as error:  # raised where it is waited for
            self._outcome = None, error
        del function, args
        self._done.set()

    def result(self) -> Any:
        """What the call has returned; waits for it."""
        self._done.wait()
        results, error = self._outcome
        if error is not None:
            raise error
        return results

    def rescued(self) -> Any:
        """After an interrupt: the results, in a flat list; None if the call was not made, and will not be."""
        if self._claim.acquire(blocking=False):
            return None
        self._done.wait()
        return self._outcome[0]


class _Shielded(ExecuteReplicated):
    """What JAX calls the device by from its Python, shielded where a run is under way."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return _shield(super().__call__, args, in_tree=False)


def _shield(function: Callable[..., Any], args: tuple, in_tree: bool) -> Any:
    run = _mine.run
    if run is None:
        return function(*args)
    run.shield = Shield(run.turn(), in_tree)
    return run.shield.call(function, args)


def direct(compiled: Any) -> Callable[..., Any]:
    """What calls `compiled` without Python in between, but for first calls, which are shielded."""
    executable: Any = executable_of(compiled)
    execute = getattr(executable, "unsafe_call", None)
    if getattr(execute, "has_host_callbacks", False):
        return compiled  # it does not donate anything
    if type(execute) is ExecuteReplicated:
        execute.__class__ = _Shielded
    if type(execute) is _Shielded and (call := make_cpp_call(compiled, executable)) is not None:
        return call
    return lambda *args: _shield(compiled, args, in_tree=True)  # another JAX than we know


class WholeRun:
    """An execution of a step in one piece."""

    def __init__(self, compiled: Any, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> None:
        self._compiled = compiled
        self._function = cpp_call_of(compiled) or direct(compiled)
        self._args: tuple = (state, rest, seed)
        self._returned: list[Any] = []
        self.shield: Shield | None = None

    def turn(self) -> int:
        """Which call is next: there is one."""
        return 0

    def advance(self) -> None:
        """Call it, if it has not been called."""
        if not self._returned:
            calling(self)
            self._returned[:] = called(self._function, (self._args,))
            calling(None)

    def begun(self) -> bool:
        """Whether it has been called."""
        if not self._returned and self.shield is not None:
            results = self.shield.rescued()
            if results is not None:
                tree = self._compiled.out_tree
                self._returned[:] = (results if self.shield.in_tree else jax.tree.unflatten(tree, results),)
        return bool(self._returned)

    def outputs(self) -> Sequence[Sequence[Any]]:
        """What it has returned."""
        return self._returned[0]


def begin(compiled: Any, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> Any:
    """An execution of a compiled step, to be begun by its `advance`."""
    begin = getattr(compiled, "begin", None)
    return WholeRun(compiled, state, rest, seed) if begin is None else begin(state, rest, seed)


def probe_memory(executables: Iterable[Any]) -> None:
    """Make sure that there is memory for what these make on the way, before they are given the old state.

    Raises:
        StepMemoryError: if there is not. A device that runs out of it within a step has taken the old state already.
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
                f"the step needs {needed / 2**30:.1f} GiB of memory for what it computes on the way, and the device "
                "does not have them. Nothing has been changed: call it with a smaller batch."
            ) from None
