"""Dtypes: PyTorch's type promotion, the dtypes of computations, and casts.

PyTorch promotes in three ranks: tensors with dimensions, scalar tensors, and Python numbers; a lower rank counts only
if its kind (bool, integer, floating, complex) is higher (`c10::TensorIterator`'s result type). Arithmetic on bfloat16
and float16 is done in float32 and rounded once at the end of the operation; the rounding is done by the driver, which
casts every result to the dtype that capture recorded.

JAX's own promotion is not relied on: rules convert their operands to one dtype first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from .registry import XLA_DTYPES

Number = bool | int | float | complex

_TO_JAX = {dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in XLA_DTYPES}  # with those of ml_dtypes
_TO_TORCH = {dtype: torch_dtype for torch_dtype, dtype in _TO_JAX.items()}
_REAL_OF = {np.dtype(np.complex64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.float64)}
_HALVES = {dtype for dtype in _TO_JAX.values() if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype (with the ml_dtypes extensions) of a PyTorch dtype."""
    if dtype not in _TO_JAX:
        raise NotImplementedError(f"{dtype} has no counterpart in XLA; use one of {', '.join(map(str, _TO_JAX))}")
    return _TO_JAX[dtype]


def to_torch(dtype: Any) -> torch.dtype:
    """The inverse of `to_jax`."""
    return _TO_TORCH[np.dtype(dtype)]


def is_complex(dtype: np.dtype) -> bool:
    return dtype.kind == "c"


def is_integer(dtype: np.dtype) -> bool:
    """Includes bool: PyTorch sums, averages and divides bools as integers."""
    return dtype.kind in "biu"


def is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex))


def real_of(dtype: np.dtype) -> np.dtype:
    """The dtype of the absolute value."""
    return _REAL_OF.get(dtype, dtype)


def default_float() -> np.dtype:
    return _TO_JAX[torch.get_default_dtype()]


def floating(dtype: np.dtype) -> np.dtype:
    """The dtype of the result for integers of operations that always return floating point, such as `sin`."""
    return default_float() if is_integer(dtype) else dtype


def opmath(dtype: np.dtype) -> np.dtype:
    """The dtype that PyTorch computes in: float32 for half precisions, otherwise the dtype itself."""
    return np.dtype(np.float32) if dtype in _HALVES else dtype


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype of accumulation in sums and products: int64 for integers, float32 for half precisions."""
    return np.dtype(np.int64) if is_integer(dtype) else opmath(dtype)


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


_COMPLEX_OF = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_COMPLEX_OF[torch.bfloat16] = getattr(torch, "bcomplex32", torch.complex64)  # a separate dtype since PyTorch 2.15


def _outrank(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Combine the dtype of one rank with that of the lower ranks."""
    if higher is None or lower is None:
        return higher or lower
    if _kind(lower) <= _kind(higher):
        return higher
    if higher.is_floating_point:  # lower is complex: keep its kind, with the precision of higher
        return _COMPLEX_OF[higher]
    return torch.promote_types(higher, lower)


_NUMBER_DTYPE = {bool: torch.bool, int: torch.int64}


@functools.cache
def _promoted(keys: tuple[Any, ...], default: torch.dtype) -> np.dtype:
    ranks: list[torch.dtype | None] = [None, None, None]
    for rank, dtype in keys:
        if rank == 2:
            dtype = _NUMBER_DTYPE.get(dtype) or (default if dtype is float else _COMPLEX_OF[default])
        else:
            dtype = _TO_TORCH[dtype]
        ranks[rank] = dtype if ranks[rank] is None else torch.promote_types(ranks[rank], dtype)
    dtype_of_all = _outrank(ranks[0], _outrank(ranks[1], ranks[2]))
    assert dtype_of_all is not None, "no operands"
    return to_jax(dtype_of_all)


def promoted(*args: Any) -> np.dtype:
    """The dtype of `torch.result_type` for arrays and Python numbers."""
    keys = tuple((2, type(x)) if is_number(x) else (0 if x.ndim else 1, np.dtype(x.dtype)) for x in args)
    return _promoted(keys, torch.get_default_dtype())


def cast(x: Any, dtype: np.dtype) -> Any:
    """Convert an array or a number like C++: complex to real drops the imaginary part, to bool is `!= 0`."""
    if is_number(x):
        return np.asarray(x.real if isinstance(x, complex) and not is_complex(dtype) else x).astype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "b" and dtype.kind not in "biu":
        # XLA turns a product with a converted bool into a select, with inf * 0 = 0 rather than NaN.
        return lax.select(x, lax.full(x.shape, 1, dtype), lax.full(x.shape, 0, dtype))
    if dtype.kind != "b":
        if is_complex(x.dtype) and not is_complex(dtype):
            x = lax.real(x)
        if x.dtype.kind not in "biu" and dtype.kind in "iu" and dtype.itemsize < 4:
            # C++ converts to a wide integer and keeps the low bits, whereas XLA saturates.
            x = lax.convert_element_type(x, np.int64)
    return lax.convert_element_type(x, dtype)


def equals_number(x: Any, number: Number) -> bool:
    """Whether `x` is the Python number `number`; False for a scalar array, whose value is known only at run time."""
    return is_number(x) and x == number


