"""JAX's GPU, used by PyTorch's kernels and by ours too: one memory for both, and no copies.

What a step may donate is memory that XLA has allocated. It is written there through a tensor that DLPack makes of the
array; no such tensor may live on when the array is donated, or XLA copies. A tensor waits for XLA when it is made; in
the other direction nothing waits by itself, so PyTorch's stream is waited for here.
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
from ..jax_there import on_cpu

if TYPE_CHECKING:
    import jax

# What a user may have said of the part of the memory that XLA takes.
_SHARES = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)


def leave_memory_to_pytorch() -> None:
    """To be called before JAX looks for its devices: it would take three quarters of the memory of each GPU. Now it
    takes what it needs, as PyTorch does; but what the environment says is left alone."""
    if torch.cuda.is_available() and not any(name in os.environ for name in _SHARES):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


@functools.cache
def device() -> torch.device | None:
    """JAX's default device as PyTorch calls it; None where that is no GPU which this PyTorch can use."""
    if on_cpu() or not torch.cuda.is_available():
        return None
    import jax
    import numpy as np

    (found,) = jax.device_put(np.zeros((), np.float32)).devices()
    return torch.device("cuda", found.local_hardware_id) if found.platform in ("gpu", "cuda") else None


def view(array: jax.Array) -> torch.Tensor:
    """A tensor of the array's own memory, which waits for what XLA is writing there. Let go of it before the array is
    donated."""
    return torch.from_dlpack(array)


def given(tensor: torch.Tensor) -> jax.Array:
    """An array of the memory of a tensor on the GPU, which must not change while it lives."""
    import jax

    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def wait(where: torch.device) -> None:
    """Wait for PyTorch's kernels, and give back the memory that PyTorch keeps for its next ones."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()


def make(values: Iterable[Value]) -> dict[Value, jax.Array]:
    """Those of `values` that kernels of ours make, in XLA's memory; all at once."""
    where = device()
    if where is None:
        return {}
    from ...gpu import slices, weights

    some = [v for v in values if is_contiguous(v.shape, v.stride) and slices.recipe_of(v) is not None]
    if not some:
        return {}
    arrays = dict(zip(some, _empties(some), strict=True))
    views: dict[Value, torch.Tensor] = {}
    with DisableTorchDispatch():
        for value, array in arrays.items():
            with contextlib.suppress(RuntimeError, TypeError, ValueError, BufferError):  # a dtype that DLPack has not
                views[value] = view(array)
        found = list(weights.make(list(views), where, allocate=views.__getitem__))
        views.clear()
        wait(where)
    return {value: arrays[value] for value in found}


def _empties(values: list[Value]) -> list[jax.Array]:
    """Arrays on the GPU, in memory that nobody has written."""
    import jax
    from jax import lax

    from ...lower.dtypes import to_jax

    kinds = [(tuple(value.shape), to_jax(value.dtype)) for value in values]
    with jax.enable_x64(True):
        made = jax.jit(lambda: [lax.empty(shape, dtype) for shape, dtype in kinds])()
    return jax.block_until_ready(made)
