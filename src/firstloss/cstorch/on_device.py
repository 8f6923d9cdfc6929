"""A device without its backend, and tensors on the current one."""

from __future__ import annotations

from typing import Any

import torch

import firstloss as fl


def device(backend_type: str, *args: Any, **kwargs: Any) -> Any:
    """The device of a new backend.

    Args:
        backend_type, args, kwargs: as of `backend`.

    Returns:
        `backend(backend_type, ...).device`.
    """
    return fl.backend(backend_type, *args, **kwargs).device


def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """As `torch.tensor`, on the current backend's device.

    Args:
        args, kwargs: as of `torch.tensor`.

    Returns:
        The tensor.
    """
    backend = fl.current_backend(raise_exception=False)
    if backend is None or kwargs.get("device") is not None:
        return torch.tensor(*args, **kwargs)
    with backend.device:
        return torch.tensor(*args, **kwargs)
