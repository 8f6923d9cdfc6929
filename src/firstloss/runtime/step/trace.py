"""`firstloss.trace`: a training step, traced and compiled once, then executed."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...capture import session
from ...errors import TraceError
from ...program.program import Program
from ..backend import current_backend
from .batch_shapes import Pad, Shapes
from .process_settings import refuse_watchers

if TYPE_CHECKING:
    from .cache import StepCache
    from .graphed import Trials
    from .plan import StepPlan


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
    returned tensor's value is waited for when it is read. On the "GPU" backend the first call just runs, and from the
    third on the same kernels are replayed as a CUDA graph; on the "CPU" backend the step just runs.

    Use it as `@fl.trace`, or with options as `@fl.trace(shapes="refuse")`.

    Examples:
        >>> backend = fl.backend("XLA")
        >>> with backend.device:
        ...     model = nn.Linear(8, 1)
        >>> compiled, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @fl.trace
        ... def step(x):
        ...     loss = compiled(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> losses = [step(torch.ones(4, 8)) for _ in range(3)]  # traced and compiled at the first call
        >>> losses[2].item() < losses[0].item()
        True

    Args:
        step: a function or a method of batches: tensors in lists, tuples, dicts and dataclasses, and of other values.
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

    Returns:
        A callable of the same arguments, which returns what `step` does; without `step`, the decorator.

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


_OWN = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "_kind", "_step", "_name", "_policy", "_shapes", "_refuse",
        "_check", "_trials", "_cache"}  # fmt: skip


class TracedStep:
    """A step, and its compiled steps by kind of call.

    Other attributes are the function's own: its Python may count in them, as in a function that is not traced.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        shapes: str | Pad = "recompile",
        changes: str = "recompile",
        check: bool | str = True,
    ) -> None:
        kind = type(step) if isinstance(step, (staticmethod, classmethod)) else None
        if isinstance(step, (staticmethod, classmethod)):
            step = step.__func__
        _check_step(step)
        functools.update_wrapper(self, step, updated=())
        self._kind = kind
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)
        self._policy = shapes
        self._shapes = Shapes(self._name, shapes)
        self._refuse = changes == "refuse"
        self._check = check
        self._trials: Trials | None = None  # of these on a backend that replays
        self._cache: StepCache | None = None  # of the compiled steps, once there is one

    def __getattr__(self, name: str) -> Any:
        """An attribute of the function: `step.calls`."""
        step = self.__dict__.get("_step")
        if step is None:  # nothing has been set yet
            raise AttributeError(name)
        return getattr(step, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._step, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._step, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """In a class, a step is a method; of a class method or a static one, what that would be."""
        if self._kind is classmethod:
            return types.MethodType(self, type(instance) if owner is None else owner)
        return self if instance is None or self._kind is staticmethod else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedStep:
        """A step of the copied function, retraced."""
        step = copy.deepcopy(self._step, memo)
        changes = "refuse" if self._refuse else "recompile"
        return type(self)(step if self._kind is None else self._kind(step), self._policy, changes, self._check)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = current_backend()
        if session.trace is not None or not (backend.is_xla or backend.replays):
            return self._step(*args, **kwargs)  # within another step it is a part of that one
        refuse_watchers(self._name)
        if self._cache is None:
            from .cache import StepCache

            with session.tracing:  # another thread may call it first, too
                if self._cache is None:
                    self._cache = StepCache(self._name, self._refuse, self._check)
        if backend.replays:
            from .graphed import Trials

            self._trials = self._trials or Trials(self._name, self._cache)
            given = Shapes(self._name, "recompile").admit(args, kwargs)
            return self._trials.call(self._step, args, kwargs, given, backend)
        arguments, kind = self._shapes.admit(args, kwargs)
        return self._cache.call(self._step, arguments, kind, backend)

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """What a call with these arguments would take on each device of the backend's mesh: memory, what is sent, and
        floating-point operations. It is traced and cut as for a call; nothing is compiled, made or executed, and
        Python is left as it was. For a mesh that is not there make the backend with a `jax.sharding.AbstractMesh` and
        `validate_only=True`.

        Returns:
            The plan; printed, a table.

        Raises:
            BackendError: if the current backend does not compile.
            TraceError: if the step cannot be traced.
        """
        from .planning import plan_step

        arguments, _ = Shapes(self._name, "recompile").admit(args, kwargs)
        return plan_step(self._step, arguments, current_backend())

    def how(self) -> str:
        """How the "GPU" backend has run the last call: "graph", "replay" without one, or "eager" and why."""
        return self._trials.how() if self._trials is not None else "eager"

    def program(self) -> Program:
        """The last Program that was executed."""
        latest = None if self._cache is None else self._cache.latest
        if latest is None:
            raise TraceError(f"{self._name} has not been called yet, so there is no Program.")
        return latest.traced.program


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
