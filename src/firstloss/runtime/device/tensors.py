"""Tensors on the backend, made from device arrays."""

from __future__ import annotations

from typing import Any

import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...program.graph import Value, contiguous_stride
from .buffer import DeviceBuffer
from .lazy_array import LazyArray


def resident(
    array: Any, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, sharding: Any = None
) -> DeferredTensor:
    """A tensor on the backend that holds `array`; a LazyArray needs shape, dtype and, on a mesh, sharding."""
    shape = tuple(array.shape) if shape is None else shape
    if dtype is None:
        from ...lower.dtypes import to_torch

        dtype = to_torch(array.dtype)
    value = Value(shape, contiguous_stride(shape), dtype, torch.device("cpu"))
    return DeferredTensor.wrap(deferred_storage_of(array, value, sharding), shape, value.stride, 0, dtype)


def deferred_storage_of(array: Any, like: Value, sharding: Any = None) -> DeferredStorage:
    """A storage on the backend with the layout of `like` that holds `array`; on a mesh, a LazyArray needs sharding."""
    value = Value(like.shape, like.stride, like.dtype, like.device)
    storage = DeferredStorage(value)
    storage.resident = DeviceBuffer(value, sharding=mesh_sharding(array) if sharding is None else sharding)
    storage.resident.set(array)
    return storage


def mesh_sharding(array: Any) -> Any:
    """An array's sharding on a mesh; None on one device."""
    if type(array) is LazyArray:
        return None
    return array.sharding if len(array.sharding.device_set) > 1 else None
