"""Random bits of `jax.random` as one call on a CPU.

XLA compiles Threefry to a dozen loops for each shape, for which a dropout takes it 0.7 s of processor time, and runs
over the array five times. The call (`_threefry.h`) makes the same bits in one pass, and nothing is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.extend.random
import numpy as np

from . import aten

_JAX_S = "threefry2x32"  # JAX's default


def usable(key: Any) -> bool:
    """Whether the call gives what `jax.random` gives: JAX has other generators, and an older way of counting."""
    ours = bool(jax.config.jax_threefry_partitionable) and jax.random.key_impl(key) == _JAX_S
    return ours and aten.usable()


def fold_in(key: Any, data: Any) -> Any:
    """`jax.random.fold_in` of a key of JAX's default kind."""
    if not usable(key):
        return jax.random.fold_in(key, data)
    return jax.random.wrap_key_data(_fold_in(jax.random.key_data(key), data), impl=_JAX_S)


def by_call(key: Any) -> Any:
    """A key with which `jax.random` draws the same numbers as with `key`, by the call where it is usable."""
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_implementation()) if usable(key) else key


@functools.cache
def _implementation() -> Any:
    return jax.extend.random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl=_JAX_S)),
        split=lambda key, shape: _call(key, np.uint32(0), (*shape, 2), np.uint32, words=True),
        random_bits=lambda key, width, shape: _call(key, np.uint32(0), shape, np.dtype(f"uint{width}")),
        fold_in=_fold_in,
        name="firstloss_threefry2x32",
        tag="firstloss",
    )


def _fold_in(key: Any, data: Any) -> Any:
    return _call(key, jax.numpy.asarray(data).astype(np.uint32), (2,), np.uint32, words=True)


def _call(key: Any, first: Any, shape: tuple[int, ...], dtype: Any, words: bool = False) -> Any:
    """The hashes of the counters from `first` on.

    Args:
        words: whether the result has both words of each hash, along its last dimension.
    """
    call = jax.ffi.ffi_call(aten.TARGETS[8], jax.ShapeDtypeStruct(shape, dtype), vmap_method="sequential")
    return call(key, first, words=np.array([words], np.int64))
