"""Operations that PyTorch's own kernel computes in a step on a CPU device, because XLA's code for them is slow there.

XLA scans, sorts and scatters on one core, mostly element by element: `logcumsumexp` takes it twelve times as long as
PyTorch. A row of the table below names the overload that writes to given results, and along which dimension the
operation may be cut, so that each core computes a part. There is one custom call for all of them (`firstloss_dispatch`
in `_aten.c`), which calls PyTorch's dispatcher by name, without Python. Elsewhere, and where a row does not apply, the
rule in `RULES` lowers the operation.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.ops import aten

from ..compat.torch_names import OpOverload, schema_of
from .aten import library
from .dtypes import to_jax

# Elements: fewer are XLA's, since a call takes 20 microseconds.
_LEAST = 1 << 12
_LEAST_SOLVED = 1  # XLA takes long to compile them, whatever their size
_LEAST_SORTED = 1  # XLA takes numbers close to zero for zero when it compares them
_LEAST_ELEMENTWISE = 1 << 14  # XLA may compute these together with what is around them

_NONE, _NUMBER, _LIST, _ARRAY, _RESULT, _OPTIONAL = range(6)  # the entries of `_aten.c`
_MOST_DIMENSIONS = 8  # likewise


class Kernel(NamedTuple):
    """
    Attributes:
        overload: writes the results to tensors that it is given.
        cut: returns the dimension of all arrays along which the operation may be cut, given its arguments; or None.
        least: elements of the smallest array of the first one's rank, from which on PyTorch computes the operation.
    """

    overload: str
    cut: Callable[[dict[str, Any]], int | None]
    least: int = _LEAST


def _beside_dim(given: dict[str, Any]) -> int | None:
    """The outermost dimension but those along which the operation works."""
    shape = given["self"].shape
    dims = [given["dim"]] if isinstance(given["dim"], int) else given["dim"]
    worked = {d % max(len(shape), 1) for d in dims}
    return next((d for d, size in enumerate(shape) if d not in worked and size > 1), None)


def _first(given: dict[str, Any]) -> int | None:
    return 0


def _matrices(given: dict[str, Any]) -> int | None:
    return 0 if next(iter(given.values())).ndim > 2 else None


def _no(given: dict[str, Any]) -> int | None:
    return None


_elementwise = functools.partial(Kernel, cut=_first, least=_LEAST_ELEMENTWISE)

TABLE: dict[OpOverload, Kernel] = {
    # Scans: XLA's are elementwise loops, and `logcumsumexp` takes twelve times as long.
    aten.logcumsumexp.default: Kernel("logcumsumexp.out", _beside_dim),
    aten.cumsum.default: Kernel("cumsum.out", _beside_dim),
    aten.cumprod.default: Kernel("cumprod.out", _beside_dim),
    aten.cummax.default: Kernel("cummax.out", _beside_dim),
    aten.cummin.default: Kernel("cummin.out", _beside_dim),
    # Sorts: XLA sorts on one core, with a comparison that is a function (a sort takes 7 times as long, a topk 100).
    aten.sort.default: Kernel("sort.values", _beside_dim, _LEAST_SORTED),
    aten.sort.stable: Kernel("sort.values_stable", _beside_dim, _LEAST_SORTED),
    aten.topk.default: Kernel("topk.values", _beside_dim, _LEAST_SORTED),
    aten.kthvalue.default: Kernel("kthvalue.values", _beside_dim, _LEAST_SORTED),
    aten.median.dim: Kernel("median.dim_values", _beside_dim, _LEAST_SORTED),
    aten.nanmedian.dim: Kernel("nanmedian.dim_values", _beside_dim, _LEAST_SORTED),
    aten.median.default: Kernel("median.out", _no, _LEAST_SORTED),
    aten.nanmedian.default: Kernel("nanmedian.out", _no, _LEAST_SORTED),
    aten.mode.default: Kernel("mode.values", _beside_dim, _LEAST_SORTED),
    aten.max.dim: Kernel("max.dim_max", _beside_dim),
    aten.min.dim: Kernel("min.dim_min", _beside_dim),
    # Scatters: XLA's are on one core, element by element.
    aten.scatter_add.default: Kernel("scatter_add.out", _beside_dim),
    aten.scatter.src: Kernel("scatter.src_out", _beside_dim, 1 << 14),
    aten.grid_sampler_2d.default: Kernel("grid_sampler_2d.out", _first),
    aten.grid_sampler_2d_backward.default: Kernel("grid_sampler_2d_backward.out", _first),
    aten.reflection_pad1d_backward.default: Kernel("reflection_pad1d_backward.grad_input", _first),
    aten.reflection_pad2d_backward.default: Kernel("reflection_pad2d_backward.grad_input", _first),
    aten.replication_pad1d_backward.default: Kernel("replication_pad1d_backward.grad_input", _first),
    aten.replication_pad2d_backward.default: Kernel("replication_pad2d_backward.grad_input", _first),
    # Factorizations, and what is solved by them: LAPACK's both, but XLA compiles loops around it (0.2 to 0.4 s each).
    aten.linalg_inv_ex.default: Kernel("linalg_inv_ex.inverse", _matrices, _LEAST_SOLVED),
    aten.linalg_lu_factor_ex.default: Kernel("linalg_lu_factor_ex.out", _matrices, _LEAST_SOLVED),
    aten.linalg_lu_solve.default: Kernel("linalg_lu_solve.out", _matrices, _LEAST_SOLVED),
    aten._linalg_slogdet.default: Kernel("_linalg_slogdet.sign", _matrices, _LEAST_SOLVED),
    aten._linalg_solve_ex.default: Kernel("_linalg_solve_ex.result", _matrices, _LEAST_SOLVED),
    # Fourier transforms: XLA's are on one core.
    aten._fft_r2c.default: Kernel("_fft_r2c.out", _beside_dim),
    aten._fft_c2r.default: Kernel("_fft_c2r.out", _beside_dim),
    aten._fft_c2c.default: Kernel("_fft_c2c.out", _beside_dim),
    # Elementwise functions that PyTorch computes in vectors, and XLA by a call for each element.
    aten.sin.default: _elementwise("sin.out"),
    aten.cos.default: _elementwise("cos.out"),
    aten.tan.default: _elementwise("tan.out"),
    aten.asin.default: _elementwise("asin.out"),
    aten.acos.default: _elementwise("acos.out"),
    aten.atan.default: _elementwise("atan.out"),
    aten.exp2.default: _elementwise("exp2.out"),
    aten.erfinv.default: _elementwise("erfinv.out"),
    aten.lgamma.default: _elementwise("lgamma.out"),
    aten.igamma.default: _elementwise("igamma.out"),
    aten.fmod.Tensor: _elementwise("fmod.Tensor_out"),
}


def call(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> list[Any] | None:
    """The results of an operation by PyTorch's kernel; None if the table has none for it, or for such arguments.

    Args:
        op: a functional overload.
        args, kwargs: with arrays in place of tensors.
        results: the shapes and dtypes that eager PyTorch's have.
    """
    kernel = TABLE.get(op)
    if kernel is None:
        return None
    parameters = schema_of(op).arguments
    given = dict(zip((p.name for p in parameters), args, strict=False)) | kwargs
    given = {p.name: given.get(p.name, p.default_value) for p in parameters}
    arrays = [argument for argument in given.values() if _is_array(argument)]
    shapes = [shape for shape, _ in results]
    smallest = min(array.size for array in arrays if array.ndim == arrays[0].ndim)
    everything = [*(array.shape for array in arrays), *shapes]
    if smallest < kernel.least or any(0 in shape or len(shape) > _MOST_DIMENSIONS for shape in everything):
        return None
    name, _, overload = kernel.overload.partition(".")
    cut, cuts = _cuts(kernel.cut(given), given, arrays, shapes)
    words: list[int] = []
    made = 0
    for parameter in schema_of(getattr(getattr(aten, name), overload)).arguments:
        argument, kind = given.get(parameter.name), parameter.type.kind()
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            if made == len(results):  # not all are wanted
                return None
            entry = _described(_RESULT, made, results[made][1], cuts[made])
            made += 1
        elif kind == "TensorType":
            number = next((i for i, array in enumerate(arrays) if array is argument), None)
            entry = None if number is None else _described(_ARRAY, number, _torch_dtype(argument), cut)
        else:
            optional = kind == "OptionalType" and argument is not None
            entry = _constant(argument, parameter.type.getElementType().kind() if optional else kind)
            words += [_OPTIONAL] * optional
        if entry is None:
            return None
        words += entry
    kinds = [jax.ShapeDtypeStruct(shape, to_jax(dtype)) for shape, dtype in results]
    target = jax.ffi.ffi_call("firstloss_dispatch", kinds)
    return list(target(*arrays, name=_text(f"aten::{name}", overload), operands=np.array(words, np.int64)))


def _described(entry: int, number: int, dtype: torch.dtype | None, cut: int) -> list[int] | None:
    """An array or a result; None if PyTorch's kernels would not take its dtype."""
    return [entry, number, *_kind(dtype), cut] if dtype in _DTYPES else None