def times(x: Any, factor: Any) -> Any:
    """`x * factor` in the dtype of `x`, for a number or a scalar array."""
    return x if equals_number(factor, 1) else x * cast(factor, x.dtype)


def rounded(x: Any, dtype: np.dtype) -> Any:
    """Round to a narrower floating-point dtype but keep computing in the wide one.

    A pair of casts would do the same, but XLA may remove it.
    """
    info = jnp.finfo(dtype)
    return x if x.dtype == dtype else lax.reduce_precision(x, info.nexp, info.nmant)


def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    """Expand `x` to `shape`, with dimensions aligned at the right."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    lead = len(shape) - x.ndim
    same = [d for d in range(x.ndim) if x.shape[d] == shape[lead + d]]
    x = lax.reshape(x, [x.shape[d] for d in same]) if len(same) < x.ndim else x
    return lax.broadcast_in_dim(x, shape, [lead + d for d in same])


def broadcast(*arrays: Any) -> list[Any]:
    """Expand arrays to a common shape, as operands of `jax.lax` must have."""
    shapes = {x.shape for x in arrays}
    if len(shapes) == 1:
        return list(arrays)
    shape = np.broadcast_shapes(*shapes)
    return [broadcast_to(x, shape) for x in arrays]


def operands(*args: Any, dtype: np.dtype | None = None) -> list[Any]:
    """Convert operands of a pointwise operation to one dtype (by default the one PyTorch computes in) and one shape."""
    dtype = opmath(promoted(*args)) if dtype is None else dtype
    return broadcast(*(cast(x, dtype) for x in args))


def narrowed(*args: Any) -> list[Any]:
    """Like `operands`. In half precision, numbers and scalars of another dtype are rounded to it first, as in PyTorch's
    CPU kernels of sums, differences, powers, remainders and comparisons, but not of products and quotients."""
    dtype = promoted(*args)
    return operands(*(number_in(x, dtype) for x in args), dtype=opmath(dtype))


def number_in(x: Any, dtype: np.dtype) -> Any:
    """`x`, rounded to `dtype` if that is a half precision, in float32."""
    if dtype not in _HALVES or not is_number(x) and x.dtype == dtype:
        return x
    if is_number(x):
        return np.asarray(x).astype(dtype).astype(np.float32)
    return rounded(cast(x, np.dtype(np.float32)), dtype)


def floats(*args: Any) -> list[Any]:
    """Like `operands`, for operations whose results are floating point even for integers."""
    return operands(*args, dtype=opmath(floating(promoted(*args))))


def where(condition: Any, x: Any, y: Any) -> Any:
    """`lax.select` with broadcasting; one of `x` and `y` may be a number, which is converted to the other's dtype."""
    dtype = y.dtype if is_number(x) else x.dtype
    return lax.select(*broadcast(condition, cast(x, dtype), cast(y, dtype)))


def kept(y: Any, x: Any) -> Any:
    """`y`, which is added to or divides a floating-point `x` of its shape, hidden from XLA's simplifications.

    XLA makes `x * (1 / y)` of `x / y` if `y` is constant or broadcast, and `x + (y + z)` of `(x + y) + z` if `y` and
    `z` are constant. Then 49 / 49 can be less than 1, and `(x + 1e8) - 1e8` is `x`; what is truncated next differs by
    1 from eager PyTorch. It does not if `y` depends on `x`: where `x` is NaN, it is used twice, which gives NaN, too.
    """
    return y if is_integer(x.dtype) or is_complex(x.dtype) else _kept(y, x)


# A function of its own in the jaxpr, so that what reads it finds that only `y` matters.
@jax.jit
def _kept(y: Any, x: Any) -> Any:
    return lax.select(x == x, y, x)


def is_kept(eqn: Any) -> bool:
    """Whether an equation of a jaxpr is a call of `kept`, whose result is its first operand."""
    return eqn.primitive.name == "jit" and eqn.params["name"] == _kept.__name__


def divide(x: Any, y: Any) -> Any:
    """`x / y` in the dtype of `x`, correctly rounded; a number or a smaller array is broadcast."""
    x, y = broadcast(x, cast(y, x.dtype))
    return lax.div(x, kept(y, x))


def error_value(dtype: np.dtype) -> float | int | None:
    """The value that marks an error where eager PyTorch would raise: NaN; the smallest signed or largest unsigned
    integer; None for bool."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max)
    return None if dtype.kind == "b" else np.nan


def axis(dim: int, ndim: int) -> int:
    """Normalize a dimension to be non-negative; a scalar counts as one-dimensional, as in PyTorch."""
    return dim % max(ndim, 1)


def axes(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dimensions of a reduction; None or empty means all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(axis(d, ndim) for d in dims)) if ndim else ()


def constant(tensor: torch.Tensor) -> np.ndarray:
    """A torch tensor's values as a row-major NumPy array (bfloat16 etc. by ml_dtypes)."""
    return as_numpy(tensor).copy()


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Like `constant`, sharing the memory of a row-major tensor."""
    tensor = tensor.detach().contiguous()
    dtype = to_jax(tensor.dtype)
    if tensor.dtype.is_floating_point and tensor.dtype not in (torch.float32, torch.float64, torch.float16):
        integer = {1: torch.uint8, 2: torch.int16}[tensor.itemsize]
        return tensor.view(integer).numpy().view(dtype)
    return tensor.numpy().astype(dtype, copy=False)
