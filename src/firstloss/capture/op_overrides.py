"""Handlers of operations that are not recorded as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.ops import aten

from ..compat.python_names import getframe
from ..compat.torch_names import (
    VALIDATION_HELPER,
    VALIDATIONS,
    DisableTorchDispatch,
    OpOverload,
    current_autograd_node,
)
from ..errors import CaptureError
from ..program.graph import span
from ..program.source import here
from . import session
from .constant_folding import known_value
from .constants import constant_tensor, edits, owned_by_torch
from .evaluation import run_for_real, state_of, value_of
from .metadata_mutation import OPERATIONS, resize
from .op_call import OpCall, traits_of
from .shapes import infer
from .symbolic_scalars import number_of
from .tensor import DeferredTensor, Hooks, is_in_file

Tensor = torch.Tensor


def _read_scalar(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    tensor = args[0]
    if session.trace is not None and _is_real(tensor):
        tensor = session.trace.read_real(tensor)
    if type(tensor) is not DeferredTensor:
        with DisableTorchDispatch():
            return op(tensor)
    if session.trace is not None:
        real = known_value(tensor)
        if real is not None:
            return real.item()
        answer = _validated(tensor) if tensor.dtype == torch.bool else None
        return number_of(tensor) if answer is None else answer
    return value_of(tensor).item()


# -- branches in torch that only validate, such as `if torch.any(var < 0): raise ValueError` -------------------------
# A traced step has no value to branch on. It takes the branch for a valid argument, and checks the condition after each
# execution, as for `torch._assert_async`.

_OURS = __name__.partition(".")[0] + "."


def _validated(condition: torch.Tensor) -> bool | None:
    """The value of `condition` for a validating branch in torch, checked later; None for any other caller."""
    frame: FrameType | None = getframe(1)
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith(_OURS) or frame.f_code.co_name == VALIDATION_HELPER
    ):
        frame = frame.f_back
    if frame is None:
        return None
    validation = VALIDATIONS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    if validation is None:
        return None
    valid, message = validation
    Hooks.assert_later(condition if valid else condition.logical_not(), message)
    return valid


# -- queries and assertions ------------------------------------------------------------------------------------------


def _metadata_query(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """A query that depends on metadata only."""
    with DisableTorchDispatch():
        return op(*args, **kwargs)


def _same_storage_numel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> bool:
    """Called by forward-mode differentiation."""
    counts = []
    for tensor in args:
        value = tensor._storage.value if type(tensor) is DeferredTensor else None
        with DisableTorchDispatch():
            real = tensor.untyped_storage().nbytes() // tensor.itemsize if value is None else 0
        counts.append(real if value is None else span(value.shape, value.stride))
    return counts[0] == counts[1]


def _is_real(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and type(arg) is not DeferredTensor


def _equal(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    if session.trace is not None:
        args = tuple(session.trace.read_real(a) if _is_real(a) else a for a in args)
    with DisableTorchDispatch():
        return op(*(value_of(a) if type(a) is DeferredTensor else a for a in args), **kwargs)


def _lift(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """`torch.tensor(data)`: a new tensor of Python data, or one that shares NumPy's memory."""
    tensor = args[0]
    if type(tensor) is DeferredTensor:
        return Hooks.dispatch(aten.alias.default, args, kwargs)
    if session.trace is None and (not session.depth or edits(tensor) is None):
        return tensor  # it shares NumPy's memory, which may be edited
    if session.trace is not None and not owned_by_torch(tensor):
        return tensor  # an input, read at each step
    out = constant_tensor(tensor, copy=False)
    out._storage.trace = session.trace
    return out


def _assert_async(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """An assertion on values; a traced step checks it after each execution."""
    if session.trace is not None and known_value(args[0]) is None:
        return Hooks.assert_later(*args)
    return _equal(op, args, kwargs)


def _allclose(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """Called by a derivative (of complex singular vectors) to check whether it is defined; checked after the step."""
    node = current_autograd_node() if session.trace is not None else None
    if node is None or all(known_value(a) is not None for a in args[:2]):
        return _equal(op, args, kwargs)
    a, b, rtol, atol = (*args, 1e-5, 1e-8)[:4] if len(args) == 2 else (*args, 1e-8)[:4]
    distance = Hooks.dispatch(aten.abs.default, (Hooks.dispatch(aten.sub.Tensor, (a, b), {}),), {})
    allowed = Hooks.dispatch(aten.mul.Scalar, (Hooks.dispatch(aten.abs.default, (b,), {}), rtol), {})
    close = Hooks.dispatch(aten.le.Tensor, (distance, Hooks.dispatch(aten.add.Scalar, (allowed, atol), {})), {})
    Hooks.assert_later(
        Hooks.dispatch(aten.all.default, (close,), {}),
        f"{node.name()} has no gradient here: the loss depends on the phase of complex vectors, which is arbitrary",
    )
    return True


# -- *_like and new_* factories --------------------------------------------------------------------------------------

# The in-place operation that fills the result, and its further arguments.
_LIKE: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...] | None]] = {
    "aten::empty_like": lambda args: None,
    "aten::new_empty": lambda args: None,
    "aten::new_empty_strided": lambda args: None,
    "aten::zeros_like": lambda args: (aten.zero_.default,),
    "aten::new_zeros": lambda args: (aten.zero_.default,),
    "aten::ones_like": lambda args: (aten.fill_.Scalar, 1),
    "aten::new_ones": lambda args: (aten.fill_.Scalar, 1),
    "aten::full_like": lambda args: (aten.fill_.Scalar, args[1]),
    "aten::new_full": lambda args: (aten.fill_.Scalar, args[2]),
    "aten::rand_like": lambda args: (aten.uniform_.default, 0.0, 1.0),
    "aten::randn_like": lambda args: (aten.normal_.default, 0.0, 1.0),
}


