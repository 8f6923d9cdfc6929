"""Memory on a GPU shared between JAX and PyTorch's kernels, and Firstloss's own, without copies.

Memory to be donated to a step must be allocated by XLA. It is written through a tensor that DLPack makes of the array;
that tensor must be gone when the array is donated, or XLA copies. Creating such a tensor waits for XLA; in the other
direction nothing synchronizes, so `wait` waits for PyTorch's stream.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...compat.torch_names import DisableTorchDispatch
from ...program.graph import Value, is_contiguous
from ..lazy_jax import on_cpu

if TYPE_CHECKING:
    import jax

# Environment variables with which users choose XLA's share of the memory.
_SHARES = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)


def disable_preallocation() -> None:
    """Stop XLA from preallocating three quarters of each GPU's memory, unless the environment configures it. Must be
    called before JAX initializes its devices."""
    if torch.cuda.is_available() and not any(name in os.environ for name in _SHARES):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


@functools.cache
def device() -> torch.device | None:
    """JAX's default device as a torch.device; None if it is not a GPU that this PyTorch can use."""
    if on_cpu() or not torch.cuda.is_available():
        return None
    import jax
    import numpy as np

    (gpu,) = jax.device_put(np.zeros((), np.float32)).devices()
    return torch.device("cuda", gpu.local_hardware_id) if gpu.platform in ("gpu", "cuda") else None


def view(array: jax.Array) -> torch.Tensor:
    """A tensor that shares the array's memory, after waiting for XLA. Release it before the array is donated."""
    return torch.from_dlpack(array)


def share_tensor(tensor: torch.Tensor) -> jax.Array:
    """An array that shares the memory of a tensor on the GPU; it must not change while the array lives."""
    import jax

    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def wait(target: torch.device) -> None:
    """Wait for PyTorch's kernels, and release the memory cached by PyTorch's allocator."""
    if target.type == "cuda":
        torch.cuda.synchronize(target)
        torch.cuda.empty_cache()


def materialize(values: Iterable[Value]) -> dict[Value, jax.Array]:
    """Materialize those of `values` that Firstloss's GPU kernels support, in XLA's memory."""
    target = device()
    if target is None:
        return {}
    from ...gpu import fill_slices, weights

    supported = [v for v in values if is_contiguous(v.shape, v.stride) and fill_slices.recipe_of(v) is not None]
    if not supported:
        return {}
    arrays = dict(zip(supported, _empties(supported), strict=True))
    views: dict[Value, torch.Tensor] = {}
    with DisableTorchDispatch():
        for value, array in arrays.items():
            with contextlib.suppress(RuntimeError, TypeError, ValueError, BufferError):  # a dtype that DLPack lacks
                views[value] = view(array)
        materialized = list(weights.materialize(list(views), target, allocate=views.__getitem__))
        views.clear()
        wait(target)
    return {value: arrays[value] for value in materialized}


def _empties(values: list[Value]) -> list[jax.Array]:
    """Uninitialized arrays on the GPU."""
    import jax
    from jax import lax

    from ...lower.dtypes import to_jax

    kinds = [(tuple(value.shape), to_jax(value.dtype)) for value in values]
    with jax.enable_x64(True):
        arrays = jax.jit(lambda: [lax.empty(shape, dtype) for shape, dtype in kinds])()
    return jax.block_until_ready(arrays)
