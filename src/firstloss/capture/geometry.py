"""How a tensor looks at its storage."""

from __future__ import annotations

import torch

Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]  # size, stride, offset, dtype


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How `tensor` looks at its storage."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor of `size`."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of the dimensions."""
    if tensor.layout != torch.strided:
        return False
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    shape = tuple([tensor.shape[d] for d in order if tensor.shape[d] != 1])
    return tuple([tensor.stride(d) for d in order if tensor.shape[d] != 1]) == contiguous_stride(shape)
