"""Gradients of the weights before and after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch

from ...capture.step import storage_key, whole_storage
from ...capture.tensor import DeferredTensor
from ...compat.torch_names import DisableTorchDispatch
from ...program.graph import Geometry, Ref, Value, geometry_of
from ..guards.effects import Bind, Effects, always
from ..guards.reconstruct import CallFrame, Make, Reconstructor
from .inputs import Owner, memory_of, storage_or_itself

Inputs = dict[Value, Owner]


class Gradients:
    """The gradients of a traced step's weights; at later calls no Python code of the step reads or sets them."""

    def __init__(self, weights: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """To be created before the step is traced.

        Args:
            others: tensors whose `requires_grad` may change.
        """
        self._before = {p: p.grad for p in weights}
        self._wanted = {t: t.requires_grad for t in (*self._before, *others) if t.is_leaf}
        self._left: list[torch.Tensor] = []  # weights whose gradients the step leaves or clears
        # By the input that is their memory: weights, and their gradients' views of it.
        self._read: dict[Value, list[tuple[torch.Tensor, Ref | Geometry | None]]] = {}

    def traced(self, inputs: Inputs, effects: Effects, left: Reconstructor) -> None:
        """Record the trace's results, with these `inputs`; a gradient left by the step is a side effect like others."""
        self._record_new_gradients()
        real = {storage_key(owner): owner for owner in inputs.values() if _is_real(owner)}
        by_owner: dict[int, list[tuple[torch.Tensor, Ref | Geometry | None]]] = {}
        for parameter, gradient in self._before.items():
            if _is_real(gradient):
                owner = real.get(storage_key(gradient))
                by_owner.setdefault(id(owner), []).append(
                    (parameter, None if owner is gradient else geometry_of(gradient))
                )
            elif gradient is not None:
                by_owner.setdefault(id(storage_or_itself(gradient)), []).append((parameter, _view(gradient)))
        self._read = {value: by_owner[id(owner)] for value, owner in inputs.items() if id(owner) in by_owner}
        for parameter, before in self._before.items():
            if parameter.grad is not before:
                self._left.append(parameter)
                effects.add(_setter(parameter, before), _maker(parameter, left.make(parameter.grad)))
        for tensor, wanted in self._wanted.items():
            if tensor.requires_grad != wanted:
                effects.add(_wanting(tensor, wanted), always(_wanting(tensor, not wanted)))

    def _record_new_gradients(self) -> None:
        """Record gradients of weights that required none before the step and have one now: the step unfreezes them."""
        self._before |= {t: None for t in self._wanted if t not in self._before and t.grad is not None}

    def undo(self) -> None:
        """Restore the gradients after a failed trace."""
        self._record_new_gradients()
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        for tensor, wanted in self._wanted.items():
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)

    def fit(self, inputs: Inputs) -> bool:
        """Whether the step can be called with the current gradients: each must have the layout that it had in the
        trace, and share memory with no other input."""
        others: set[int] | None = None
        memories: list[int] = []
        for value, readers in self._read.items():
            if not all(_is_laid_out(value, parameter.grad, view) for parameter, view in readers):
                return False
            memory = {memory_of(parameter.grad) for parameter, _ in readers}
            if len(memory) > 1:
                return False
            memories += memory
            if memory_of(inputs[value]) in memory:
                continue
            if others is None:
                others = {memory_of(owner) for other, owner in inputs.items() if other not in self._read}
            if not memory.isdisjoint(others):
                return False
        return len(set(memories)) == len(memories)

    @property
    def read(self) -> Iterable[Value]:
        """The gradients that are inputs."""
        return self._read

    def follow(self, inputs: Inputs, changed: dict[Value, Any], stand_in: dict[int, Any]) -> bool:
        """Before a later call, replace inputs by gradients that eager backward passes have made.

        Returns:
            Whether there were any.
        """
        others = False
        for value, readers in self._read.items():
            for parameter, _ in readers:
                stand_in[id(self._before[parameter])] = parameter.grad
            parameter, view = readers[0]
            gradient: Any = parameter.grad
            now: Any = storage_or_itself(gradient)
            if view is not None and not isinstance(view, Ref):  # a part of a real tensor
                if storage_key(gradient) == storage_key(inputs[value]):  # type: ignore[arg-type]
                    continue
                now = whole_storage(gradient)
            if now is not inputs[value]:
                others = True
                inputs[value] = now
                if value in changed:
                    changed[value] = now
        return others

    def now(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradients that a call will replace, for `back_to`."""
        return [(parameter, parameter.grad) for parameter in self._left]

    def back_to(self, before: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Restore the gradients `before` a failed call."""
        for parameter, gradient in before:
            parameter.grad = gradient


def _setter(parameter: torch.Tensor, gradient: torch.Tensor | None) -> Callable[[], None]:
    def put() -> None:
        parameter.grad = gradient

    return put


def _wanting(tensor: torch.Tensor, wanted: bool) -> Callable[[], None]:
    def want() -> None:
        tensor.requires_grad_(wanted)

    return want


def _maker(parameter: torch.Tensor, make: Make) -> Callable[[CallFrame], Bind]:
    return lambda env: _setter(parameter, make(env))


def _view(gradient: torch.Tensor) -> Ref | None:
    """A gradient's view of its storage (a Linear's weight gradient is a transposed product); None for a real tensor."""
    return gradient._ref() if type(gradient) is DeferredTensor else None


def _is_real(gradient: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(gradient, torch.Tensor) and type(gradient) is not DeferredTensor


def _is_laid_out(value: Value, gradient: torch.Tensor | None, view: Ref | Geometry | None) -> bool:
    if gradient is None:
        return False
    now = _view(gradient)
    if view is not None and not isinstance(view, Ref):  # it was a view of a real tensor
        return now is None and geometry_of(gradient) == view and _bytes_from(gradient) == value.nbytes
    if now is None:
        fits = gradient.shape == value.shape and gradient.dtype == value.dtype and (view is None or view.whole)
        return fits and whole_storage(gradient) is gradient
    if view is None:
        return now.whole and _alike(now.value, value)
    return now[1:] == view[1:] and _alike(now.value, value)


def _bytes_from(gradient: torch.Tensor) -> int:
    with DisableTorchDispatch():
        return gradient.untyped_storage().nbytes()


def _alike(a: Value, b: Value) -> bool:
    return (a.shape, a.stride, a.dtype) == (b.shape, b.stride, b.dtype)
