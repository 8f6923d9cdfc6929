"""The interpreter: the cores it may use, and what Firstloss changes in it temporarily, even if it is interrupted.

Garbage collection is paused, and threads switch more often. The user's code sees its own settings meanwhile, and finds
them restored.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from gc import disable, enable, isenabled  # a step being traced sees replaced ones
from typing import Any, Generic, TypeVar

from .compat.locks import fork_safe_lock
from .compat.python_names import get_handler, set_handler

T = TypeVar("T")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_handling() -> bool:
    """Whether the caller is handling an exception, which the step's Python could raise again or inspect."""
    return sys.exc_info()[0] is not None


class Undo:
    """A stack of actions that restore what a block has changed, to be entered twice: `with Undo() as undo, undo:`.

    KeyboardInterrupt may be raised between any two instructions, also between the last one of a block and the first one
    of its cleanup, which would leave the garbage collector disabled, a mode open, or a function replaced. So there are
    two nested cleanups, and if one of them is interrupted, the other does the rest. Actions may therefore run twice,
    and are registered before the change that they undo is made.
    """

    __slots__ = ("_actions",)

    def __init__(self) -> None:
        self._actions: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __call__(self, action: Callable[..., Any], *args: Any) -> None:
        """Call `action(*args)` at the end of the block, in reverse order of registration."""
        self._actions.append((action, args))

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *exception: object) -> None:
        actions = self._actions
        while actions:
            action, args = actions[-1]
            action(*args)
            actions.pop()


# -- signals, which are put off while something is changed that must not be left half done --


# Without real-time signals: a step asks for the handler of each.
_SIGNALS = [n for n in map(int, signal.valid_signals()) if n < getattr(signal, "SIGRTMIN", 1 << 30)]
_SIGNALS = [n for n in sorted(_SIGNALS) if n not in (getattr(signal, "SIGKILL", 0), getattr(signal, "SIGSTOP", 0))]


def is_raised_by_handler(error: BaseException) -> bool:
    """Whether a signal's handler in Python has raised `error`, or called what has."""
    handlers = [getattr(handler, "__func__", handler) for handler in map(get_handler, _SIGNALS) if callable(handler)]
    codes = {getattr(handler, "__code__", getattr(type(handler).__call__, "__code__", None)) for handler in handlers}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


class Uninterrupted:
    """A block during which signals that Python code handles, such as Ctrl-C, are put off until its end.

    Python runs handlers in the main thread, between any two instructions, and KeyboardInterrupt is raised there. For
    the block's duration, the handlers are replaced by one that takes notes. In other threads, and inside of another
    such block, it does nothing. Exceptions that other threads inject (`PyThreadState_SetAsyncExc`) are not put off.
    """

    __slots__ = ("_handlers", "_is_outermost", "_noted")

    _is_open = False  # in the main thread

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._is_outermost = False
        self._noted: list[tuple[Any, int, Any]] = []

    def __enter__(self) -> Uninterrupted:
        if Uninterrupted._is_open or threading.current_thread() is not threading.main_thread():
            return self
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_outermost:
            try:
                self._end()
            finally:
                self._end()  # a signal may have interrupted the first one
            self._deliver()

    def _begin(self) -> None:
        self._is_outermost = True  # also if no signal has a handler, as where Ctrl-C is ignored
        Uninterrupted._is_open = True
        for number in _SIGNALS:
            handler = get_handler(number)
            if callable(handler):
                self._handlers[number] = handler  # first: it may be interrupted
                set_handler(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._noted.append((self._handlers.get(number), number, frame))

    def _end(self) -> None:
        """Restore the handlers; that of Ctrl-C last, since it raises from then on. Idempotent."""
        for number in sorted(self._handlers, key=lambda number: number == signal.SIGINT):
            if get_handler(number) == self._note:
                set_handler(number, self._handlers[number])
        self._handlers.clear()
        Uninterrupted._is_open = False

    def _deliver(self) -> None:
        while self._noted:
            handler, number, frame = self._noted.pop(0)
            if callable(handler):
                handler(number, frame)


class _InterruptibleInside(Generic[T]):
    """A context manager whose entering and leaving are `Uninterrupted`.

    Python may handle a signal just before it runs the first line of `__exit__`, which is then not run. So blocks of
    Firstloss enter it twice, `with manager, manager:`; one of the two leaves it.
    """

    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager = manager
        self._value: list[T] = []
        self._is_left = False

    def __enter__(self) -> T:
        if self._is_left:
            raise RuntimeError("this context has ended: create another one for another block")
        try:
            with Uninterrupted():
                if not self._value:
                    self._value.append(self._manager.__enter__())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)  # for a signal that was put off
            raise
        return self._value[0]

    def __exit__(self, *exception: Any) -> bool | None:
        with Uninterrupted():
            if not self._value or self._is_left:
                return None
            self._is_left = True
            return self._manager.__exit__(*exception)


def interruptible_inside(function: Callable[..., Iterator[T]]) -> Callable[..., _InterruptibleInside[T]]:
    """As `contextlib.contextmanager`: what is before and after the `yield` is not interrupted by signals, so that
    nothing is left half changed. To be entered twice where an interrupt in between must be survived, too."""

    manager = contextmanager(function)

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> _InterruptibleInside[T]:
        return _InterruptibleInside(manager(*args, **kwargs))

    return make


