"""The gradients that a step finds in the weights, and those that it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..capture.program import Ref, Value
from ..capture.tensor import DeferredTensor, Store
from .guards import Effects, Env, Left
from .guards.effects import Bind, Make

Homes = dict[Value, Store | torch.Tensor]


class Gradients:
    """Of the weights of one executable: at later calls no Python of the step's runs that would read or set them."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        """To be made before the step is traced."""
        self._before = {p: p.grad for p in weights}
        self._left: list[torch.Tensor] = []  # whose gradients it leaves or clears
        self._read: dict[Value, tuple[torch.Tensor, Ref | None]] = {}  # how it looked at its memory

    def traced(self, inputs: Homes, effects: Effects, left: Left) -> None:
        """The step has been traced, and reads `inputs`; what it has left in the weights is an effect like others."""
        whose = {id(_home(g)): (p, _view(g)) for p, g in self._before.items() if g is not None}
        self._read = {value: whose[id(home)] for value, home in inputs.items() if id(home) in whose}
        for parameter, before in self._before.items():
            if parameter.grad is not before:
                self._left.append(parameter)
                effects.also(_setter(parameter, before), _maker(parameter, left.make(parameter.grad)))

    def undo(self) -> None:
        """The step could not be traced."""
        for parameter, gradient in self._before.items():
            parameter.grad = gradient

    def fit(self) -> bool:
        """Whether the gradients that are there now can stand for those that the step was traced with."""
        return all(_is_laid_out(value, parameter.grad, view) for value, (parameter, view) in self._read.items())

    @property
    def read(self) -> Iterable[Value]:
        """The inputs that are gradients."""
        return self._read

    def follow(self, inputs: Homes, changed: dict[Value, Any], stand_in: dict[int, Any]) -> bool:
        """Before a later call: an eager backward pass has made new ones, which are read, or written to, instead.

        Returns:
            Whether there were such.
        """
        others = False
        for value, (parameter, _) in self._read.items():
            home = _home(parameter.grad)
            stand_in[id(self._before[parameter])] = parameter.grad
            if home is not inputs[value]:
                others = True
                inputs[value] = home
                if value in changed:
                    changed[value] = home
        return others

    def now(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Those that a call will replace, for `back_to`."""
        return [(parameter, parameter.grad) for parameter in self._left]

    def back_to(self, before: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """A call has failed: weights have the gradients again that were there `before`."""
        for parameter, gradient in before:
            parameter.grad = gradient


def _setter(parameter: torch.Tensor, gradient: torch.Tensor | None) -> Callable[[], None]:
    def put() -> None:
        parameter.grad = gradient

    return put


def _maker(parameter: torch.Tensor, make: Make) -> Callable[[Env], Bind]:
    return lambda env: _setter(parameter, make(env))


def _home(gradient: Any) -> Store | torch.Tensor:
    return gradient._store if type(gradient) is DeferredTensor else gradient


def _view(gradient: torch.Tensor) -> Ref | None:
    """How a gradient looks at its storage: that of a Linear's weight is a product transposed. None of a real tensor."""
    return gradient._ref() if type(gradient) is DeferredTensor else None


def _is_laid_out(value: Value, gradient: torch.Tensor | None, view: Ref | None) -> bool:
    if gradient is None:
        return False
    now = _view(gradient)
    if now is None:
        return gradient.shape == value.shape and gradient.dtype == value.dtype and (view is None or view.whole)
    if view is None:
        return now.whole and _alike(now.value, value)
    return now[1:] == view[1:] and _alike(now.value, value)


def _alike(a: Value, b: Value) -> bool:
    return (a.shape, a.stride, a.dtype) == (b.shape, b.stride, b.dtype)
