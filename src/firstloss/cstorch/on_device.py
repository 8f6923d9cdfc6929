"""Tensors on the current backend's device."""

from __future__ import annotations

from typing import Any

import torch

import firstloss as fl


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
