"""The dtypes that PyTorch computes in, and the casts between them.

PyTorch promotes in three ranks: tensors with dimensions, then tensors without, then Python numbers; a lower rank counts
only if its kind (bool, integer, floating, complex) is higher (`c10::TensorIterator` calls this the result type).
Arithmetic on bfloat16 and float16 is done in float32 and rounded once, at the end of the operation; the rounding is the
driver's, which casts every result to the dtype that capture recorded.

JAX's own promotion is never relied on: rules bring their operands to one dtype first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

Number = bool | int | float | complex

_PAIRS = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e4m3fnuz: jnp.float8_e4m3fnuz,
    torch.float8_e5m2: jnp.float8_e5m2,
    torch.float8_e5m2fnuz: jnp.float8_e5m2fnuz,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
}
_TO_JAX = {theirs: np.dtype(ours) for theirs, ours in _PAIRS.items()}
_TO_TORCH = {ours: theirs for theirs, ours in _TO_JAX.items()}
_REAL_OF = {np.dtype(np.complex64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.float64)}
_HALVES = {dtype for dtype in _TO_JAX.values() if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype (with the ml_dtypes extensions) that stands for a PyTorch dtype."""
    if dtype not in _TO_JAX:
        raise NotImplementedError(f"{dtype} has no counterpart in XLA; use one of {', '.join(map(str, _TO_JAX))}")
    return _TO_JAX[dtype]


def to_torch(dtype: Any) -> torch.dtype:
    """The inverse of `to_jax`."""
    return _TO_TORCH[np.dtype(dtype)]


def is_complex(dtype: np.dtype) -> bool:
    return dtype.kind == "c"


def is_integer(dtype: np.dtype) -> bool:
    """Bool counts: PyTorch sums, averages and divides bools as integers."""
    return dtype.kind in "biu"


def is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex))


def real_of(dtype: np.dtype) -> np.dtype:
    """The dtype of the absolute value."""
    return _REAL_OF.get(dtype, dtype)


def default_float() -> np.dtype:
    return _TO_JAX[torch.get_default_dtype()]


def floating(dtype: np.dtype) -> np.dtype:
    """What integers become in an operation that has only floating-point results, such as `sin` or true division."""
    return default_float() if is_integer(dtype) else dtype


def opmath(dtype: np.dtype) -> np.dtype:
    """What PyTorch does arithmetic in: float32 for the half precisions, the dtype itself for others."""
    return np.dtype(np.float32) if dtype in _HALVES else dtype


def accumulator(dtype: np.dtype) -> np.dtype:
    """What sums and products add up in: int64 for integers, float32 for the half precisions."""
    return np.dtype(np.int64) if is_integer(dtype) else opmath(dtype)


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


_COMPLEX_OF = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_COMPLEX_OF[torch.bfloat16] = getattr(torch, "bcomplex32", torch.complex64)  # a dtype of its own since PyTorch 2.15


