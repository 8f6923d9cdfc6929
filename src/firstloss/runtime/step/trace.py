"""`firstloss.trace`: a training step, traced and compiled once, then executed."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...capture import session
from ...errors import TraceError
from ...program.graph import Program
from ...uncollected import pause, put_off
from ...undo import Undo
from ..backend import Backend, current_backend
from .arguments import Arguments, Itself, home_of
from .changes import Changes
from .modes import modes
from .shapes import Pad, Shapes


def trace(
    step: Callable[..., Any] | None = None,
    *,
    shapes: str | Pad = "recompile",
    changes: str = "recompile",
    check: bool | str = True,
) -> Callable[..., Any]:
    """Make `step` a traced step: traced and compiled at its first call, executed at every call.

    Everything that the step does to tensors, forward, backward and optimizer, becomes one executable; weights and
    optimizer state stay on the device and are updated in place. Calls return as soon as the work is under way; a
    returned tensor's value is waited for when it is read. On the "CPU" and "GPU" backends the step just runs.

    Use it as `@fl.trace`, or with options as `@fl.trace(shapes="refuse")`.

    Args:
        shapes: what to do about a batch of new shapes. "recompile": compile the step for it as well, with a
            `GraphChangeWarning`; "refuse": a `ShapeError`; `fl.Pad(...)`: pad it to a shape that is there already.
        changes: what to do when the Python values that the step reads have changed so that it would do something else.
            "recompile": that, with a `GraphChangeWarning` that names values and lines; "refuse": a `GraphChangedError`.
        check: trace again now and then (at the second call, and for less than 1% of the time after that), to find
            changes that cannot be seen from outside, which are a `GraphChangedError`. "always": the step's Python runs
            at every call, and what it does is compared with what was compiled: right by construction, and slow; for
            tests, and to find out whether a step is traced rightly.

    Called inside another traced step it is a part of that one. It may be stacked with `staticmethod` and `classmethod`
    in either order.

    Raises:
        TraceError: for options that are none of these, and for a step that cannot be called, or is a generator or a
            coroutine.
    """
    if changes not in ("recompile", "refuse"):
        raise TraceError(f"changes={changes!r}: write 'recompile' or 'refuse'.")
    if check not in (True, False, "always"):
        raise TraceError(f"check={check!r}: write True, False or 'always'.")
    if step is None:
        return lambda step: TracedStep(step, shapes, changes, check)
    return TracedStep(step, shapes, changes, check)


_MOST_FOR_CERTAIN = 32


def _is_for_certain(kind: tuple, more: tuple) -> bool:
    """Whether it is part of the key of an executable that these very arguments belong to."""
    return bool(more and more[2]) or any(type(leaf[1]) is Itself for leaf in kind)


class TracedStep:
    """A step and its executables, one for each kind of batch that it has met."""

    def __init__(
        self,
        step: Callable[..., Any],
        shapes: str | Pad = "recompile",
        changes: str = "recompile",
        check: bool | str = True,
    ) -> None:
        self._kind = type(step) if isinstance(step, (staticmethod, classmethod)) else None
        if isinstance(step, (staticmethod, classmethod)):
            step = step.__func__
        _check_step(step)
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)
        self._policy = shapes
        self._shapes = Shapes(self._name, shapes)
        self._refuse = changes == "refuse"
        self._check = check
        self._executables: dict[Any, Changes] = {}
        self._latest: Changes | None = None
        self._seen: tuple | None = None
        self._all: list[torch.nn.Parameter] = []
        # By id, what arguments are that the step meets in another way, too.
        self._shared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._read_later: dict[tuple[Changes, int], bool] = {}  # whether they read the parameters from the int-th on
        functools.update_wrapper(self, step)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """In a class, a step is a method; of a class method or a static one, what that would be."""
        if self._kind is classmethod:
            return types.MethodType(self, type(instance) if owner is None else owner)
        return self if instance is None or self._kind is staticmethod else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedStep:
        """A step of the copied function, traced anew."""
        step = copy.deepcopy(self._step, memo)
        changes = "refuse" if self._refuse else "recompile"
        return type(self)(step if self._kind is None else self._kind(step), self._policy, changes, self._check)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = current_backend()
        if not backend.is_xla or session.trace is not None:  # within another step it is a part of that one
            return self._step(*args, **kwargs)
        from .executable import Executable, Shared  # here, because it brings JAX

        arguments, kind = self._shapes.admit(args, kwargs)
        if self._shared:
            arguments.itself.update(i for i, leaf in arguments.data() if id(home_of(leaf)) in self._shared)
        while True:
            try:
                return self._run(Executable, backend, arguments, kind)
            except Shared as shared:
                for i in shared.leaves:
                    home = home_of(arguments.leaves[i])
                    self._shared[id(home)] = home
                arguments.itself.update(shared.leaves)

    def _run(self, executables: Any, backend: Backend, arguments: Arguments, kind: tuple) -> Any:
        """Find or make the executable for these arguments, and run it.

        Raises:
            Shared: if some of them have to go in as themselves.
        """
        setting = (id(backend), arguments.spec, kind, arguments.key(), modes())
        with Undo() as undo, undo:
            # Models of other threads are in reach as well, and their gradients come and go while these trace.
            with session.tracing:
                known = self._fitting(setting, self._parameters(backend))
                fits = known is not None
                if known is None:  # it may be that parameters were replaced
                    self._seen = None
                    key = setting, self._parameters(backend)
                    known = self._fitting(*key) or self._executables.setdefault(
                        key, Changes(self._name, self._refuse, self._check)
                    )
                    self._forget_some()

                def trace(around: Any, find: Any) -> Any:
                    return executables(self._step, arguments, backend, around, find)

                alike = [] if fits else [c for (other, _), c in self._executables.items() if other == setting]
                (pause if fits else put_off)(undo)
                executable = known.executable(trace, (self._step, *arguments.own(), *backend.models), alike)
                self._latest = known
            if not backend.is_e2e_execution:
                return executable.leave_unexecuted(arguments)
            # It tells the loop under way, so that that can fetch the next batch meanwhile.
            return executable(arguments)

    def _forget_some(self) -> None:
        """Of executables for certain objects, which they keep, only some are kept themselves."""
        certain = [key for key in self._executables if _is_for_certain(*key[0][2:4])]
        for key in certain[:-_MOST_FOR_CERTAIN]:
            del self._executables[key]

    def _fitting(self, setting: tuple, weights: tuple) -> Changes | None:
        """The executables of which one does what the step's Python would do now: those traced with the same weights,
        or those traced before there were models that they do not read."""
        known = self._executables.get((setting, weights))
        if known is not None and known.fits():
            return known
        for (other, fewer), changes in self._executables.items():
            count = len(fewer)
            if other == setting and count < len(weights) and weights[:count] == fewer:
                reads = self._read_later.get((changes, count))
                if reads is None:
                    reads = self._read_later[changes, count] = changes.reads(self._all[count:])
                if not reads and changes.fits():
                    return changes
        return None

    def _parameters(self, backend: Backend) -> tuple:
        """Of each parameter, whether it wants a gradient, and holds one already: a step adds to it, or starts anew.

        They are looked up when no executable fits: a parameter that is replaced is noticed as a change of its module.
        """
        if self._seen != (id(backend), len(backend.models)):
            self._seen = (id(backend), len(backend.models))
            self._all = [p for model in backend.models for p in model.parameters()]
            self._read_later = {}
        return tuple([(p.requires_grad, p.grad is not None) for p in self._all])

    def program(self) -> Program:
        """The Program executed last."""
        if self._latest is None:
            raise TraceError(f"{self._name} has not been called yet, so there is no Program.")
        return self._latest.latest().program


def _check_step(step: Any) -> None:
    if not callable(step):
        hint = " Options have names: @fl.trace(shapes=...)." if isinstance(step, str) else ""
        raise TraceError(f"trace takes a function, and not an object of type {type(step).__name__}.{hint}")
    for test, kind in (
        (inspect.isgeneratorfunction, "a generator, which runs when it is iterated over"),
        (inspect.iscoroutinefunction, "a coroutine, which runs when it is awaited"),
        (inspect.isasyncgenfunction, "a generator, which runs when it is iterated over"),
    ):
        if test(step):
            raise TraceError(
                f"{getattr(step, '__qualname__', step)} makes {kind}, so that calling it computes nothing. Trace a "
                "function that computes, and call that in it."
            )
