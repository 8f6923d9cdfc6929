"""Shape inference: shape, stride, offset and dtype of an operation's results, without computing them.

It uses PyTorch's meta kernels. These take tens of microseconds, and a model repeats the same few calls for every layer,
so results are cached by call.

Meta kernels accept dtypes that the CPU's refuse: a matmul of float32 and float64, int32 indices, a softmax of integers.
XLA would compute a result. So tracing also runs the CPU's kernel on a few zeros, once for each operation and
combination of dtypes (`result_dtypes`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..compat.torch_names import DisableTorchDispatch, current_autograd_node, schema_of, suggest_memory_format
from ..errors import CaptureError
from ..program.graph import Geometry, geometry_of, is_not_strided, span
from ..program.source import here
from . import session
from .op_call import OpCall, is_symbolic
from .session import this_thread
from .symbolic_scalars import example_value

Tensor = torch.Tensor

_MAX_FULL_SIZE = 1 << 12  # elements in total; up to this size the kernel is run on tensors of the original sizes
_MIN_SIZE = 4  # larger sizes are mapped to this and the following numbers

# Errors about dtypes. Any other error may be caused by the zeros or their sizes.
_DTYPE_ERROR = (
    r"dtype|scalar ?type|data type|tensors? of type|[Bb]ool(ean)? (input|tensor)|complex|can't be cast"
    r"|Integers to negative|not implemented for '|Input type|inputs to be|long tensor|same type|cannot be converted"
    r"|^Promotion for"
)
# LAPACK's pivots are 1-based and not checked: 0 may crash the process.
_TAKE_PIVOTS = {"linalg_ldl_solve", "linalg_lu_solve", "lu_solve", "lu_unpack"}
_LARGE = 65504.0  # larger numbers overflow in some dtypes
_HALVES = (torch.float16, torch.bfloat16)

_dtypes_cache: dict[tuple[Any, ...], list[torch.dtype | None]] = {}


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
    keyword_dtypes = ((name, _dtype_of(arg)) for name, arg in call.kwargs.items())
    key = (call.op, torch.get_default_dtype(), *map(_dtype_of, call.args), *keyword_dtypes)
    empty = not all(t.numel() for t in tensors)  # kernels check less for empty tensors
    dtypes_of_results = _dtypes_cache.get(key) if not empty else None
    if dtypes_of_results is not None:
        return dtypes_of_results
    sizes = {size for t in tensors for size in t.shape if size > _MIN_SIZE}
    small_sizes = {size: _MIN_SIZE + n for n, size in enumerate(sorted(sizes))}
    whole = sum(t.numel() for t in tensors) <= _MAX_FULL_SIZE
    for new_size in ({}, small_sizes) if whole else (small_sizes,):
        with DisableTorchDispatch():  # a step's trace may be in a capture, which would defer them
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
            if re.search(_DTYPE_ERROR, str(error)) and not only_half:
                raise
        else:
            results = result if isinstance(result, (list, tuple)) else [result]
            dtypes_of_results = [r.dtype if isinstance(r, Tensor) else None for r in results]
            if not empty:
                _dtypes_cache[key] = dtypes_of_results
            return dtypes_of_results
    return None


def _dtype_of(arg: Any) -> Any:
    """The properties of an argument that determine the dtypes."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.dim() == 0
    if type(arg) in (list, tuple):
        return tuple(map(_dtype_of, arg))
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
        return example_value(arg)
    return new_size.get(arg, arg) if type(arg) is int else arg


class NeedsValues(Exception):
    """The shape of the result depends on values."""


class Outcome(NamedTuple):
    """The geometry of each result, and the default dtype if the result's depends on it."""

    geometry: list[Any]  # None for a gradient that is not requested; numbers as they are
    default: torch.dtype | None


# The tables below have operations by name: few captures need any of them, and looking one up takes PyTorch 20 us.

# Operations whose meta kernels return other strides or shapes than the CPU's.
_WRONG_META_KERNELS = {
    "aten._linalg_svd.default",
    "aten.linalg_svd.default",
    "aten.linalg_eig.default",
    "aten._fft_r2c.default",
    "aten._fft_c2r.default",
    "aten.max_unpool2d.default",
    "aten.mkldnn_rnn_layer.default",
}


def _like(position: int) -> Callable[[tuple[Any, ...]], list[Geometry]]:
    """One result, shaped like the argument at `position`."""

    def geometry(args: tuple[Any, ...]) -> list[Geometry]:
        like = torch.empty_like(as_meta(args[position]), memory_format=torch.contiguous_format)
        return [geometry_of(like)]

    return geometry


def _geqrf(args: tuple[Any, ...]) -> list[Geometry]:
    """Column-major factors, as LAPACK returns them, and scales."""
    *batch, rows, columns = args[0].shape
    factors = torch.empty((*batch, columns, rows), dtype=args[0].dtype, device="meta").mT
    scales = torch.empty((*batch, min(rows, columns)), dtype=args[0].dtype, device="meta")
    return [geometry_of(factors), geometry_of(scales)]


