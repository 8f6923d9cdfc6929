"""Patches of PyTorch functions that access memory without the dispatcher, which deferred and traced tensors lack."""

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
from .input_numbers import is_input_number
from .python_draws import InputArray, array_of, items_of, without_inputs
from .tensor import DeferredTensor

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

# PyTorch's errors in functions that are not patched, or that were imported by name before.
_UNALLOCATED = ("its data is not allocated yet", "Cannot access data pointer of Tensor")


def is_unallocated(error: BaseException) -> bool:
    """Whether it is PyTorch's error for a tensor without memory."""
    return any(text in str(error) for text in _UNALLOCATED)


def message(source: Source) -> str:
    """The error for a step whose line `source` accesses a tensor's memory."""
    return (
        f"{source}: this line reads the memory of a tensor while the step is being traced, when tensors have no "
        "memory. Compute with torch's operations, and pass Python numbers, as in x.tensor_split((2, 5)); torch.tensor, "
        "torch.as_tensor and torch.tensor_split accept traced tensors if they are called by these full names."
    )


@replaces("torch.tensor_split", "torch.Tensor.tensor_split")
def tensor_split(original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `original`, which reads the split indices directly from a tensor's memory."""
    args = tuple(a.tolist() if type(a) is DeferredTensor else a for a in args)
    kwargs = {k: v.tolist() if type(v) is DeferredTensor else v for k, v in kwargs.items()}
    return original(x, *args, **kwargs)


@replaces("torch.linalg.matrix_rank")
def matrix_rank(original: Any, *args: Any, out: Any = None, **kwargs: Any) -> torch.Tensor:
    """As `original`, which does not write to a deferred `out`."""
    rank = original(*args, **kwargs)
    return rank if out is None else torch.add(rank, 0, out=out)


@replaces("torch.Tensor.item")
def item(original: Any, self: torch.Tensor) -> Any:
    """As `original`; of a traced tensor its own method, also if the class calls it, `map(Tensor.item, losses)`."""
    traced = session.trace is not None and type(self) is DeferredTensor
    return session.trace.number(self) if traced else original(self)  # type: ignore[union-attr]


@replaces(*(f"torch.Tensor.{name}" for name in READ_IN_MEMORY))
def read(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `original`, a method that reads values of real tensors; records the read in the active trace.

    Reads by Firstloss itself are not recorded.
    """
    by_firstloss = getframe(2).f_code.co_filename.startswith(_OURS)
    if by_firstloss or session.trace is None or type(self) is DeferredTensor or self.is_meta:
        return original(self, *args, **kwargs)
    self = session.trace.read_real(self)
    if type(self) is DeferredTensor:  # the step has written to it
        return getattr(self, original.__name__)(*args, **kwargs)
    with DisableTorchDispatch():  # else its detach() would be recorded
        return original(self, *args, **kwargs)


@replaces("torch.tensor", "torch.as_tensor", "torch.asarray")
def tensor(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `original`, which reads numbers in a list directly from memory; stacks those of deferred tensors. Of
    numbers, in lists too, or an array that are inputs of a step it makes an input."""
    if args and session.trace is not None and (new := _of_input(original, *args, **kwargs)) is not None:
        return new
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        name = next(name for name in ("data", "obj") if args or name in kwargs)
        data, *rest = args or (kwargs.pop(name),)
        if not isinstance(data, (list, tuple)) or not is_unallocated(error):
            raise
    requires_grad = kwargs.pop("requires_grad", False)
    return original(_stacked(data).detach(), *rest, **kwargs).requires_grad_(requires_grad)


def _of_input(
    original: Any, data: Any, dtype: torch.dtype | None = None, requires_grad: bool = False, **kwargs: Any
) -> torch.Tensor | None:
    """The tensor of a number, a list with such numbers or an array that is an input of the step; None for anything
    else."""
    if isinstance(data, (list, tuple)) and (listed := array_of(data)) is not None:
        new = listed.tensor()
        if dtype is None:
            with DisableTorchDispatch():
                dtype = original(without_inputs(data)).dtype
    elif type(data) is InputArray:
        new = data.tensor()
    elif is_input_number(data):
        assert session.trace is not None
        new = session.trace.input_of(data.node)
        if dtype is None and type(data.node.number) is float:
            dtype = torch.get_default_dtype()
        elif dtype is None:
            dtype = original(data.node.number).dtype  # of NumPy's number
    else:
        return None
    if type(data) is not InputArray or original.__name__ != "as_tensor" or dtype is not None:
        # What PyTorch does, too, with the tensor that it makes of a real array.
        new = torch.ops.aten._to_copy.default(new.detach(), dtype=dtype or new.dtype, device=new.device)
    return new.requires_grad_(requires_grad) if requires_grad else new


@replaces("torch.Tensor.new_tensor")
def new_tensor(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `original`; stacks numbers of deferred tensors."""
    if args and (type(args[0]) is InputArray or any(map(is_input_number, items_of(args[0])))):
        kwargs.setdefault("dtype", self.dtype)
    return tensor(functools.partial(original, self), *args, **kwargs)


def _stacked(data: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(x) for x in data])
    return data if isinstance(data, torch.Tensor) else torch.tensor(data)