def _like(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    call = OpCall(op, traits_of(op), args, kwargs)
    pending = any(state_of(t._storage).pending and not is_in_file(t) for t in call.deferred)
    if pending and op is aten.empty_like.default and session.trace is None and not call.on_meta:
        return _keep_recipe(args[0], kwargs)
    if call.on_meta or _is_meta(call) or (session.trace is None and not session.depth and not pending):
        return run_for_real(call)
    fill = _LIKE[op.name()](args)
    if fill is not None and fill[0] is aten.normal_.default and not args[0].numel():
        fill = None  # PyTorch accepts any dtype for an empty tensor
        call = OpCall(aten.empty_like.default, traits_of(aten.empty_like.default), args, kwargs)
    ((size, stride, _, dtype),) = infer(call).geometry
    options = {"dtype": dtype, "device": call.device()}
    out = Hooks.dispatch(aten.empty_strided.default, (size, stride), options)
    if fill is not None:
        Hooks.dispatch(fill[0], (out, *fill[1:]), {})
    return out


def _keep_recipe(tensor: Tensor, kwargs: dict[Any, Any]) -> Any:
    """`torch.empty_like` of a deferred tensor: one with the same recipe.

    Code for the meta device (such as `Module.to_empty`) allocates memory with it and initializes afterwards. Here the
    constructor's recipe is already known; if the result is filled afterwards, it is never computed.
    """
    dtype = kwargs.get("dtype") or tensor.dtype
    chosen = {name: kwargs[name] for name in ("device", "memory_format") if kwargs.get(name) is not None}
    with torch.no_grad():
        if dtype.is_complex != tensor.is_complex():
            tensor = Hooks.dispatch(aten.zeros_like.default, (tensor,), {})
        return Hooks.dispatch(aten._to_copy.default, (tensor,), {"dtype": dtype, **chosen})


# Factories with an `out` argument, by name, and the overload without it, which takes its dtype.
_INTO_OUT = {
    "aten::arange.out": ("arange", "default"),
    "aten::arange.start_out": ("arange", "start_step"),
    "aten::eye.out": ("eye", "default"),
    "aten::eye.m_out": ("eye", "m"),
    **{f"aten::{name}.out": (name, "default") for name in ("full", "zeros", "ones", "linspace", "logspace")},
    **{
        f"aten::{name}.{kind}_out": (name, kind)
        for name in ("linspace", "logspace")
        for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    },
}


def _into_out(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    out = kwargs["out"]
    if type(out) is not DeferredTensor and session.trace is None:
        with DisableTorchDispatch():
            return op(*(value_of(a) if type(a) is DeferredTensor else a for a in args), **kwargs)
    name, overload = _INTO_OUT[op.name()]
    result = Hooks.dispatch(getattr(getattr(aten, name), overload), args, {"dtype": out.dtype, "device": out.device})
    if out.shape != result.shape and type(out) is DeferredTensor:
        resize(out, tuple(result.shape))
    if any(n > 1 and not s for n, s in zip(out.shape, out.stride(), strict=True)):
        raise CaptureError(
            f"{here()}: {op} writes to an expanded tensor of shape {list(out.shape)}, whose elements share memory. "
            "Write to a clone of it."
        )
    Hooks.dispatch(aten.copy_.default, (out, result), {})
    return out


def _is_meta(call: OpCall) -> bool:
    return call.kwargs.get("device") is None and any(t.is_meta for t in call.real)


def _normalize(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """Use the overload of batch norm whose schema says that it writes to the running statistics."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if mean is None:
        return Hooks.dispatch(
            aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps), kwargs
        )
    if not training:
        return Hooks.dispatch(
            aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, momentum, eps), kwargs
        )
    return Hooks.dispatch(aten._native_batch_norm_legit.default, args, kwargs)


# By the operation's name: most captures need few of these operations, and looking one up takes PyTorch 20 us.
HANDLERS: dict[str, Callable[[OpOverload, tuple[Any, ...], dict[Any, Any]], Any]] = {
    **dict.fromkeys(_LIKE, _like),
    **dict.fromkeys(_INTO_OUT, _into_out),
    "aten::native_batch_norm": _normalize,
    "aten::_local_scalar_dense": _read_scalar,
    "aten::can_cast": _metadata_query,
    "aten::is_same_size": _metadata_query,
    "aten::_has_same_storage_numel": _same_storage_numel,
    "aten::equal": _equal,
    "aten::allclose": _allclose,
    "aten::lift_fresh": _lift,
    "aten::lift_fresh_copy": _lift,
    "aten::_has_compatible_shallow_copy_type": lambda op, args, kwargs: type(args[0]) is type(args[1]),
    "aten::_assert_async": _assert_async,
    "aten::_assert_async.msg": _assert_async,
    **OPERATIONS,
}
