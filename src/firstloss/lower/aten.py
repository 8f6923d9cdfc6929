"""PyTorch's own kernels as custom calls in a compiled step on a CPU, where they are faster than XLA's.

XLA's convolutions on a CPU run on one core if there are few channels, compute bfloat16 in float32, and require another
layout of the weight than PyTorch's; PyTorch uses oneDNN. PyTorch's attention never stores the whole matrix of scores.
Of matrix products, MKL computes those in float32 faster than XLA on Intel processors, and oneDNN those in bfloat16 if
the processor has AMX, or the gradients of weights if it has other instructions for it. A custom call (`_aten.c`) passes
an operation's arrays to PyTorch through the C interface of its ahead-of-time compiler (`aoti_torch_...` in
libtorch_cpu), which needs neither Python nor C++. Norms (`_norms.h`) are calls of our own, since XLA compiles six loops
and more for each shape, which take two to six times as long, and so are random bits (`threefry.py`) and an optimizer's
updates (`fused_updates.py`). Sorts, scans and others go through PyTorch's dispatcher (`dispatched.py`). If that
interface is missing, or `_aten.c` was not compiled, XLA computes the operation.

Only steps for a single CPU device are lowered `within` this: an array on a mesh is sharded, and a module written to a
file must run without PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from .. import c_library, processor
from ..interpreter import interruptible_inside

TARGETS = (
    "firstloss_convolution",
    "firstloss_convolution_backward",
    "firstloss_product",
    "firstloss_attention",
    "firstloss_attention_backward",
    "firstloss_pointwise",
    "firstloss_batch_norm",
    "firstloss_batch_norm_backward",
    "firstloss_threefry",
    "firstloss_row_norm",
    "firstloss_row_norm_backward",
    "firstloss_dispatch",
)
_FUNCTIONS = (  # in the order of the structure in _aten.c
    "aoti_torch_dtype_float32",
    "aoti_torch_dtype_float64",
    "aoti_torch_dtype_bfloat16",
    "aoti_torch_device_type_cpu",
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_copy_",
    "aoti_torch_cpu_convolution",
    "aoti_torch_cpu_convolution_backward",
    "torch_call_dispatcher",
    "torch_new_list_reserve_size",
    "torch_list_push_back",
    "_Znwm",  # operator new(size_t)
    "aoti_torch_cpu_mm_out",
    "aoti_torch_cpu_addmm_out",
    "aoti_torch_cpu_bmm_out",
    "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
    "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward",
    "_ZN2at15get_num_threadsEv",  # at::get_num_threads()
    "omp_set_num_threads",
)
_WHAT = "torch_exception_get_what_without_backtrace"  # since 2.13
_MKL_THREADS = "MKL_Set_Num_Threads_Local"  # on one thread, like the one before it
_within: ContextVar[bool] = ContextVar("firstloss_aten", default=False)


@interruptible_inside
def within(allowed: bool = True) -> Iterator[None]:
    """Context in which lowered code may call PyTorch's kernels, if they are available."""
    token = _within.set(allowed and bool(torch.backends.mkldnn.enabled) and registered_with_xla())
    try:
        yield
    finally:
        _within.reset(token)


def usable() -> bool:
    """Whether code being lowered may call PyTorch's kernels."""
    return _within.get()


@functools.cache
def registered_with_xla() -> bool:
    """Whether XLA has the custom calls; registers them at the first call."""
    entry = (ctypes.c_void_p, (ctypes.c_void_p,))
    set_up = (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int))
    ours = c_library.load(__file__, "_aten", {**dict.fromkeys(TARGETS, entry), "firstloss_aten": set_up})
    functions = _functions()
    if ours is None or functions is None or not torch.backends.mkldnn.is_available():
        return False
    array = (ctypes.c_void_p * len(functions))(*functions)
    if ours.firstloss_aten(ctypes.cast(array, ctypes.c_void_p), len(functions)):
        return False
    jax.devices("cpu")  # initialize first: after a rejected handler this would fail
    try:
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(ours, name)), platform="cpu", api_version=1)
    except Exception as error:  # another version of the interface: fall back to XLA
        print(f"firstloss: no kernels of PyTorch's are called in steps on CPU devices ({error})", file=sys.stderr)
        return False
    return True


@functools.cache
def library() -> ctypes.CDLL:
    """PyTorch's library for the CPU."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))


def _sets_mkl_threads() -> bool:
    """Whether PyTorch's MKL can be limited to one thread per call."""
    return hasattr(library(), _MKL_THREADS)


def _functions() -> list[int] | None:
    """The addresses of PyTorch's functions, or None if one is missing."""
    try:
        found = [getattr(library(), name) for name in _FUNCTIONS]
        found += [getattr(library(), name, None) for name in (_MKL_THREADS, _WHAT)]
        found += [ctypes.pythonapi.PyGILState_GetThisThreadState]
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]
    except (OSError, AttributeError):
        return None


