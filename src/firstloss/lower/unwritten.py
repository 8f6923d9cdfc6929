"""Uninitialized arrays on CPU devices, like `torch.empty`.

`jax.lax.empty` is uninitialized on a GPU or TPU; on a CPU it is zeros, written at memory speed, which takes as long
again as drawing a weight into it. A custom call whose handler does nothing leaves its results as XLA allocated them.
The handler is in `_unwritten.c`; if that was not compiled, memory is zeroed first.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax.sharding import NamedSharding, Sharding

from .. import c_library

_NAME = "firstloss_unwritten"


@functools.cache
def registered_with_xla() -> bool:
    """Register the custom call with XLA at the first call; returns whether XLA has it."""
    library = c_library.load(__file__, "_unwritten", {"firstloss_unwritten": (ctypes.c_void_p, (ctypes.c_void_p,))})
    if library is None:
        return False
    jax.devices("cpu")  # initialize first: after a rejected handler this would fail
    try:
        handler = jax.ffi.pycapsule(library.firstloss_unwritten)
        jax.ffi.register_ffi_target(_NAME, handler, platform="cpu", api_version=1)
    except Exception as error:  # another version of the interface: fall back to zeroed memory
        print(f"firstloss: no uninitialized arrays, memory of CPU devices is zeroed first ({error})", file=sys.stderr)
        return False
    return True


def arrays(kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[jax.Array]:
    """Uninitialized arrays with these shapes and dtypes on the default device, a CPU."""
    results = _maker(tuple(kinds))()
    jax.block_until_ready(results)
    return results


def array_on(sharding: Sharding, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """An uninitialized array on several CPU devices."""
    return _sharded_maker(shape, dtype, sharding)().block_until_ready()


def memory_of(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the memory of an array on one CPU device. It may be written to until the array is passed on."""
    count = array.size * dtype.itemsize
    if count == 0:
        return torch.empty(array.shape, dtype=dtype)
    memory = (ctypes.c_char * count).from_address(array.unsafe_buffer_pointer())
    return torch.frombuffer(memory, dtype=dtype).view(array.shape)


@functools.lru_cache(maxsize=512)
def _maker(kinds: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> Any:
    with jax.enable_x64(True):
        return jax.jit(lambda: results(kinds)).lower().compile()


@functools.lru_cache(maxsize=512)
def _sharded_maker(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> Any:
    with jax.enable_x64(True):
        if not isinstance(sharding, NamedSharding):
            return jax.jit(lambda: lax.empty(shape, dtype), out_shardings=sharding).lower().compile()
        local = sharding.shard_shape(shape)
        make = jax.shard_map(
            lambda: results([(local, dtype)])[0],
            mesh=sharding.mesh,
            in_specs=(),
            out_specs=sharding.spec,
            check_vma=False,
        )
        return jax.jit(make).lower().compile()


def results(kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[jax.Array]:
    """Uninitialized results, inside a function compiled for CPU devices."""
    if not registered_with_xla():
        return [lax.empty(shape, dtype) for shape, dtype in kinds]
    return list(jax.ffi.ffi_call(_NAME, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds])())
