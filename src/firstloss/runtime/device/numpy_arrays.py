"""Conversion between tensors and NumPy arrays, including bfloat16 by way of `ml_dtypes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import MissingDependencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def from_numpy(array: NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """Convert a NumPy array to a tensor that shares its memory; read-only or reversed arrays are copied.

    Examples:
        >>> import numpy as np
        >>> fl.cstorch.from_numpy(np.arange(3.0)).dtype
        torch.float64

    Args:
        array: an array of numbers, possibly of `ml_dtypes.bfloat16`. Tensors are returned unchanged.

    Returns:
        A tensor of the array's shape and dtype.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    """Convert a tensor to a NumPy array that shares its memory; tensors on other devices are copied.

    bfloat16 tensors become arrays of dtype `ml_dtypes.bfloat16`.

    Examples:
        >>> fl.cstorch.to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype(bfloat16)

    Args:
        tensor: a tensor. Arrays are returned unchanged.

    Returns:
        An array of the tensor's shape and dtype.

    Raises:
        MissingDependencyError: for bfloat16 without `ml_dtypes`, which comes with JAX.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            "NumPy has no bfloat16: pip install ml_dtypes, or convert with tensor.float() first."
        ) from error
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