def _outrank(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Combine the dtype of one rank with the dtype of the ranks below it."""
    if higher is None or lower is None:
        return higher or lower
    if _kind(lower) <= _kind(higher):
        return higher
    if higher.is_floating_point:  # and so lower is complex: its kind counts, the precision is that of higher
        return _COMPLEX_OF[higher]
    return torch.promote_types(higher, lower)


_NUMBER_DTYPE = {bool: torch.bool, int: torch.int64}


@functools.cache
def _promoted(keys: tuple, default: torch.dtype) -> np.dtype:
    ranks: list[torch.dtype | None] = [None, None, None]
    for rank, dtype in keys:
        if rank == 2:
            dtype = _NUMBER_DTYPE.get(dtype) or (default if dtype is float else _COMPLEX_OF[default])
        else:
            dtype = _TO_TORCH[dtype]
        ranks[rank] = dtype if ranks[rank] is None else torch.promote_types(ranks[rank], dtype)
    found = _outrank(ranks[0], _outrank(ranks[1], ranks[2]))
    assert found is not None, "promotion of nothing"
    return to_jax(found)


def promoted(*args: Any) -> np.dtype:
    """The dtype of `torch.result_type` over arrays (with or without dimensions) and Python numbers."""
    keys = tuple((2, type(x)) if is_number(x) else (0 if x.ndim else 1, np.dtype(x.dtype)) for x in args)
    return _promoted(keys, torch.get_default_dtype())


def cast(x: Any, dtype: np.dtype) -> Any:
    """Convert an array or a number as C++ would: complex to real drops the imaginary part, to bool is `!= 0`."""
    if is_number(x):
        return np.asarray(x.real if isinstance(x, complex) and not is_complex(dtype) else x).astype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "b" and dtype.kind not in "biu":
        # XLA takes a product with a converted bool for a choice, and then inf * 0 for 0, and not for NaN.
        return lax.select(x, lax.full(x.shape, 1, dtype), lax.full(x.shape, 0, dtype))
    if dtype.kind != "b":
        if is_complex(x.dtype) and not is_complex(dtype):
            x = lax.real(x)
        if x.dtype.kind not in "biu" and dtype.kind in "iu" and dtype.itemsize < 4:
            # C++ converts to a wide integer and then keeps the low bits, where XLA saturates.
            x = lax.convert_element_type(x, np.int64)
    return lax.convert_element_type(x, dtype)


def known(x: Any, number: Number) -> bool:
    """Whether `x` is `number`. A number that is known only when the step runs, an array without dimensions, is not."""
    return is_number(x) and x == number


def times(x: Any, factor: Any) -> Any:
    """`x * factor`, for a number or an array without dimensions, in the dtype of `x`."""
    return x if known(factor, 1) else x * cast(factor, x.dtype)


def rounded(x: Any, dtype: np.dtype) -> Any:
    """Round to a narrower floating-point dtype but keep computing in the wide one.

    Two casts would do the same, if XLA were not free to drop such a pair.
    """
    info = jnp.finfo(dtype)
    return x if x.dtype == dtype else lax.reduce_precision(x, info.nexp, info.nmant)


def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    """Expand `x` to `shape`, dimensions lined up at the right."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    lead = len(shape) - x.ndim
    kept = [d for d in range(x.ndim) if x.shape[d] == shape[lead + d]]
    x = lax.reshape(x, [x.shape[d] for d in kept]) if len(kept) < x.ndim else x
    return lax.broadcast_in_dim(x, shape, [lead + d for d in kept])


def broadcast(*arrays: Any) -> list[Any]:
    """Expand arrays to one shape, which `jax.lax` wants of all its operands."""
    shapes = {x.shape for x in arrays}
    if len(shapes) == 1:
        return list(arrays)
    shape = np.broadcast_shapes(*shapes)
    return [broadcast_to(x, shape) for x in arrays]


def operands(*args: Any, dtype: np.dtype | None = None) -> list[Any]:
    """Arguments of a pointwise operation, in one dtype (by default the one PyTorch computes in) and one shape."""
    dtype = opmath(promoted(*args)) if dtype is None else dtype
    return broadcast(*(cast(x, dtype) for x in args))


def floats(*args: Any) -> list[Any]:
    """As `operands`, for operations whose results are floating point even for integers."""
    return operands(*args, dtype=opmath(floating(promoted(*args))))


def where(condition: Any, x: Any, y: Any) -> Any:
    """`lax.select` with broadcasting; of `x` and `y`, one may be a number, which takes the other's dtype."""
    dtype = y.dtype if is_number(x) else x.dtype
    return lax.select(*broadcast(condition, cast(x, dtype), cast(y, dtype)))


def impossible(dtype: np.dtype) -> float | int | None:
    """What stands where eager PyTorch would have raised: NaN; of integers the smallest, or the largest of those that
    have no sign; None of booleans."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max)
    return None if dtype.kind == "b" else np.nan


def axis(dim: int, ndim: int) -> int:
    """A dimension counted from the left; a tensor without dimensions counts as having one, as in PyTorch."""
    return dim % max(ndim, 1)


def axes(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dimensions that a reduction goes over: none given means all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(axis(d, ndim) for d in dims)) if ndim else ()