def _constant(argument: Any, kind: str) -> list[int] | None:
    """How an operand of a kind that is no array is passed; None if it cannot be."""
    if argument is None:
        return [_NONE]
    if kind == "FloatType" and type(argument) in (int, float):
        return [_NUMBER, *struct.unpack("q", struct.pack("d", argument))]
    if kind in ("IntType", "BoolType", "SymIntType") and type(argument) in (bool, int):
        return [_NUMBER, int(argument)]
    if kind == "ListType" and all(type(n) in (bool, int) for n in argument):
        return [_LIST, len(argument), *map(int, argument)]
    return None  # a string, a Scalar, a dtype, an optional tensor, or a number that is known at run time only


def _is_array(argument: Any) -> bool:
    return hasattr(argument, "dtype") and hasattr(argument, "shape")


def _cuts(
    cut: int | None, given: dict[str, Any], arrays: Sequence[Any], results: Sequence[tuple[int, ...]]
) -> tuple[int, list[int]]:
    """The dimension of all arrays, and of each result, along which they are cut; -1 if they are not."""
    rank = arrays[0].ndim
    if cut is not None and all(array.ndim == rank for array in arrays):
        reduced = isinstance(given.get("dim"), int) and given["dim"] % rank < cut
        cuts = [cut - 1 if reduced and len(shape) < rank else cut for shape in results]
        sizes = {array.shape[cut] for array in arrays}
        sizes |= {shape[d] if d < len(shape) else 0 for shape, d in zip(results, cuts, strict=True)}
        if len(sizes) == 1:
            return cut, cuts
    return -1, [-1] * len(results)


def _text(*texts: str) -> np.ndarray:
    """Texts that end in zeros, as XLA's attributes can have them."""
    content = b"".join(text.encode() + b"\0" for text in texts)
    return np.frombuffer(content.ljust(math.ceil(len(content) / 8) * 8, b"\0"), np.int64)


_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def _torch_dtype(array: Any) -> torch.dtype | None:
    return next((dtype for dtype in _DTYPES if to_jax(dtype) == array.dtype), None)


@functools.cache
def _kind(dtype: torch.dtype) -> tuple[int, int]:
    """PyTorch's number of a dtype, and the bytes of an element."""
    number = getattr(library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    number.restype = ctypes.c_int32
    return number(), dtype.itemsize