def _ctc(args: tuple[Any, ...]) -> list[Geometry]:
    """Losses, and the forward variables for the longest possible target."""
    log_probs, targets = args[:2]
    time, batch, _ = log_probs.shape
    states = 2 * (targets.shape[1] if targets.dim() == 2 else targets.numel()) + 1
    results = (torch.empty(size, dtype=log_probs.dtype, device="meta") for size in ((batch,), (batch, time, states)))
    return [geometry_of(x) for x in results]


def _embedding_bag(args: tuple[Any, ...]) -> list[Geometry]:
    """As on a CPU, whose kernel omits the bag of each index if it is not needed for the sum."""
    arguments: Any = (*args, *_EMBEDDING_BAG_DEFAULTS[len(args) :])
    weight, indices, offsets, _, mode, _, _, includes_last, padding = arguments
    count, width = offsets.shape[0] - int(includes_last), weight.shape[1]
    is_left_out = mode == 0 and padding < 0 and weight.dtype.itemsize <= 4
    sizes = [(0,) if is_left_out else tuple(indices.shape), (count,), (count, width) if mode == 2 else (count,)]
    results = [torch.empty((count, width), dtype=weight.dtype, device="meta")]
    results += [torch.empty(size, dtype=indices.dtype, device="meta") for size in sizes]
    return [geometry_of(x) for x in results]


_EMBEDDING_BAG_DEFAULTS = (None, None, None, False, 0, False, None, False, -1)  # the operation's defaults


# Operations with static shapes whose meta kernels are missing, or differ from the CPU's.
_SHAPES: dict[str, Callable[[tuple[Any, ...]], list[Geometry]]] = {
    "aten.multi_margin_loss_backward.default": _like(1),
    "aten.multilabel_margin_loss_backward.default": _like(1),
    "aten._ctc_loss.Tensor": _ctc,
    "aten._ctc_loss_backward.default": _like(1),
    "aten._ctc_loss_backward.Tensor": _like(1),
    "aten.fractional_max_pool3d_backward.default": _like(1),
    "aten.binomial.default": _like(0),
    "aten._sample_dirichlet.default": _like(0),
    "aten._standard_gamma_grad.default": _like(0),
    "aten._dirichlet_grad.default": _like(0),
    "aten.geqrf.default": _geqrf,
    "aten.geqrf.a": _geqrf,
}


def _norm_in_eval(args: tuple[Any, ...]) -> list[Geometry]:
    """The result, and empty batch statistics, which a CPU's kernel does not compute."""
    dtypes = [t.dtype for t in args[1:5] if isinstance(t, Tensor)] or [args[0].dtype]  # mixed, or the same
    nothing = torch.empty(0, dtype=dtypes[0], device="meta")
    x = as_meta(args[0])
    out = torch.empty_like(x, memory_format=suggest_memory_format(x))
    return [geometry_of(out), geometry_of(nothing), geometry_of(nothing)]


# Operations whose results have other shapes on a CPU, in a trace or not. (None: as the meta kernel.)
_CPU_SHAPES: dict[str, Callable[[tuple[Any, ...]], list[Geometry] | None]] = {
    "aten._native_batch_norm_legit_no_training.default": _norm_in_eval,
    "aten._native_batch_norm_legit.default": lambda args: None if args[5] else _norm_in_eval(args),
    "aten._native_batch_norm_legit.no_stats": lambda args: None if args[3] else _norm_in_eval(args),
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_forward_only.default": _embedding_bag,
}

# Operations that also return numbers, which depend on shapes only: the longest sequence.
_NUMBERS_OF_SHAPES = {
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
}

_cache: dict[tuple[Any, ...], Outcome] = {}


def infer(call: OpCall) -> Outcome:
    """The geometry of the results of `call`."""
    key = (torch.get_default_dtype(), this_thread.trace is None, *call.key)
    try:
        cached = _cache.get(key)
    except TypeError:  # something in the call cannot be hashed
        return _infer(call)
    if cached is None:
        cached = _infer(call)
        if len(_cache) > 100_000:
            _cache.clear()
        _cache[key] = cached
    return cached