def _bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16."""
    return _has("avx512_bf16") or _has("amx_bf16")


@functools.cache
def _has(capability: str) -> bool:
    """Whether PyTorch uses these instructions of the processor; older versions cannot tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get(capability))


def computes(dtype: np.dtype) -> bool:
    """Whether PyTorch supports an operation on arrays of `dtype`, and is fast."""
    return usable() and (dtype == np.float32 or (dtype == jnp.bfloat16 and _bfloat16()))


def _how(stride: Sequence[int], padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int) -> Any:
    return np.array([int(transposed), groups, *stride, *padding, *dilation, *output_padding], np.int64)


def convolution(x: Any, weight: Any, bias: Any, shape: Sequence[int], *how: Any) -> Any:
    """`aten.convolution`: a result of `shape` and the dtype of `x`.

    Args:
        how: stride, padding, dilation (a number for each dimension of space), transposed, output_padding, groups.
    """
    call = jax.ffi.ffi_call(TARGETS[0], jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, weight, *([] if bias is None else [bias]), how=_how(*how))


def convolution_backward(grad_output: Any, x: Any, weight: Any, wanted: Sequence[bool], *how: Any) -> list[Any]:
    """`aten.convolution_backward` for the input and the weight, as selected by `wanted`; None for the other."""
    kinds = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a, w in zip((x, weight), wanted, strict=True) if w]
    call = jax.ffi.ffi_call(TARGETS[1], kinds)
    made = iter(call(grad_output, x, weight, how=_how(*how), wanted=np.array(wanted, np.int64)))
    return [next(made) if w else None for w in wanted]


# XLA computes products and attention with fewer multiplications: a call costs more than it gains. (With calls from 2^20
# on, the step of a Llama with hidden size 64 and 24 layers took 30 ms instead of 21.)
_LEAST_PRODUCT = 1 << 22
_LEAST_ATTENTION = 1 << 22


@functools.cache
def _mkl() -> bool:
    """Whether products of float32 matrices are faster by MKL than by XLA: on Intel's processors. (Two cores of a Xeon
    multiply gradients by activations at 380 GFLOP/s and 140 to 280; a core of an EPYC multiplies at 100 and 210.)"""
    intel = processor.fields().get("vendor_id") == "GenuineIntel"
    return intel and torch.backends.mkl.is_available() and _sets_mkl_threads()


def multiplies(x: Any, y: Any, by_columns: Sequence[bool]) -> bool:
    """Whether PyTorch should compute the product of two matrices, or of each pair in two batches.

    Args:
        by_columns: which of the two lie in memory by columns.
    """
    if x.dtype != y.dtype or not computes(x.dtype) or x.size * y.shape[-1] < _LEAST_PRODUCT:
        return False
    if x.dtype != np.float32:  # XLA does not use AMX (4 ms instead of 22 for 788 x 768 x 3072)
        return bool(by_columns[0]) or _has("amx_bf16")  # XLA packs what lies by columns slowly: a weight's gradient
    return _mkl()


def product(x: Any, y: Any, by_columns: Sequence[bool]) -> Any:
    """The products, in the dtype of the matrices; arguments as for `multiplies`."""
    call = jax.ffi.ffi_call(TARGETS[2], jax.ShapeDtypeStruct((*x.shape[:-1], y.shape[-1]), x.dtype))
    # In memory order: XLA removes a transpose of a transpose.
    given = (jnp.swapaxes(a, -1, -2) if columns else a for a, columns in zip((x, y), by_columns, strict=True))
    return call(*given, by_columns=np.array(by_columns, np.int64))


