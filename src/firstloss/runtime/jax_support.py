"""JAX helpers: settings, uninitialized arrays, transfers."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from ..compat import jax_names
from ..engine.huge_pages import advise_huge
from ..lower import unwritten
from ..lower.dtypes import as_numpy, constant, to_jax, to_torch
from .device import on_gpu, scratch_pool
from .device.pages import OWNED_BYTES
from .lazy_jax import on_cpu, pending_cache_directory

_LEVEL = "xla_backend_optimization_level"
_EMITTERS = "xla_cpu_use_fusion_emitters"


def x64() -> Any:
    """Context with 64-bit types enabled, as PyTorch's int64 and float64 must not be truncated."""
    return jax.enable_x64(True)


def use_compilation_cache(directory: str | None) -> None:
    """Cache compiled executables in `directory`, whatever their size; None: do not cache them."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def compile_options(on_mesh: bool = False, same_run: bool = False, older_emitters: bool = False) -> dict[str, Any]:
    """XLA options that differ from the defaults.

    Args:
        older_emitters: whether the function is one for XLA's older emitters; see `Function.older_emitters`.

    On a CPU: let XLA see, before it copies a donated weight, that the backward pass has read it before the optimizer
    writes it (by default each weight is copied at each step: 7% of a Llama's step), and schedule operations for less
    scratch memory (by default, to run more of them concurrently, it is 1.5 times as much).
    On one CPU device: XLA's older emitters, if they suit the function. They compile a loop in 8 ms instead of 15, and
    the step is as fast or a little faster; but equal loops are compiled each time (BERT as one function: 5.1 s of
    processor time instead of 2.9).
    On a mesh of CPU devices: LLVM's optimization level 2, not 3, which takes a fifth less processor time to compile;
    the steps are as fast, since most of their time is synchronization between devices.
    For the same run on any mesh: no merging of equal subexpressions across the pass over the logical shards, which
    comes out otherwise where there is one device (with it, weights of a Llama differed between one device and two); and
    nothing is moved out of the pass, where it would take memory during the whole of it.
    On a GPU: deterministic results, if PyTorch has been asked for them.
    """
    if not on_cpu():
        deterministic = same_run or torch.are_deterministic_algorithms_enabled()
        return {"xla_gpu_exclude_nondeterministic_ops": True} if deterministic else {}
    options: dict[str, Any] = {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    }
    said = os.environ.get("XLA_FLAGS", "")  # by the user
    if on_mesh and _LEVEL not in said:
        options[_LEVEL] = 2
    if older_emitters and not on_mesh and _EMITTERS not in said and _has_emitters():
        options[_EMITTERS] = False
    if same_run:
        kept = "while-loop-invariant-code-motion", "while-loop-expensive-invariant-code-motion"
        options["xla_disable_hlo_passes"] = ",".join(("cse", *kept))
    return options


@functools.cache
def _has_emitters() -> bool:
    """Whether this XLA can be told which emitters to use."""
    if jax.__version__ in jax_names.TESTED:
        return True
    try:
        jax.jit(lambda: 0).lower().compile({_EMITTERS: False})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[jax.Array, torch.Tensor]:
    """Allocate memory that a CPU device owns, as a JAX array and a row-major torch tensor that share it.

    The tensor may be written to until the array has been passed on.
    """
    return empties([(shape, dtype)])[0]


def empties(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[jax.Array, torch.Tensor]]:
    """`empty` for many arrays at once."""
    arrays = unwritten.arrays([(tuple(shape), to_jax(dtype)) for shape, dtype in kinds])
    advise_huge((array.unsafe_buffer_pointer(), array.nbytes) for array in arrays)
    return [(array, unwritten.memory_of(array, dtype)) for array, (_, dtype) in zip(arrays, kinds, strict=True)]


def to_device(tensor: torch.Tensor) -> jax.Array:
    """Copy `tensor` to the device; large ones into memory that the device owns."""
    tensor = tensor.detach()
    if not on_cpu():
        return _put(tensor)
    if tensor.numel() * tensor.itemsize >= OWNED_BYTES:
        array, memory = empty(tuple(tensor.shape), tensor.dtype)
        memory.copy_(tensor)
        return array
    return share_memory(tensor.contiguous().clone())


def share_memory(tensor: torch.Tensor) -> jax.Array:
    """Share `tensor`'s memory with a JAX array if possible; it must not change while the array lives.

    This goes through NumPy rather than DLPack: XLA releases borrowed memory in a thread of its own, where PyTorch's
    DLPack needs the GIL, which aborts the process if the interpreter is shutting down. Memory borrowed from NumPy is
    released by JAX when Python runs.
    """
    if tensor.is_cuda:
        with x64():
            return on_gpu.share_tensor(tensor)
    if not on_cpu():
        return _put(tensor)
    with x64():
        return jax.device_put(as_numpy(tensor))


def _put(tensor: torch.Tensor) -> jax.Array:
    with x64():
        if tensor.is_cuda:
            return jax.numpy.copy(on_gpu.share_tensor(tensor))
        return jax.device_put(constant(tensor))


def to_host(array: jax.Array) -> torch.Tensor:
    """The values of `array`: on a CPU device its own memory, which must not be written to; elsewhere a copy."""
    if on_cpu():
        try:
            return torch.from_dlpack(array)
        except (RuntimeError, TypeError, BufferError, ValueError):  # as in `share_memory`
            pass
    host = np.asarray(array)
    dtype = to_torch(host.dtype)
    if dtype.is_floating_point and dtype not in (torch.float32, torch.float64, torch.float16):
        bits = {1: np.uint8, 2: np.int16}[host.dtype.itemsize]  # torch does not support dtypes of ml_dtypes
        return torch.from_numpy(host.view(bits).copy()).view(dtype)
    return torch.from_numpy(host.copy())


scratch_pool.use()
_directory = pending_cache_directory()
if _directory is not None:
    use_compilation_cache(_directory)
