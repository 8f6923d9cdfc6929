"""What stands for the arguments of a call while its step is traced, and what the step has done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...capture.step import StepTrace
from ...capture.tensor import DeferredTensor
from ...errors import TraceError
from ...program.graph import Value
from ...program.source import here
from ..guards.bindings import Bind
from ..guards.effects import Effects
from ..guards.reconstruct import ArgumentStandIns, CallFrame, Reconstructor
from ..pytrees import containers
from .arguments import Arguments, setting, view_of


class TracedArguments:
    """Tensors without values in the places of those that are data.

    Attributes:
        inputs: by the input that stands for it, the number of a leaf.
    """

    def __init__(self, arguments: Arguments, tracing: StepTrace) -> None:
        self._before = leaves = arguments.leaves
        self._made: list[tuple[DeferredTensor, int]] = []
        self.inputs: dict[Value, int] = {}
        traced = list(leaves)
        made_of: dict[int, DeferredTensor] = {}
        for i, leaf in arguments.data():
            made = made_of.get(id(leaf))
            if made is None:
                made = made_of[id(leaf)] = tracing.new_input(leaf, f"batch{i}", may_change=True)
                self.inputs[made._storage.value] = i
                made.requires_grad_(leaf.requires_grad)
                self._made.append((made, i))
            traced[i] = made
        for i, j in arguments.gradients.items():
            traced[i].grad = traced[j]
        self._gradients = {i: traced[j] for i, j in arguments.gradients.items()}
        self._rebuilt = [arguments.rebuilt(traced[: len(arguments.given)])]
        self._containers = list(containers(self._rebuilt[0]))

    def take(self) -> tuple:
        """The arguments for the step's Python, positional and by name, in new dicts and lists: once, since nobody is to
        hold what is not left."""
        return self._rebuilt.pop()

    def check(self, name: str) -> None:
        """After the step's Python has run.

        Raises:
            TraceError: if it has done what cannot be done to the caller's tensors.
        """
        for argument, i in self._made:
            before = self._before[i]
            if argument.shape != before.shape or argument.dtype != before.dtype:
                raise TraceError(
                    f"{here()}: {name} resizes its argument in place, or gives it other memory, and the caller's "
                    "tensor would not see it. Resize a clone of it, or return it."
                )
            if argument.grad is not None and not before.is_leaf:
                raise TraceError(
                    f"{here()}: {name} computes gradients for its argument {list(argument.shape)}, which was "
                    "computed outside of the step and wants them too: what it was computed from would get none. "
                    "Compute it in the step, or pass its detach()."
                )

    def given(self, tracing: StepTrace, shares_memory: Callable[[torch.Tensor], bool]) -> ArgumentStandIns:
        """How what the step leaves is told from what it was given."""
        return ArgumentStandIns(
            {id(made): i for made, i in self._made},
            {id(made._storage): i for made, i in self._made},
            {id(container): n for n, container in enumerate(self._containers)},
            view_of,
            tracing.outside_of,
            shares_memory,
        )

    def follow(self, effects: Effects, left: Reconstructor) -> None:
        """What the step has done to its arguments, beside writing to them, is done at each call."""
        for made, i in self._made:
            leaf = self._before[i]
            found = {k: v for k, v in made.__dict__.items() if k not in ("_storage", *leaf.__dict__)}
            if made.requires_grad != leaf.requires_grad:
                found["requires_grad"] = made.requires_grad
            gradient = self._gradients.get(i)
            if made.grad is not gradient:
                found["grad"] = made.grad
            for name, value in found.items():
                effects.add(lambda: None, _on_argument(i, name, left.make(value)))


def _on_argument(number: int, name: str, make: Callable[[CallFrame], Any]) -> Callable[[CallFrame], Bind]:
    return lambda env: setting(env.arguments[number], name, make(env))