def attends(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Whether PyTorch should compute the attention, by the kernel that never stores all scores: in float32, and where
    AMX multiplies in bfloat16. (Elsewhere that kernel repacks its operands for each block of bfloat16: a Llama's step
    takes 1.6 times as long as with XLA.)"""
    dtype = query.dtype
    if not computes(dtype) or not (dtype == np.float32 or _has("amx_bf16")):
        return False
    if not dtype == key.dtype == value.dtype or query.ndim != 4:
        return False
    if 0 in (*query.shape, *key.shape) or query.shape[3] != value.shape[3] or query.shape[1] % key.shape[1]:
        return False
    if query.size * key.shape[2] < _LEAST_ATTENTION:  # the multiplications of the scores
        return False
    return mask is None or (mask.ndim == 4 and mask.dtype in (np.float32, dtype))


def _heads(x: Any) -> Any:
    """(batch, heads, length, ...) from (batch, length, heads, ...), and back."""
    return lax.transpose(x, (0, 2, 1, *range(3, x.ndim)))


def attention(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> list[Any]:
    """`aten._scaled_dot_product_flash_attention_for_cpu`: the output, and the logarithms of the scores' sums."""
    batch, heads, length, _ = query.shape
    kinds = [((batch, length, heads, value.shape[3]), query.dtype), ((batch, length, heads), np.dtype(np.float32))]
    call = jax.ffi.ffi_call(TARGETS[3], [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    return [_heads(x) for x in call(*_attended((query, key, value), mask), **_numbers(causal, scale))]


def attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, mask: Any, causal: bool, scale: float
) -> list[Any]:
    """The derivatives with respect to query, key and value."""
    given = _attended((grad_out, query, key, value, out, logsumexp), mask)
    call = jax.ffi.ffi_call(TARGETS[4], [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[1:4]])
    return [_heads(x) for x in call(*given, **_numbers(causal, scale))]


# Of a channel's elements that follow each other in memory: fewer are no vector, which only costs where there are many.
_LEAST_ROW = 16
_FEW_ELEMENTS = 1 << 16


def _wide(vectors: Sequence[Any]) -> list[Any]:
    """Those that are given, in float32."""
    return [lax.convert_element_type(v, np.float32) for v in vectors if v is not None]


def normalizes(elements: Sequence[Any], length: int, *vectors: Any) -> bool:
    """Whether a normalization should be one call: XLA compiles six loops and more for each new shape of its input,
    which take up to three times as long.

    Args:
        elements: the input, and the gradient of the output, if it is the backward pass: all float32, or all bfloat16.
        length: how many elements of a row or channel follow each other in memory.
        vectors: the weight, the statistics and others; some may be None.
    """
    x = elements[0]
    if {e.dtype for e in elements} not in ({np.dtype(np.float32)}, {np.dtype(jnp.bfloat16)}):
        return False
    if not usable() or not all(v is None or v.dtype in (np.float32, jnp.bfloat16) for v in vectors) or not x.size:
        return False
    return length >= _LEAST_ROW or x.size <= _FEW_ELEMENTS


def batch_norm(x: Any, weight: Any, bias: Any, running: Sequence[Any], momentum: float, eps: float) -> list[Any]:
    """Batch norm in training: the output and, in float32, mean, inverse deviation and new running statistics.

    Args:
        running: the running mean and variance, or nothing.
    """
    channel = jax.ShapeDtypeStruct((x.shape[1],), np.float32)
    call = jax.ffi.ffi_call(TARGETS[6], [jax.ShapeDtypeStruct(x.shape, x.dtype), *[channel] * (2 + len(running))])
    given = np.array([weight is not None, bias is not None, len(running)], np.int64)
    vectors = _wide((weight, bias, *running))
    return list(call(x, *vectors, given=given, numbers=np.array([eps, momentum], np.float64)))


def batch_norm_backward(grad_output: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> list[Any]:
    """The derivatives with respect to the input and, in float32, the weight and the bias."""
    channel = jax.ShapeDtypeStruct(mean.shape, np.float32)
    call = jax.ffi.ffi_call(TARGETS[7], [jax.ShapeDtypeStruct(x.shape, x.dtype), channel, channel])
    return list(call(grad_output, x, *_wide((mean, rstd, weight))))


def row_norm(
    x: Any, weight: Any, bias: Any, eps: float, centered: bool = True, groups: int = 1, repeat: int = 0
) -> list[Any]:
    """The output and, in float32, the inverse deviations and, if rows are `centered`, the means.

    Args:
        x: (rows, length).
        weight, bias: (length,), or None; of a group norm, one number for each channel of all groups.
        groups, repeat: of a group norm, and the elements of each channel, of which a row has one or more.
    """
    row = jax.ShapeDtypeStruct((x.shape[0],), np.float32)
    call = jax.ffi.ffi_call(TARGETS[9], [jax.ShapeDtypeStruct(x.shape, x.dtype), *[row] * (2 if centered else 1)])
    given = np.array([centered, groups, repeat, weight is not None, bias is not None], np.int64)
    return list(call(x, *_wide((weight, bias)), given=given, numbers=np.array([eps], np.float64)))


def row_norm_backward(
    g: Any, x: Any, mean: Any, rstd: Any, weight: Any, wanted: Sequence[bool], groups: int = 1, repeat: int = 0
) -> list[Any]:
    """The derivatives by input and, in float32, weight and bias, as selected by `wanted`; None for others.

    Args:
        g: the gradient of the output, like `x`.
        mean: None if rows are not centered.
        groups, repeat: as for `row_norm`.
    """
    vector = jax.ShapeDtypeStruct((groups * (x.shape[1] // repeat) if repeat else x.shape[1],), np.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype), vector, vector
    call = jax.ffi.ffi_call(TARGETS[10], [kind for kind, w in zip(like, wanted, strict=True) if w])
    given = np.array([mean is not None, groups, repeat, weight is not None, *wanted], np.int64)
    made = iter(call(g, x, *_wide((rstd, mean, weight)), given=given))
    return [next(made) if w else None for w in wanted]


def _attended(arrays: Sequence[Any], mask: Any) -> list[Any]:
    return [*map(_heads, arrays), *([] if mask is None else [mask])]


def _numbers(causal: bool, scale: float) -> dict[str, np.ndarray]:
    return {"causal": np.array([causal], np.int64), "scale": np.array([scale], np.float64)}
