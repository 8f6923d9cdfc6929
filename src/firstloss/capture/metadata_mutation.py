"""In-place operations on the metadata of a tensor, its geometry or storage: `t_`, `resize_`, `set_` and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.ops import aten

from ..compat.torch_names import DisableTorchDispatch, OpOverload, base_of
from ..errors import CaptureError
from ..program.graph import contiguous_stride, dense_count, geometry_of, span
from ..program.source import here
from . import conjugate_views, session
from .constants import constant_tensor
from .op_call import OpCall, traits_of
from .shapes import as_meta, infer
from .storage_swap import become, rebind, share_memory
from .tensor import DeferredTensor, Hooks, is_pending, on_backend, to_host

Tensor = torch.Tensor


def _on_real(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    if session.trace is not None:
        session.trace.new_layouts.change(args[0])
    with DisableTorchDispatch():
        return op(*args, **kwargs)


def _in_place_view(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """`t_`, `squeeze_` and others, which change the view of the same storage."""
    tensor = args[0]
    if type(tensor) is DeferredTensor:
        if tensor.requires_grad and any(base_of(other) is tensor for other in tensor._storage.alive()):
            raise CaptureError(
                f"{here()}: {op} changes the shape of a tensor that requires grad in place, while it has views. Create "
                "a view instead, as in x = x.t()."
            )
        call = OpCall(op, traits_of(op), args, kwargs)
        (geometry,) = infer(call).geometry
        rebind(tensor, tensor._storage, geometry)
        return tensor
    return _on_real(op, args, kwargs)


def _set_tensor(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """`a.set_(b)`: `a` becomes the same view as `b`."""
    tensor, source, *geometry = args
    if type(source) is DeferredTensor and type(tensor) is not DeferredTensor and session.trace is None:
        source = to_host(source)  # autograd may give the real tensor a history
        args = (tensor, source, *geometry)
    if type(source) is not DeferredTensor and type(tensor) is not DeferredTensor:
        return _on_real(op, args, kwargs)
    if type(source) is not DeferredTensor:
        resident = session.trace is None and on_backend(tensor)
        by_storage = op is aten.set_.source_Storage  # C++ may hold that tensor
        if session.trace is None and not resident and not by_storage:
            with DisableTorchDispatch(), torch.no_grad():
                real = torch.empty(0, dtype=source.dtype, device=source.device)
                op(real, *args[1:], **kwargs)
            # Autograd, above the dispatcher, gives the result a history.
            share_memory(tensor, real, torch.is_grad_enabled() and (tensor.requires_grad or source.requires_grad))
            return tensor
        source = Hooks.to_backend(source) if resident else constant_tensor(source)
    shape = geometry_of(source)
    if geometry:
        offset, size = geometry[0], tuple(geometry[1])
        stride = tuple(geometry[2]) if len(geometry) > 2 else contiguous_stride(size)
        shape = (size, stride, offset, source.dtype)
    rebind(tensor, source._storage, shape)
    return tensor


def _set_storage(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """`a.set_(storage, ...)`, with a real storage."""
    tensor = args[0]
    if type(tensor) is not DeferredTensor:
        return _on_real(op, args, kwargs)
    with DisableTorchDispatch():
        real = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        op(real, *args[1:], **kwargs)
        if session.trace is None and is_pending(tensor) and op is aten.set_.source_Storage_storage_offset:
            become(tensor, real)  # C++ code that creates a tensor from a storage holds the tensor
            return tensor
    return _set_tensor(aten.set_.source_Storage, (tensor, real), {})


def resize(tensor: DeferredTensor, size: tuple[int, ...]) -> None:
    """Resize `tensor` to a contiguous one, like `Tensor.resize_`."""
    resize_strided(tensor, size, contiguous_stride(size))


def resize_strided(tensor: DeferredTensor, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Resize `tensor` to `size` and `stride`, and grow its storage if necessary, together with its other views."""
    storage, offset = tensor._storage, int(tensor.storage_offset())
    value, geometry = storage.value, (size, stride, offset, tensor.dtype)
    required = (offset + span(size, stride)) * tensor.itemsize
    if dense_count(value.shape, value.stride) == value.numel and required <= value.numel * value.dtype.itemsize:
        rebind(tensor, storage, geometry)
        return
    resident = session.trace is None and on_backend(tensor)
    count = max(span(value.shape, value.stride), -(-required // value.dtype.itemsize))
    whole = DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype)
    with torch.no_grad():
        if resident:
            real = to_host(whole)
            with DisableTorchDispatch():
                if real.is_contiguous():  # grows the memory for real tensors that share it, too
                    real = real.detach().view(-1).resize_(count)
                else:
                    dense, real = real, torch.empty(count, dtype=value.dtype)
                    real.as_strided(value.shape, value.stride).copy_(dense)
            flat = Hooks.to_backend(real)
        else:
            kind = {"dtype": value.dtype, "device": value.device}
            flat = Hooks.dispatch(aten.empty_strided.default, ((count,), (1,)), kind)
            if value.numel:
                Hooks.dispatch(aten.copy_.default, (flat.as_strided(value.shape, value.stride), whole), {})
    # In a step, tensors that outlive it keep their memory; only `tensor` gets another one.
    others = storage.alive() if session.trace is None or storage.trace is session.trace else []
    for other in others:
        if other is not tensor and other is not whole:
            rebind(other, flat._storage, geometry_of(other))
    rebind(tensor, flat._storage, geometry)
    conjugate_views.move(storage, flat._storage)
    if resident:  # it has no views any more
        storage.resident.release_exported_memory()


def _resize(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    tensor, *others = args
    if type(tensor) is not DeferredTensor:
        return _on_real(op, args, kwargs)
    with DisableTorchDispatch():
        meta = as_meta(tensor)
        op(meta, *(as_meta(a) if isinstance(a, Tensor) else a for a in others), **kwargs)
    if (meta.shape, meta.stride()) != (tensor.shape, tensor.stride()):
        resize_strided(tensor, tuple(meta.shape), meta.stride())
    return tensor


# By the operation's name.
OPERATIONS: dict[str, Callable[[OpOverload, tuple[Any, ...], dict[Any, Any]], Any]] = {
    "aten::set_.source_Tensor": _set_tensor,
    "aten::set_.source_Tensor_storage_offset": _set_tensor,
    "aten::set_.source_Storage": _set_storage,
    "aten::set_.source_Storage_storage_offset": _set_storage,
    "aten::resize_": _resize,
    "aten::resize_as_": _resize,
    **dict.fromkeys(
        (
            "aten::t_",
            "aten::squeeze_",
            "aten::squeeze_.dim",
            "aten::squeeze_.dims",
            "aten::unsqueeze_",
            "aten::transpose_",
            "aten::as_strided_",
            "aten::swapaxes_",
            "aten::swapdims_",
        ),
        _in_place_view,
    ),
}
