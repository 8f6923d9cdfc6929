"""`firstloss.trace`: training steps that are traced and compiled once, then executed."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from ...capture import session
from ...errors import TraceError
from ...program.program import Program
from ..backend import current_backend
from .process_settings import refuse_watchers
from .shapes import Pad, Shapes

if TYPE_CHECKING:
    from ..lowered import LoweredStep
    from .cache import StepCache
    from .graphed import Trials
    from .plan import StepPlan

P = ParamSpec("P")
R = TypeVar("R")


@overload
def trace(
    step: Callable[P, R],
    *,
    shapes: str | Pad = "recompile",
    changes: str = "recompile",
    check: bool | str = True,
    reads: str = "run",
) -> TracedStep[P, R]: ...


@overload
def trace(
    step: None = None,
    *,
    shapes: str | Pad = "recompile",
    changes: str = "recompile",
    check: bool | str = True,
    reads: str = "run",
) -> Callable[[Callable[P, R]], TracedStep[P, R]]: ...


def trace(
    step: Callable[..., Any] | None = None,
    *,
    shapes: str | Pad = "recompile",
    changes: str = "recompile",
    check: bool | str = True,
    reads: str = "run",
) -> Callable[..., Any]:
    """Make `step` a traced step: traced and compiled at its first call, executed at every call.

    All tensor operations of the step, forward, backward and optimizer, become one executable; weights and optimizer
    state stay on the device and are updated in place. Calls are asynchronous; reading a returned tensor waits for its
    value. On the "GPU" backend the first call runs eagerly, and from the third on the same kernels are replayed as a
    CUDA graph; on the "CPU" backend the step runs eagerly.

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
        step: a function or method of batches, which are tensors in lists, tuples, dicts and dataclasses, and other
            values.
        shapes: how to handle a batch of new shapes. "recompile": compile the step for it as well, with a
            `GraphChangeWarning`; if that was in vain for five, as shapes are others at each call, run its Python for
            more, and compile it when they come again; "refuse": raise a `ShapeError`; `fl.Pad(...)`: pad it to a
            known shape.
        changes: how to handle changes of Python values that the step reads, if it would behave differently.
            "recompile": recompile it, with a `GraphChangeWarning` that names values and lines; "refuse": raise a
            `GraphChangedError`.
        check: trace again occasionally (at the second call, and for less than 1% of the time after that), to detect
            changes that cannot be seen from outside, which are a `GraphChangedError`. "always": run the step's Python
            code at every call, and compare it with what was compiled: always right, but slow; for tests, and to check
            whether a step is traced correctly.
        reads: how to handle a step whose Python reads a value that it has computed. "run": numbers that it keeps,
            computes with or branches on (`loss.item()`, `if loss.isnan():`) are compiled; with other values (`x[mask]`,
            `loss.tolist()`), and if it does something else that cannot be compiled, its Python runs at each call, by
            PyTorch's kernels, with an `EagerStepWarning` that names the line. "refuse": raise a `ValueReadError`, or
            another `TraceError`.

    A call inside another traced step becomes part of that step. It can be combined with `staticmethod` and
    `classmethod` in either order.

    Returns:
        A callable with the arguments and results of `step`; without `step`, the decorator.

    Raises:
        TraceError: for invalid options, and if `step` is not callable, or a generator or a coroutine.
    """
    if changes not in ("recompile", "refuse"):
        raise TraceError(f"changes={changes!r}: write 'recompile' or 'refuse'.")
    if check not in (True, False, "always"):
        raise TraceError(f"check={check!r}: write True, False or 'always'.")
    if reads not in ("run", "refuse"):
        raise TraceError(f"reads={reads!r}: write 'run' or 'refuse'.")
    if step is None:
        return lambda step: TracedStep(step, shapes, changes, check, reads)
    return TracedStep(step, shapes, changes, check, reads)


_OWN = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "_kind", "_step", "_name", "_policy", "_shapes", "_refuse",
        "_check", "_reads", "_trials", "_cache"}  # fmt: skip


class TracedStep(Generic[P, R]):
    """A step, and its compiled steps by kind of call.

    Other attributes are those of the function, whose Python code may use them as if it were not traced.
    """

    def __init__(
        self,
        step: Callable[P, R],
        shapes: str | Pad = "recompile",
        changes: str = "recompile",
        check: bool | str = True,
        reads: str = "run",
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
        self._shapes = Shapes(self._name, shapes, _positional_parameters(step))
        self._refuse = changes == "refuse"
        self._check = check
        self._reads = reads
        self._trials: Trials | None = None  # on a backend that replays
        self._cache: StepCache | None = None  # on a backend that compiles

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of the function: `step.calls`."""
        step = self.__dict__.get("_step")
        if step is None:  # during construction
            raise AttributeError(name)
        return getattr(step, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._step, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._step, name)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> TracedStep[P, R]: ...

    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[..., R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a step in a class like a method, a class method or a static method."""
        if self._kind is classmethod:
            return types.MethodType(self, type(instance) if owner is None else owner)
        return self if instance is None or self._kind is staticmethod else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedStep[P, R]:
        """Copy the function; the copy is retraced."""
        step = copy.deepcopy(self._step, memo)
        changes = "refuse" if self._refuse else "recompile"
        return type(self)(
            step if self._kind is None else self._kind(step), self._policy, changes, self._check, self._reads
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        backend = current_backend()
        if session.trace is not None or not (backend.is_xla or backend.replays):
            return self._step(*args, **kwargs)  # part of the enclosing step
        if self._cache is None:
            from .cache import StepCache

            with session.tracing:  # other threads may make the first call, too
                if self._cache is None:
                    self._cache = StepCache(self._name, self._refuse, self._check, self._reads == "run")
        self._cache.prepare((args, kwargs))
        try:
            refuse_watchers(self._name)
            arguments, kind = self._shapes.admit(args, kwargs)
        except TraceError as error:
            return self._cache.run_untraced(error, self._step, args, kwargs)
        if backend.replays:
            from .graphed import Trials

            self._trials = self._trials or Trials(self._name, self._cache)
            return self._trials.call(self._step, args, kwargs, (arguments, kind), backend)
        return self._cache.call(self._step, arguments, kind, backend)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> StepPlan:
        """Estimate the resources of a call on each device of the backend's mesh: memory, communication and
        floating-point operations.

        The step is traced and cut as for a call; nothing is compiled, materialized or executed, and Python is left
        unchanged. For devices that do not exist, create the backend with a `jax.sharding.AbstractMesh` and
        `validate_only=True`.

        Returns:
            The plan, which prints as a table.

        Raises:
            BackendError: if the current backend does not compile.
            TraceError: if the step cannot be traced.
        """
        from .planning import plan_step

        arguments, _ = Shapes(self._name, "recompile").admit(args, kwargs)
        return plan_step(self._step, arguments, current_backend())

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> LoweredStep:
        """Lower a call, without making it: the whole step, with its update, as one Program and one StableHLO module.

        Python, weights and optimizers are left unchanged.

        Returns:
            The lowered step: its `program`, `as_text()`, `plan()`, `compile()`, and `save(path)` for JAX alone.

        Raises:
            BackendError: if the current backend does not compile.
            TraceError: if the step cannot be traced, or reads values.
        """
        from ..lowered import LoweredStep

        arguments, _ = Shapes(self._name, "recompile").admit(args, kwargs)
        return LoweredStep(self._name, self._step, arguments, current_backend())

    def how(self) -> str:
        """How the "GPU" backend ran the last call: "graph", "replay" without a graph, or "eager" and why."""
        return self._trials.how() if self._trials is not None else "eager"

    def program(self) -> Program:
        """The last Program that was executed."""
        latest = None if self._cache is None else self._cache.latest
        if latest is None:
            raise TraceError(f"{self._name} has not been called yet, so there is no Program.")
        return latest.traced.program


def _positional_parameters(step: Callable[..., Any]) -> list[str]:
    """The names of the parameters that take positional arguments, in order."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of some functions in C
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _check_step(step: Any) -> None:
    if not callable(step):
        hint = " Options are keywords: @fl.trace(shapes=...)." if isinstance(step, str) else ""
        raise TraceError(f"trace takes a function, not an object of type {type(step).__name__}.{hint}")
    for test, kind in (
        (inspect.isgeneratorfunction, "a generator, which runs when it is iterated over"),
        (inspect.iscoroutinefunction, "a coroutine, which runs when it is awaited"),
        (inspect.isasyncgenfunction, "a generator, which runs when it is iterated over"),
    ):
        if test(step):
            raise TraceError(
                f"{getattr(step, '__qualname__', step)} makes {kind}, so calling it computes nothing. Trace a function "
                "that computes, and call that in it."
            )
