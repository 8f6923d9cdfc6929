"""Uninitialized arrays on CPU devices, as `torch.empty` makes them.

`jax.lax.empty` is such an array on a GPU or a TPU; on a CPU it is zeros, written at the speed of memory: for a weight
that is about to be drawn, as long again as drawing it. A custom call whose handler does nothing leaves its results as
XLA allocated them. The handler is in `_unwritten.c`; where that was not compiled, memory is cleared first.
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
    """Whether XLA has the custom call; it is told of it the first time."""
    library = c_library.load(__file__, "_unwritten", {"firstloss_unwritten": (ctypes.c_void_p, (ctypes.c_void_p,))})
    if library is None:
        return False
    jax.devices("cpu")  # a handler that XLA refuses would fail this, if it came first
    try:
        handler = jax.ffi.pycapsule(library.firstloss_unwritten)
        jax.ffi.register_ffi_target(_NAME, handler, platform="cpu", api_version=1)
    except Exception as error:  # another version of the interface: memory is written once more, and all works
        print(f"firstloss: memory of CPU devices is cleared before it is filled ({error})", file=sys.stderr)
        return False
    return True


def arrays(kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[jax.Array]:
    """An array for each shape and dtype, on the default device, a CPU; whatever its memory holds."""
    made = _maker(tuple(kinds))()
    jax.block_until_ready(made)
    return made


def array_on(sharding: Sharding, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """An array on several CPU devices, whatever their memory holds."""
    return _sharded_maker(shape, dtype, sharding)().block_until_ready()


def memory_of(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of an array on one CPU device, as a tensor. It may be written until the array is given to anybody."""
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
    """What nobody writes, in a function that is compiled for one CPU device or for each of several."""
    if not registered_with_xla():
        return [lax.empty(shape, dtype) for shape, dtype in kinds]
    return list(jax.ffi.ffi_call(_NAME, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds])())