def _infer(call: OpCall) -> Outcome:
    if schema_of(call.op).name.startswith("aten::_fused_") and not schema_of(call.op).returns:
        return Outcome([], None)  # they have no meta kernels
    if schema_of(call.op).name.startswith("aten::quantize_per"):  # whose meta kernels return floats
        raise NeedsValues(f"{call.op} returns a quantized tensor")
    result_dtypes_on_cpu = result_dtypes(call) if session.trace is not None else None  # else PyTorch's kernels will run
    name = str(call.op)
    if name in _SHAPES and session.trace is not None:
        with DisableTorchDispatch():
            return Outcome(list(_SHAPES[name](call.args)), None)
    if name in _CPU_SHAPES and call.device().type == "cpu":
        with DisableTorchDispatch():
            cpu = _CPU_SHAPES[name](call.args)
        if cpu is not None:
            return Outcome(cpu, None)
    if name in _WRONG_META_KERNELS and session.trace is None:
        raise NeedsValues(f"the meta kernel of {call.op} returns wrong strides")
    on_lists = schema_of(call.op).name.startswith("aten::_foreach_")  # foreach_pow's list may follow a number
    geometry = _infer_foreach(call) if on_lists else _run_meta_kernel(call)
    geometry = _with_dtypes(geometry, result_dtypes_on_cpu)
    default = None
    result = geometry[0][3] if geometry and geometry[0] is not None else None
    if result is not None and (result.is_floating_point or result.is_complex):
        real = (t.dtype for t in (*call.deferred, *call.real))
        if call.kwargs.get("dtype") is None and not any(d.is_floating_point or d.is_complex for d in real):
            default = result
    return Outcome(geometry, default)


def _with_dtypes(geometry: list[Any], dtypes: list[torch.dtype | None] | None) -> list[Any]:
    """The geometry with the dtypes of the CPU's kernel."""
    if dtypes is None or len(dtypes) != len(geometry):
        return geometry
    return [
        (*one[:3], dtype) if isinstance(one, tuple) and dtype is not None else one
        for one, dtype in zip(geometry, dtypes, strict=True)
    ]


def _infer_foreach(call: OpCall) -> list[Any]:
    """Infer a foreach operation, once for each distinct combination of arguments."""
    lists = [arg for arg in call.args if type(arg) in (list, tuple)]
    count = max(map(len, lists), default=0)
    if count < 2 or call.kwargs or any(len(arg) != count for arg in lists):
        return _run_meta_kernel(call)
    kinds: dict[tuple[Any, ...], int] = {}
    rows = [kinds.setdefault(tuple(map(_kind, row)), len(kinds)) for row in zip(*lists, strict=True)]
    first = [rows.index(kind) for kind in range(len(kinds))]
    args = tuple([arg[i] for i in first] if type(arg) in (list, tuple) else arg for arg in call.args)
    geometry = _run_meta_kernel(OpCall(call.op, call.traits, args, {}))
    return [geometry[kind] for kind in rows] if geometry else []


def _kind(arg: Any) -> Any:
    return (*geometry_of(arg), arg.device) if isinstance(arg, Tensor) else (type(arg), arg)


def _run_meta_kernel(call: OpCall) -> list[Any]:
    args = [as_meta(a) for a in call.args]
    kwargs = {k: as_meta(v) for k, v in call.kwargs.items()}
    has_device = any(a.name == "device" for a in schema_of(call.op).arguments)
    if has_device and (not (call.deferred or call.real) or kwargs.get("device") is not None):
        kwargs["device"] = torch.device("meta")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    try:
        with DisableTorchDispatch(), torch.no_grad():
            result = call.op(*args, **kwargs)
    except NotImplementedError as error:
        raise NeedsValues(str(error)) from None
    except RuntimeError as error:
        if "meta" in str(error).lower() and "tensor" in str(error).lower():
            raise NeedsValues(str(error)) from None
        raise
    if isinstance(result, Tensor):
        result = (result,)
    elif result is None:
        result = ()
    elif not isinstance(result, (list, tuple)):
        raise NeedsValues(f"{call.op} returns a {type(result).__name__}")
    out: list[Geometry | int | None] = []
    for t in result:
        if isinstance(t, (list, tuple)):
            raise CaptureError(f"{here()}: {call.op} returns lists within lists, which capture does not support")
        if t is None:  # a gradient that is not requested
            out.append(None)
            continue
        if type(t) is int and str(call.op) in _NUMBERS_OF_SHAPES:
            out.append(t)
            continue
        if not isinstance(t, Tensor):
            raise NeedsValues(f"{call.op} returns a {type(t).__name__}")
        if is_not_strided(t):
            raise NeedsValues(f"{call.op} returns a tensor that is not strided")
        out.append(geometry_of(t))
    return out


def as_meta(arg: Any) -> Any:
    """An argument with its tensors on the meta device, with the same geometry, and without generators."""
    if isinstance(arg, Tensor):
        extent = arg.storage_offset() + span(arg.shape, arg.stride())
        base = torch.empty(extent, dtype=arg.dtype, device="meta")
        return base.as_strided(arg.shape, arg.stride(), arg.storage_offset())
    if type(arg) in (list, tuple):
        return type(arg)(as_meta(a) for a in arg)
    if isinstance(arg, torch.Generator):
        return None
    if isinstance(arg, torch.device):
        return torch.device("meta")
    if is_symbolic(arg):
        return example_value(arg)
    return arg
