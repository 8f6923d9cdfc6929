"""Transfer of batches to the device, ahead of the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...capture.tensor import DeferredTensor
from ...compat.torch_names import pytree
from .. import backend as backends
from ..lazy_jax import is_imported, on_cpu
from ..mesh.processes import processes
from ..pytrees import flatten
from .lazy_array import LazyArray, share_later, to_device_later
from .numpy_arrays import from_numpy


def put(batch: Any) -> Any:
    """Move the tensors in `batch` to the current backend's device; the transfer is asynchronous.

    Tensors are found in lists, tuples, dicts (including a tokenizer's), named tuples and dataclasses, and NumPy arrays
    of numbers become tensors; other objects are kept. On the XLA backend the tensors get memory of their own, so that
    the loader can reuse its memory.
    """
    backend = backends.current_backend(raise_exception=False)
    leaves, spec = flatten(batch)
    leaves = [as_tensor(leaf) for leaf in leaves]
    if backend is not None:
        send = _on_xla if backend.is_xla else _eagerly(backend.torch_device)
        leaves = [send(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    return pytree.tree_unflatten(leaves, spec)


def as_tensor(leaf: Any) -> Any:
    """Convert an array of numbers to a tensor, without a copy if possible; return anything else unchanged."""
    if type(leaf) is not np.ndarray or leaf.dtype.kind not in "biufcV":
        return leaf
    return from_numpy(leaf)


def _eagerly(device: torch.device) -> Any:
    return lambda tensor: tensor.to(device, non_blocking=True)


def _on_xla(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or type(tensor) is DeferredTensor or tensor.layout != torch.strided:
        return tensor
    from .buffer import resident

    mesh = backends.current_backend().mesh
    if mesh is not None and processes().count > 1:
        # This may be only this process's part of the batch, for `global_batch`; otherwise the step transfers it.
        return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)
    if mesh is not None:
        sharding = mesh.batch_sharding(tuple(tensor.shape))
        sent = to_device_later(tensor, sharding)
        lazily = (tuple(tensor.shape), tensor.dtype, sharding) if type(sent) is LazyArray else ()
        transferred = resident(sent, *lazily)
        return transferred.requires_grad_(True) if tensor.requires_grad else transferred
    with torch.no_grad():
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if is_imported() or not on_cpu():
            from ..jax_support import share_memory

            transferred = resident(share_memory(copy))
        else:
            transferred = resident(share_later(copy), tuple(copy.shape), copy.dtype)
    return transferred.requires_grad_(True) if tensor.requires_grad else transferred