# -- pauses of the garbage collector while many long-lived objects are created --


@contextmanager
def paused() -> Iterator[None]:
    """Context without garbage collection, whose objects count as old afterwards.

    A capture or a lowering creates tens of thousands of small objects, most of which live on. With torch and JAX
    imported a full collection takes 0.15 s, and would otherwise run as soon as collection is enabled again.
    """
    if not isenabled():
        yield
        return
    _begin()
    try:
        yield
    finally:
        _resume(_collect_again)


def pause(undo: Undo) -> None:
    """Disable garbage collection until `undo` runs: for blocks that may be interrupted, and free what they create.

    A call of a compiled step creates an array for each weight and frees the previous one. Counting only creations, the
    collector would run several times per step, which takes a seventh of the step's host time.
    """
    if isenabled():
        undo(_resume, enable)
        _begin()


def paused_until(undo: Undo) -> None:
    """Like `paused`, until `undo` runs."""
    if isenabled():
        undo(_resume, _collect_again)
        _begin()


_unwanted: bool | None = None  # during a pause: whether the user's code has disabled collection; else None


def is_collecting() -> bool:
    """Whether collection is enabled, or will be after the pause: the result of `gc.isenabled` for the user's code."""
    return isenabled() if _unwanted is None else not _unwanted


def set_collecting(on: bool) -> None:
    """`gc.enable` and `gc.disable` for the user's code; during a pause, they take effect after it."""
    global _unwanted
    if _unwanted is not None:
        _unwanted = not on
    elif on:
        enable()
    else:
        disable()


def _begin() -> None:
    global _unwanted
    _unwanted = False  # first: other threads may call is_collecting
    disable()


def _resume(again: Callable[[], None]) -> None:
    global _unwanted
    if not _unwanted:
        again()
    _unwanted = None


_others_freeze = False  # someone uses gc.freeze, so do not unfreeze; asking takes as long as collecting


def _collect_again() -> None:
    if not isenabled():
        _age_objects()
    enable()


def _age_objects() -> None:
    """Move all objects into the oldest generation."""
    global _others_freeze
    _others_freeze = _others_freeze or gc.get_freeze_count() > 0
    if not _others_freeze:
        gc.freeze()
        gc.unfreeze()


# -- settings that are changed while a background thread works beside the user's code --


class TemporarySetting(Generic[T]):
    """A setting of the interpreter that has another value inside of blocks, which several threads may enter at a time.

    `get` and `set` are for the user's code: it sees its own value, and what it sets inside of a block is kept.
    """

    def __init__(
        self,
        get: Callable[[], T],
        set: Callable[[T], object],
        meanwhile: Callable[[T], T],
        before_restoring: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            get: reads the interpreter's setting.
            set: sets it.
            meanwhile: returns the value inside of blocks, given the user's.
            before_restoring: called when the last block ends.
        """
        self._get = get
        self._set = set
        self._meanwhile = meanwhile
        self._before_restoring = before_restoring
        self._lock = fork_safe_lock()
        self._blocks = 0
        # During blocks, the user's value, and the other one; that is None until it is set.
        self._values: tuple[T, T | None] | None = None

    @contextmanager
    def changed(self) -> Iterator[None]:
        """A block in which the setting has the other value."""
        with self._lock:
            if not self._blocks:
                self._change(self._get())
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    if self._is_changed():
                        self._before_restoring()
                        self._set(self._values[0])  # type: ignore[index]
                    self._values = None

    def _change(self, users: T) -> None:
        self._values = (users, None)
        self._set(self._meanwhile(users))
        self._values = (users, self._get())

    def _is_changed(self) -> bool:
        """Whether a block has set the current value, and the user's code none since by Python's own function."""
        return self._values is not None and self._get() == self._values[1]

    def get(self) -> T:
        """The user's value, which is set or will be restored. Takes no lock, since each call of a step calls it."""
        while True:
            values = self._values
            now = self._get()
            if values is self._values:
                return now if values is None or values[1] is not None and now != values[1] else values[0]

    def set(self, value: T) -> None:
        """Set the user's value; inside of a block, for the time after it."""
        with self._lock:
            if self._is_changed():
                self._change(value)
            else:
                self._set(value)


# Changed: no full collections. As in `paused`, but young objects are collected, and the user's code may enable and
# disable collection meanwhile. The third number is how many collections of the middle generation precede a full one.
gc_thresholds: TemporarySetting[tuple[int, int, int]] = TemporarySetting(
    gc.get_threshold,
    lambda numbers: gc.set_threshold(*numbers),
    lambda numbers: (*numbers[:2], 1 << 30),
    _age_objects,
)

# Changed: threads switch more often. Python's default is 5 ms, 20 times as long as a chunk of a fill takes.
switch_interval: TemporarySetting[float] = TemporarySetting(
    sys.getswitchinterval, sys.setswitchinterval, lambda seconds: min(seconds, 3e-4)
)
