"""`firstloss.trace`: a training step, traced and compiled once, then executed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..capture.program import Program
from ..errors import TraceError
from .backend import Backend, current_backend


def trace(step: Callable[..., Any]) -> Callable[..., Any]:
    """Make `step` a traced step: traced and compiled at its first call, executed at every call.

    Everything that the step does to tensors, forward, backward and optimizer, becomes one executable; weights and
    optimizer state stay on the device and are updated in place. Calls return as soon as the work is under way; a
    returned tensor's value is waited for when it is read. On the "CPU" and "GPU" backends the step just runs.
    """
    return TracedStep(step)


class TracedStep:
    """A step and its executables, one for each kind of batch it has met."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._executables: dict[Any, Any] = {}
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = current_backend()
        if not backend.is_xla:
            return self._step(*args, **kwargs)
        from .executable import Executable  # here, because it brings JAX

        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (id(backend), spec, tuple(_kind(leaf) for leaf in leaves), _grads(backend))
        executable = self._executables.get(key)
        if executable is None or executable.outdated():
            executable = self._executables[key] = Executable(self._step, leaves, spec, backend)
        return executable(leaves)  # which tells the loop under way, so that it can fetch the next batch meanwhile

    def program(self) -> Program:
        """The Program traced last."""
        if not self._executables:
            raise TraceError(f"{self._step.__name__} has not been called yet, so there is no Program.")
        return list(self._executables.values())[-1].program


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        raise TraceError(
            f"a traced step was given an argument of type {type(leaf).__name__}. Pass tensors, in tuples, lists and "
            "dicts, or constants."
        ) from None
    return (type(leaf), leaf)


def _grads(backend: Backend) -> tuple:
    """Which parameters hold a gradient already: a step adds to it, or starts anew."""
    return tuple(i for i, p in enumerate(backend.parameters()) if p.grad is not None)
