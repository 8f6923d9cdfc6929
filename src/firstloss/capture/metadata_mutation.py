"""In-place operations on the metadata of a tensor, its geometry or storage: `t_`, `resize_`, `set_` and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch, OpOverload, base_of
from ..errors import CaptureError
from ..program.graph import contiguous_stride, dense_count, geometry_of, span
from ..program.source import here
from . import conjugate_views, session
from .constants import constant_tensor
from .op_call import OpCall
from .op_schema import traits_of
from .shapes import as_meta, infer
from .storage_swap import become, rebind, share_memory
from .tensor import DeferredTensor, Hooks, is_pending, on_backend, to_host

aten = torch.ops.aten
Tensor = torch.Tensor


def _on_real(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    if session.trace is not None:
        session.trace.new_layouts.change(args[0])
    with DisableTorchDispatch():
        return op(*args, **kwargs)


def _in_place_view(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """`t_`, `squeeze_` and their like: the same storage, shown otherwise."""
    tensor = args[0]
    if type(tensor) is DeferredTensor:
        if tensor.requires_grad and any(base_of(other) is tensor for other in tensor._storage.alive()):
            raise CaptureError(
                f"{here()}: {op} gives a tensor that wants gradients another shape in place, while views of it are "
                "held: PyTorch would take them of the new shape. Make a view, as in x = x.t()."
            )
        call = OpCall(op, traits_of(op), args, kwargs)
        (geometry,) = infer(call).geometry
        rebind(tensor, tensor._storage, geometry)
        return tensor
    return _on_real(op, args, kwargs)


def _set_tensor(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """`a.set_(b)`: `a` shows what `b` shows, in the same memory."""
    tensor, source, *geometry = args
    if type(source) is DeferredTensor and type(tensor) is not DeferredTensor and session.trace is None:
        source = to_host(source)  # autograd goes on with the real tensor, and may give it a history
        args = (tensor, source, *geometry)
    if type(source) is not DeferredTensor and type(tensor) is not DeferredTensor:
        return _on_real(op, args, kwargs)
    if type(source) is not DeferredTensor:
        resident = session.trace is None and on_backend(tensor)
        by_storage = op is aten.set_.source_Storage  # C++ may hold that tensor
        if session.trace is None and not resident and not by_storage:
            with DisableTorchDispatch(), torch.no_grad():
                shown = torch.empty(0, dtype=source.dtype, device=source.device)
                op(shown, *args[1:], **kwargs)
            # Autograd, which is above this, gives the result a history: it knows the tensor as it was before.
            share_memory(tensor, shown, torch.is_grad_enabled() and (tensor.requires_grad or source.requires_grad))
            return tensor
        source = Hooks.to_backend(source) if resident else constant_tensor(source)
    shape = geometry_of(source)
    if geometry:
        offset, size = geometry[0], tuple(geometry[1])
        stride = tuple(geometry[2]) if len(geometry) > 2 else contiguous_stride(size)
        shape = (size, stride, offset, source.dtype)
    rebind(tensor, source._storage, shape)
    return tensor


def _set_storage(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """`a.set_(storage, ...)`: a real storage, since a deferred tensor has none to give."""
    tensor = args[0]
    if type(tensor) is not DeferredTensor:
        return _on_real(op, args, kwargs)
    with DisableTorchDispatch():
        real = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        op(real, *args[1:], **kwargs)
        if session.trace is None and is_pending(tensor) and op is aten.set_.source_Storage_storage_offset:
            become(tensor, real)  # C++ that makes a tensor of a storage, and holds what it made, gives no geometry
            return tensor
    return _set_tensor(aten.set_.source_Storage, (tensor, real), {})


def resize(tensor: DeferredTensor, size: tuple[int, ...]) -> None:
    """Give `tensor` another size, row by row, as `Tensor.resize_` does."""
    show_more(tensor, size, contiguous_stride(size))


def show_more(tensor: DeferredTensor, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Have `tensor` show `size` elements from where it begins: its storage grows where that is too small.

    As PyTorch's, a storage that grows stays one storage: whatever else looks at it goes on to do so.
    """
    storage, offset = tensor._storage, int(tensor.storage_offset())
    value, geometry = storage.value, (size, stride, offset, tensor.dtype)
    reach = (offset + span(size, stride)) * tensor.itemsize
    if dense_count(value.shape, value.stride) == value.numel and reach <= value.numel * value.dtype.itemsize:
        rebind(tensor, storage, geometry)
        return
    resident = session.trace is None and on_backend(tensor)  # its memory is there, and is to be so again
    count = max(span(value.shape, value.stride), -(-reach // value.dtype.itemsize))
    whole = DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype)
    with torch.no_grad():
        if resident:
            real = to_host(whole)
            with DisableTorchDispatch():
                if real.is_contiguous():  # a real tensor that has the same memory sees it grow
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
    # In a step, what outlives it keeps its memory: the tensor that was to grow has been given another.
    others = storage.alive() if session.trace is None or storage.trace is session.trace else []
    for other in others:
        if other is not tensor and other is not whole:
            rebind(other, flat._storage, geometry_of(other))
    rebind(tensor, flat._storage, geometry)
    conjugate_views.move(storage, flat._storage)
    if resident:  # nobody looks at it any more
        storage.resident.release_exported_memory()


def _resize(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    tensor, *others = args
    if type(tensor) is not DeferredTensor:
        return _on_real(op, args, kwargs)
    with DisableTorchDispatch():
        shown = as_meta(tensor)  # says what becomes of strides
        op(shown, *(as_meta(a) if isinstance(a, Tensor) else a for a in others), **kwargs)
    if (shown.shape, shown.stride()) != (tensor.shape, tensor.stride()):
        show_more(tensor, tuple(shown.shape), shown.stride())
    return tensor


OPERATIONS: dict[Any, Callable[[OpOverload, tuple, dict], Any]] = {
    aten.set_.source_Tensor: _set_tensor,
    aten.set_.source_Tensor_storage_offset: _set_tensor,
    aten.set_.source_Storage: _set_storage,
    aten.set_.source_Storage_storage_offset: _set_storage,
    aten.resize_.default: _resize,
    aten.resize_as_.default: _resize,
    **dict.fromkeys(
        (
            aten.t_.default,
            aten.squeeze_.default,
            aten.squeeze_.dim,
            aten.squeeze_.dims,
            aten.unsqueeze_.default,
            aten.transpose_.default,
            aten.as_strided_.default,
            aten.swapaxes_.default,
            aten.swapdims_.default,
        ),
        _in_place_view,
    ),
}
