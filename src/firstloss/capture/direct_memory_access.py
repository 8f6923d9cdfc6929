"""Functions of PyTorch that read or write memory without calling the dispatcher: numbers in lists, split indices.

A deferred tensor has no memory, nor has a traced one. The functions that do so are replaced.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ..compat.patches import READ_IN_MEMORY, replaces
from ..compat.python_names import getframe
from ..compat.torch_names import DisableTorchDispatch
from ..program.source import Source
from . import session
from .tensor import DeferredTensor

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

# What PyTorch says when a function that is not replaced, or that was imported by its name before it was, wants memory.
_UNALLOCATED = ("its data is not allocated yet", "Cannot access data pointer of Tensor")


def is_unallocated(error: BaseException) -> bool:
    """Whether it is PyTorch's error for a tensor without memory."""
    return any(text in str(error) for text in _UNALLOCATED)


def message(source: Source) -> str:
    """The error of a step whose line `source` wants a tensor's memory."""
    return (
        f"{source}: this line reads the memory of a tensor, while the step is being traced, when no tensor has any "
        "yet. Compute with torch's operations, and give numbers as Python has them, as in x.tensor_split((2, 5)); "
        "torch.tensor, torch.as_tensor and torch.tensor_split take traced tensors, if called by these full names."
    )


@replaces("torch.tensor_split", "torch.Tensor.tensor_split")
def tensor_split(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `original`, which reads the places to split at straight from a tensor's memory."""
    args = tuple(a.tolist() if type(a) is DeferredTensor else a for a in args)
    kwargs = {k: v.tolist() if type(v) is DeferredTensor else v for k, v in kwargs.items()}
    return original(x, *args, **kwargs)


@replaces("torch.linalg.matrix_rank")
def matrix_rank(original: Any, *args: Any, out: Any = None, **kwargs: Any) -> torch.Tensor:
    """As `original`, which leaves an `out` as it was where a tensor's memory is not its own to write."""
    rank = original(*args, **kwargs)
    return rank if out is None else torch.add(rank, 0, out=out)


@replaces(*(f"torch.Tensor.{name}" for name in READ_IN_MEMORY))
def read(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `original`, a method that gives the values of real tensors; the trace under way is told what its step reads.

    Weights are made meanwhile, by other threads, and by code of ours.
    """
    ours = getframe(2).f_code.co_filename.startswith(_OURS)
    if ours or session.trace is None or type(self) is DeferredTensor or self.is_meta:
        return original(self, *args, **kwargs)
    self = session.trace.read_real(self)
    if type(self) is DeferredTensor:  # the step has written to it
        return getattr(self, original.__name__)(*args, **kwargs)
    with DisableTorchDispatch():  # else what it detaches were a tensor of the step, without memory
        return original(self, *args, **kwargs)


@replaces("torch.tensor", "torch.as_tensor", "torch.asarray")
def tensor(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `original`, which reads the numbers in a list straight from memory: those of deferred tensors are stacked."""
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        name = next(name for name in ("data", "obj") if args or name in kwargs)
        data, *rest = args or (kwargs.pop(name),)
        if not isinstance(data, (list, tuple)) or not is_unallocated(error):
            raise
    requires_grad = kwargs.pop("requires_grad", False)
    return original(_stacked(data).detach(), *rest, **kwargs).requires_grad_(requires_grad)


@replaces("torch.Tensor.new_tensor")
def new_tensor(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `original`: likewise."""
    return tensor(functools.partial(original, self), *args, **kwargs)


def _stacked(data: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(x) for x in data])
    return data if isinstance(data, torch.Tensor) else torch.tensor(data)
