"""Operations of `cerebras.pytorch.nn.functional`, by PyTorch's."""

from __future__ import annotations

import torch


def one_hot(array: torch.Tensor, num_classes: int) -> torch.Tensor:
    """As `torch.nn.functional.one_hot`, of dtype int32.

    Returns:
        Shape (*array.shape, num_classes).

    Raises:
        ValueError: if `num_classes` is not positive.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} is not positive")
    zeros = torch.zeros((*array.shape, num_classes), dtype=torch.int32, device=array.device)
    return zeros.scatter_(-1, array.long().unsqueeze(-1), 1)


def scope_boundary(input: torch.Tensor, boundary_type: str, scope_name: str) -> torch.Tensor:
    """`input`: a mark for Cerebras' compiler, without effect."""
    return input


def enter_scope(input: torch.Tensor, scope_name: str) -> torch.Tensor:
    """`input`: a mark for Cerebras' compiler, without effect."""
    return input


def exit_scope(input: torch.Tensor, scope_name: str) -> torch.Tensor:
    """`input`: a mark for Cerebras' compiler, without effect."""
    return input


def bias_add(input_value: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    """`input_value` plus `bias` along dimension `dim`."""
    shape = [1] * input_value.ndim
    shape[dim] = -1
    return input_value + bias.reshape(shape)


def unbind(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `torch.unbind`."""
    return tensor.unbind()


__all__ = ["bias_add", "enter_scope", "exit_scope", "one_hot", "scope_boundary", "unbind"]
