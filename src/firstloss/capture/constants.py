"""Constants: real tensors that operations on deferred tensors read."""

from __future__ import annotations

import torch

from ..compat.torch_names import DisableTorchDispatch, version_of
from ..program.graph import Value
from ..program.source import here
from . import session
from .mapped_file import in_file
from .tensor import DeferredStorage, DeferredTensor

Tensor = torch.Tensor

# Constants up to this size are copied when they are captured; larger ones are held by reference if torch counts their
# edits, since copying a checkpoint would cost as much as reading it.
_COPY_BYTES = 1 << 20


def constant(tensor: Tensor, copy: bool = True) -> Value:
    """A known Value with the current content of `tensor`; `copy=False` if it will not be edited."""
    version = edits(tensor)
    entry = session.constants.get(id(tensor))
    if entry is not None and entry[0] is tensor and entry[1] == version:
        return entry[2]
    with DisableTorchDispatch(), torch.no_grad():
        value_in_file = in_file(tensor) if copy and session.trace is None else None
        if value_in_file is not None:
            return value_in_file
        detached = tensor.detach()
        if detached.is_conj() or detached.is_neg():
            detached = detached.resolve_conj().resolve_neg()
        for dim, (size, stride) in enumerate(zip(detached.shape, detached.stride(), strict=True)):
            if stride == 0 and size > 1:  # expanded
                detached = detached.narrow(dim, 0, 1)
        value = Value(tuple(detached.shape), detached.stride(), detached.dtype, detached.device)
        value.label = str(here())
        if copy and (version is None or detached.numel() * detached.itemsize <= _COPY_BYTES):
            detached = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(
                detached
            )
        elif copy:
            value.version = version
            # A tensor detached below autograd has its own version counter; keep the original for its version.
            detached.original = tensor  # type: ignore[attr-defined]
    value.real = detached
    if session.depth and copy and version is not None:
        session.constants[id(tensor)] = (tensor, version, value)
    return value


def constant_tensor(tensor: Tensor, copy: bool = True) -> DeferredTensor:
    """A deferred tensor with the current content of `tensor`."""
    value = constant(tensor, copy)
    return DeferredTensor.wrap(DeferredStorage(value), tuple(tensor.shape), value.stride, 0, value.dtype)


def edits(tensor: Tensor) -> int | None:
    """The version of `tensor`; None if edits may not be counted (NumPy's memory, inference mode)."""
    if tensor.is_inference() or not owned_by_torch(tensor):
        return None
    return version_of(tensor)


def owned_by_torch(tensor: Tensor) -> bool:
    """Whether torch allocated the memory, so that all edits are counted."""
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        return False
