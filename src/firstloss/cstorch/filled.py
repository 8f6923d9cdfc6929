"""Filled tensors on the current backend, created without host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..capture import session
from ..runtime.backend import current_backend

Tensor = torch.Tensor


def full(shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `shape` on the current backend, filled with `value`. Without a backend, and in a traced step, the
    same as `torch.full`.

    Args:
        shape: the tensor's shape.
        value: the fill value.
        dtype: the dtype; by default as `torch.full` infers it from `value`.

    Returns:
        A new tensor.
    """
    return _placed(lambda: torch.full(tuple(shape), value, dtype=dtype))


def full_like(other: Tensor, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """`full` with the shape of another tensor.

    Args:
        other: the tensor with the shape and default dtype.
        value: the fill value.
        dtype: the dtype; by default that of `other`.

    Returns:
        A new tensor.
    """
    return full(other.shape, value, dtype or other.dtype)


def ones(shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`full` of ones.

    Args:
        shape: the tensor's shape.
        dtype: the dtype; None: the default dtype.

    Returns:
        A new tensor.
    """
    return full(shape, 1, dtype or torch.get_default_dtype())


def ones_like(other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`full_like` of ones.

    Args:
        other: the tensor with the shape and default dtype.
        dtype: the dtype; by default that of `other`.

    Returns:
        A new tensor.
    """
    return full_like(other, 1, dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`full` of zeros.

    Args:
        shape: the tensor's shape.
        dtype: the dtype; None: the default dtype.

    Returns:
        A new tensor.
    """
    return full(shape, 0, dtype or torch.get_default_dtype())


def zeros_like(other: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`full_like` of zeros.

    Args:
        other: the tensor with the shape and default dtype.
        dtype: the dtype; by default that of `other`.

    Returns:
        A new tensor.
    """
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
