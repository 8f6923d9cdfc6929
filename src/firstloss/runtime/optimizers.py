"""Stock optimizers inside a traced step: their state exists before it, and what a schedule changes is an input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..capture.step import StepTrace, find_new_state
from ..errors import TraceError
from .reload import load_in_place


class Hyperparameter:
    """A number in a parameter group that a step reads anew each time."""

    def __init__(self, group: dict[str, Any], key: str) -> None:
        self.group = group
        self.key = key

    def read(self) -> float:
        """The number as it is now."""
        return float(self.group[self.key])


class Optimizers:
    """The optimizers that step inside one trace."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self.seen: list[torch.optim.Optimizer] = []
        self.new_state: list[torch.Tensor] = []
        self.hyperparameters: dict[Any, Hyperparameter] = {}
        self._restore: list[tuple[dict[str, Any], str, Any]] = []
        self._rehearsing = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Prepare every optimizer just before its first step in the block; afterwards their groups are as before."""
        handle = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            handle.remove()
            for group, key, value in reversed(self._restore):
                group[key] = value

    def constants(self) -> tuple:
        """What is baked into the trace: all numbers in the groups but those that are inputs."""
        inputs = {(id(h.group), h.key) for h in self.hyperparameters.values()}
        return tuple(
            (key, value)
            for optimizer in self.seen
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params" and (id(group), key) not in inputs and not isinstance(value, torch.Tensor)
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._rehearsing:
            return
        if kwargs.get("closure") is not None or len(args) > 1 and callable(args[1]):
            raise TraceError(
                f"{type(optimizer).__name__}.step(closure) runs forward and backward as often as it likes, which a "
                "traced step cannot. Compute the loss first, then call step() without a closure."
            )
        if any(seen is optimizer for seen in self.seen):
            return
        self.seen.append(optimizer)
        load_in_place(optimizer)
        for group in optimizer.param_groups:
            for key in ("capturable", "foreach"):
                # capturable: the step count stays a tensor; foreach: one operation a list of weights, not one a weight
                if key in group and not group.get("fused") and not group.get("differentiable"):
                    self._set(group, key, True)
            if isinstance(group.get("lr"), (int, float)):
                label = f"lr{len(self.hyperparameters)}"
                made = self._trace.new_input(torch.zeros((), dtype=torch.float64), label)
                self.hyperparameters[made._store.value] = Hyperparameter(group, "lr")
                self._set(group, "lr", made)
        self._rehearsing = True
        try:
            found = find_new_state(optimizer, optimizer.step)
        finally:
            self._rehearsing = False
        self.new_state.extend(found.values())

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        self._restore.append((group, key, group[key]))
        group[key] = value
