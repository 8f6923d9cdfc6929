"""Conjugated and negated views among what is moved to a backend, whose memory has no place for their bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...capture.storage_swap import share_memory
from ...capture.tensor import DeferredTensor, Hooks
from ...compat.torch_names import DisableTorchDispatch, storage_address
from ...errors import BackendError
from ...program.source import here
from .host_memory import has_other_owners


def without_bits(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `tensors` that can be moved to a backend.

    A conjugated or negated one that has its memory to itself gets the numbers that it shows. One that shares it stays
    what it is, a real view: a step that uses it finds what it is of.

    Raises:
        BackendError: if a parameter is such a view of memory that others share.
    """
    tensors = list(tensors)
    for tensor in tensors:
        if type(tensor) is DeferredTensor and tensor._storage.resident is None and tensor._storage.mirrors is not None:
            Hooks.materialize_storages([tensor._storage])  # with all that shares its memory
    lazy = [t for t in tensors if type(t) is not DeferredTensor and (t.is_conj() or t.is_neg())]
    left = {id(tensor) for tensor in lazy if not _resolved(tensor, tensors)}
    return [tensor for tensor in tensors if id(tensor) not in left]


def _resolved(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether `tensor` has been given memory of its own with what it shows."""
    if not tensor.is_conj() and not tensor.is_neg():  # met before in the list
        return True
    others = (t for t in tensors if t is not tensor and type(t) is not DeferredTensor)
    at = storage_address(tensor.untyped_storage())
    if has_other_owners(tensor) or any(storage_address(other.untyped_storage()) == at for other in others):
        if isinstance(tensor, torch.nn.Parameter):
            raise BackendError(
                f"{here()}: a parameter of shape {list(tensor.shape)} is a conjugated or negated view of memory that "
                "another tensor shares, and what lives on a backend is plain. Give it memory of its own: "
                "nn.Parameter(tensor.resolve_conj().resolve_neg())."
            )
        return False
    with DisableTorchDispatch(), torch.no_grad():
        share_memory(tensor, tensor.detach().resolve_conj().resolve_neg())
    return True
