"""Results that have lost their autograd history: a gradient that reaches one is an error instead of being dropped.

A constructor may compute tensors from its weights with gradients on, and a step returns such tensors. Eager PyTorch
could backpropagate through them to the weights, once. Operations are recorded below autograd, so this is not possible
here. Models that keep such tensors (such as the old `torch.nn.utils.weight_norm`) recompute them in each forward pass
and are not affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from ..compat.torch_names import DisableTorchDispatch
from ..errors import MaterializeError, TraceError
from ..program.source import here


class _WithoutHistory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, boxed: tuple[torch.Tensor], error: Callable[[], Exception]) -> Any:
        ctx.error_of_history = error
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.error_of_history()


def returned(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Let `tensor`, a result of the step `name`, require grad, and raise an error if a gradient reaches it."""
    with torch.enable_grad():
        return _WithoutHistory.apply(_anchor(), (tensor,), functools.partial(_of_step, name))


def is_returned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a result of a step that requires grad."""
    return getattr(getattr(tensor.grad_fn, "error_of_history", None), "func", None) is _of_step


def without_history(value: torch.Tensor, line: str) -> torch.Tensor:
    """`value` (detached) as a non-leaf tensor that requires grad, and raises an error if a gradient reaches it."""
    with torch.enable_grad():
        anchor = torch.empty(0, dtype=value.dtype, device=value.device, requires_grad=True)
        return _WithoutHistory.apply(anchor, (value,), functools.partial(_of_constructor, line))


def _of_step(name: str) -> TraceError:
    return TraceError(
        f"{here()}: a gradient has come to what the traced step {name} returned or kept. That has no "
        "graph which would lead on to the weights: the step's operations ended with it. Call backward() in the "
        "step, or trace all of it as one step; where no gradient is meant, use what it returns as result.detach()."
    )


def _of_constructor(line: str) -> MaterializeError:
    return MaterializeError(
        f"{line}: a gradient has come to a tensor that was computed from weights while they were deferred. "
        "Its value was made, but not the history that would lead the gradient on to the weights. Compute it in "
        "forward, or after firstloss.materialize_module."
    )


@functools.cache
def _anchor() -> torch.Tensor:
    with DisableTorchDispatch():
        return torch.empty(0, requires_grad=True)


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Enable autograd, also within an operation that is already below it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(enable_reentrant_dispatch())
        except RuntimeError:  # not within an operation
            pass
        yield
