"""Filled tensors on the current backend, which no host memory holds before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..capture import session
from ..runtime.backend import current_backend

Tensor = torch.Tensor


def full(shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `shape` on the current backend, all of it `value`. Without a backend, and in a traced step, as
    `torch.full`."""
    return _placed(lambda: torch.full(tuple(shape), value, dtype=dtype))


def full_like(other: Tensor, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """`full` of the shape and, unless `dtype` says otherwise, the dtype of `other`."""
    return full(other.shape, value, dtype or other.dtype)


def ones(shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`full` of ones, in the default dtype unless `dtype` says otherwise."""
    return full(shape, 1, dtype or torch.get_default_dtype())


def ones_like(other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`full_like` of ones."""
    return full_like(other, 1, dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`full` of zeros, in the default dtype unless `dtype` says otherwise."""
    return full(shape, 0, dtype or torch.get_default_dtype())


def zeros_like(other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`full_like` of zeros."""
    return full_like(other, 0, dtype)


def _placed(make: Callable[[], Tensor]) -> Tensor:
    backend = current_backend(raise_exception=False)
    if backend is None or session.trace is not None:
        return make()
    if not backend.is_xla:
        with backend.device:
            return make()
    from ..capture.deferred import deferred

    with deferred():
        tensor = make()
    backend.move_to_device([tensor])
    return tensor
