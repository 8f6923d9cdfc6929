"""Find out which dtypes PyTorch's kernels accept and return, by running them on zeros.

Meta kernels accept dtypes that the CPU's refuse: a matmul of float32 and float64, int32 indices, a softmax of integers.
XLA would compute a result. So tracing also runs the CPU's kernel on a few zeros, once for each operation and
combination of dtypes.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch, current_autograd_node
from .op_call import OpCall
from .symbolic_scalars import is_symbolic, stand_in

Tensor = torch.Tensor

_MAX_FULL_SIZE = 1 << 12  # elements in total; up to this size the kernel is run on tensors of the original sizes
_MIN_SIZE = 4  # larger sizes are mapped to this and the following numbers

# Errors about dtypes. Any other error may be caused by the zeros or their sizes.
_DTYPE_ERROR = re.compile(
    r"dtype|scalar ?type|data type|tensors? of type|[Bb]ool(ean)? (input|tensor)|complex|can't be cast"
    r"|Integers to negative|not implemented for '|Input type|inputs to be|long tensor|same type|cannot be converted"
    r"|^Promotion for"
)
# LAPACK's pivots are 1-based and not checked: 0 may crash the process.
_TAKE_PIVOTS = {"linalg_ldl_solve", "linalg_lu_solve", "lu_solve", "lu_unpack"}
_LARGE = 65504.0  # larger numbers overflow in some dtypes
_HALVES = (torch.float16, torch.bfloat16)

_cache: dict[tuple, list[torch.dtype | None]] = {}


def result_dtypes(call: OpCall) -> list[torch.dtype | None] | None:
    """The dtypes of the results of PyTorch's CPU kernel for a call; None if unknown.

    Raises:
        Exception: the kernel's error, if it does not support the dtypes.
    """
    tensors = [*call.deferred, *call.real]
    if not tensors or call.op.namespace != "aten" or call.traits.random or call.traits.view or call.is_foreach:
        return None
    if "_backward" in call.op.overloadpacket.__name__ and current_autograd_node() is not None:
        return None  # the forward operation has been checked
    if any(t.layout != torch.strided or t.is_quantized for t in tensors):
        return None
    named = ((name, _kind(arg)) for name, arg in call.kwargs.items())
    key = (call.op, torch.get_default_dtype(), *map(_kind, call.args), *named)
    empty = not all(t.numel() for t in tensors)  # kernels check less for empty tensors
    found = _cache.get(key) if not empty else None
    if found is not None:
        return found
    sizes = {size for t in tensors for size in t.shape if size > _MIN_SIZE}
    small_sizes = {size: _MIN_SIZE + n for n, size in enumerate(sorted(sizes))}
    whole = sum(t.numel() for t in tensors) <= _MAX_FULL_SIZE
    for new_size in ({}, small_sizes) if whole else (small_sizes,):
        args = tuple(_zeros(a, new_size) for a in call.args)
        kwargs = {k: _zeros(v, new_size) for k, v in call.kwargs.items()}
        if call.op.overloadpacket.__name__ in _TAKE_PIVOTS:
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, Tensor) and not (argument.is_floating_point() or argument.is_complex()):
                    argument.fill_(1)
        try:
            with DisableTorchDispatch(), torch.no_grad():
                result = call.op(*args, **kwargs)
        except Exception as error:
            dtypes = {t.dtype for t in tensors}
            only_half = len(dtypes) == 1 and dtypes.pop() in _HALVES  # which other devices may support
            if _DTYPE_ERROR.search(str(error)) and not only_half:
                raise
        else:
            results = result if isinstance(result, (list, tuple)) else [result]
            found = [r.dtype if isinstance(r, Tensor) else None for r in results]
            if not empty:
                _cache[key] = found
            return found
    return None


def _kind(arg: Any) -> Any:
    """The properties of an argument that determine the dtypes."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.dim() == 0
    if type(arg) in (list, tuple):
        return tuple(map(_kind, arg))
    if isinstance(arg, (torch.dtype, bool, str)) or isinstance(arg, float) and abs(arg) > _LARGE:
        return arg
    return type(arg)


def _zeros(arg: Any, new_size: dict[int, int]) -> Any:
    """An argument with its tensors replaced by zeros of other sizes."""
    if isinstance(arg, Tensor):
        return torch.zeros([new_size.get(size, size) for size in arg.shape], dtype=arg.dtype)
    if type(arg) in (list, tuple):
        return type(arg)(_zeros(a, new_size) for a in arg)
    if isinstance(arg, torch.device):
        return torch.device("cpu")
    if is_symbolic(arg):
        return stand_in(arg)
    return new_size.get(arg, arg) if type(arg) is int else arg
