"""Patches of embeddings with sparse gradients: in a traced step their gradients are dense.

A compiled step has no sparse tensors. PyTorch's SGD and Adagrad, the optimizers that take sparse gradients, update a
weight by a dense gradient in the same way; Adam, which refuses sparse ones, works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat.patches import replaces
from . import session


@replaces("torch.embedding")
def embedding(
    original: Callable[..., torch.Tensor],
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """As `torch.embedding`."""
    return original(weight, indices, padding_idx, scale_grad_by_freq, sparse and session.trace is None)


@replaces("torch.embedding_bag")
def embedding_bag(
    original: Callable[..., Any],
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    *others: Any,
    **kwargs: Any,
) -> Any:
    """As `torch.embedding_bag`."""
    sparse = sparse and session.trace is None
    return original(weight, indices, offsets, scale_grad_by_freq, mode, sparse, *others, **kwargs)


@replaces("torch.gather")
def gather(original: Callable[..., torch.Tensor], *args: Any, sparse_grad: bool = False, **kwargs: Any) -> torch.Tensor:
    """As `torch.gather`."""
    return original(*args, sparse_grad=sparse_grad and session.trace is None, **kwargs)
