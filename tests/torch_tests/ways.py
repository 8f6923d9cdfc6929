"""The modes in which one of PyTorch's own tests is run: unchanged, and on the backend.

The tests are not edited. What a user would write differently for the backend is patched into PyTorch's classes for the
duration of one test:

- `eager`: unchanged.
- `backend`: under `with backend.device` (`lazy_initialization = False`), so that weights are on the backend from their
  constructor on; a model is compiled for the backend when the test calls it, and weights that a test passes to an
  optimizer without a model become those of a small model. All else (hooks, `state_dict`, copies, pickles, backward
  passes, optimizer steps) is done by the test, as between steps.
- `steps`: as `backend`, and each `optimizer.step()` is a traced step. `optimizer.step(closure)` is replaced as the docs
  say: by a step that calls the closure and then `optimizer.step()`.
- `whole`: the test is one traced step, from its first line to its last, which is called twice; or once, if eager
  PyTorch does not pass it twice. Comparisons of tensors are made after the step has run, by `fl.step_closure`.
"""

from __future__ import annotations

import contextlib
import functools
import unittest
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import firstloss as fl
from firstloss.capture import session
from firstloss.capture.tensor import DeferredTensor

WAYS = ("eager", "backend", "steps", "whole")

Trail = list[tuple[str, list[torch.Tensor]]]  # computed so far, in order: by what, and the values


@contextlib.contextmanager
def client(way: str, artifacts: str) -> Iterator[Trail]:
    """Run the block in this mode; yields the list of values that models and optimizers compute in it."""
    trail: Trail = []
    backend = fl.backend("CPU") if way == "eager" else fl.backend("XLA", artifact_dir=artifacts)
    with contextlib.ExitStack() as stack:
        if way in ("backend", "steps"):
            backend.device.config.lazy_initialization = False
            stack.enter_context(backend.device)
        if way != "whole":
            stack.enter_context(_defined_memory())
            stack.enter_context(_models(backend, trail))
            stack.enter_context(_optimizers(backend, trail, traced=way == "steps"))
        yield trail


def run(test: unittest.TestCase, way: str, result: unittest.TestResult, times: int = 1) -> None:
    """Run one test in this mode, within `client`; its method `times` times, between one `setUp` and one `tearDown`."""
    name = test._testMethodName
    method = getattr(test, name)

    @functools.wraps(method)
    def repeated() -> None:
        step = fl.trace(lambda: method()) if way == "whole" else method
        with _later(type(test)) if way == "whole" else contextlib.nullcontext():
            for _ in range(times):
                step()

    if way == "whole" or times > 1:
        setattr(test, name, repeated)
    test.run(result)


@contextlib.contextmanager
def _defined_memory() -> Iterator[None]:
    """`torch.empty` returns zeros, so that tests' results can be compared with eager's."""
    empty = torch.empty

    @functools.wraps(empty)
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        with torch.no_grad():
            return tensor if tensor.is_meta or tensor.layout != torch.strided else tensor.zero_()

    torch.empty = zeros
    try:
        yield
    finally:
        torch.empty = empty


# -- models --


@contextlib.contextmanager
def _models(backend: fl.Backend, trail: Trail) -> Iterator[None]:
    """Compile each module that the test calls for `backend`."""
    call = torch.nn.Module.__call__
    depth = 0

    @functools.wraps(call)
    def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        outermost = depth == 0 and session.trace is None
        if outermost and backend.is_xla and not _lazy(self):
            fl.compile(self, backend)
        depth += 1
        try:
            result = call(self, *args, **kwargs)
        finally:
            depth -= 1
        if outermost:
            trail.append((f"{type(self).__name__}()", _values(result)))
        return result

    torch.nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]


def _lazy(module: torch.nn.Module) -> bool:
    """Whether its weights get their shapes in its first call, so that it can be compiled only after it."""
    parts = [*module.parameters(), *module.buffers()]
    return any(torch.nn.parameter.is_lazy(part) for part in parts)


def _values(result: Any) -> list[torch.Tensor]:
    """Copies on the host of the tensors in `result`."""
    plain = (torch.Tensor, torch.nn.Parameter, DeferredTensor)
    tensors = [t for t in pytree.tree_leaves(result) if type(t) in plain and t.layout == torch.strided]
    with torch.no_grad():
        return [torch.zeros(t.shape, dtype=t.dtype).copy_(t.detach()) for t in tensors if not t.is_meta]


# -- optimizers --


class _Weights(torch.nn.Module):
    """Holds the weights of an optimizer that do not belong to a model."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.others = [weight for weight in weights if not isinstance(weight, torch.nn.Parameter)]
        for number, weight in enumerate(weights):
            if isinstance(weight, torch.nn.Parameter):
                self.register_parameter(f"weight{number}", weight)


@contextlib.contextmanager
def _optimizers(backend: fl.Backend, trail: Trail, traced: bool) -> Iterator[None]:
    """Move the weights of optimizers to `backend`; if `traced`, their steps are traced steps."""
    init = torch.optim.Optimizer.__init__
    before: dict[type, Callable[..., Any]] = {}
    steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(init)
    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if backend.is_xla:
            held = {id(p) for model in backend.models for p in model.parameters()}
            loose = [p for group in self.param_groups for p in group["params"] if id(p) not in held]
            if loose:
                fl.compile(_Weights(loose), backend)
        kind = type(self)
        if kind not in before:
            before[kind] = kind.step
            kind.step = stepping(kind.step)  # type: ignore[method-assign]

    def stepping(step: Callable[..., Any]) -> Callable[..., Any]:
        depth = 0

        @functools.wraps(step)
        def stepped(self: torch.optim.Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            outermost = depth == 0 and session.trace is None
            depth += 1
            try:
                if not traced or not outermost:
                    return step(self, closure, *args, **kwargs)
                return as_step(self, step, closure, args, kwargs)
            finally:
                depth -= 1
                if outermost:
                    weights = [p for group in self.param_groups for p in group["params"]]
                    trail.append((f"{type(self).__name__}.step()", _values(weights)))

        return stepped

    def as_step(self: torch.optim.Optimizer, step: Callable[..., Any], closure: Any, args: Any, kwargs: Any) -> Any:
        known = steps.setdefault(self, {})
        if closure is None:
            if None not in known:
                known[None] = fl.trace(lambda: step(self, *args, **kwargs))
        elif closure not in known:

            def with_closure() -> Any:
                if type(self).__name__ == "LBFGS":
                    return step(self, closure, *args, **kwargs)
                with torch.enable_grad():
                    loss = closure()
                step(self, None, *args, **kwargs)
                return loss

            known[closure] = fl.trace(with_closure)
        return known[closure]()

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
        for kind, original in before.items():
            kind.step = original  # type: ignore[attr-defined]


# -- a whole test as a step --

_COMPARISONS = ("assertEqual", "assertNotEqual")


@contextlib.contextmanager
def _later(case: type) -> Iterator[None]:
    """Defer comparisons of tensors within a traced step until it has run."""
    before = {name: getattr(case, name) for name in _COMPARISONS}

    def comparing(compare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compare)
        def compared(self: Any, *args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            if session.trace is None or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                return compare(self, *args, **kwargs)
            return fl.step_closure(functools.partial(compare, self))(*args, **kwargs)

        return compared

    for name, compare in before.items():
        setattr(case, name, comparing(compare))
    try:
        yield
    finally:
        for name in _COMPARISONS:
            delattr(case, name)
