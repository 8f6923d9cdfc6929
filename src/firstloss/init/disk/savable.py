"""Check whether a safetensors file can hold a tensor, and whether tensors share memory."""

from __future__ import annotations

from typing import Any

import torch

from ...capture.recorder import DeferredTensor
from ...compat.torch_names import local_tensor_or
from ...errors import FirstlossError
from .safetensors_file import DTYPES


def check_savable(tensor: torch.Tensor, name: str, error: type[FirstlossError], instead: str) -> None:
    """Raise `error`, which names the tensor, if a safetensors file cannot hold it.

    Args:
        instead: what to do about a DTensor.
    """
    if local_tensor_or(tensor, None) is not None:
        raise error(f"{name} is a DTensor, of which this process has only a shard. {instead}")
    if tensor.is_nested:
        raise error(f"{name} is a nested tensor, which a safetensors file cannot hold. Save its tensors: unbind().")
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise error(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which a safetensors file cannot "
            "hold. Convert it before saving."
        )


def memory_key(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that are the same view of the same memory; None for an empty tensor."""
    if not tensor.numel():
        return None
    geometry = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if type(tensor) is DeferredTensor:
        return id(tensor._storage), tensor.storage_offset(), geometry
    return tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg(), geometry
