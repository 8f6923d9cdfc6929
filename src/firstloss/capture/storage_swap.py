"""Swap the storage of a tensor and keep the Python object: `.data = ...`, and from real to deferred and back."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..compat.patches import original, replaces
from ..compat.torch_names import HOOK_TABLES, PARAMETER_FLAG, DisableTorchDispatch, is_parameter, swap_tensor_impl
from ..errors import BackendError, CaptureError, MaterializeError
from ..program.graph import Geometry, geometry_of
from ..program.source import here
from . import session
from .autograd_boundary import without_history
from .exported_memory import overlapping_storages, record_exported_memory
from .gradient_nodes import exchanged
from .tensor import DeferredStorage, DeferredTensor, Hooks, is_leaf, materialize_views, on_backend, to_host

Tensor = torch.Tensor


def set_storage(tensor: DeferredTensor, storage: DeferredStorage, geometry: Geometry) -> None:
    """Make a deferred tensor a view of `storage`."""
    _set_data(tensor, DeferredTensor.wrap(storage, *geometry))
    tensor._storage = storage
    storage.add(tensor)


def rebind(tensor: Tensor, storage: DeferredStorage, geometry: Geometry) -> None:
    """Make `tensor` a view of `storage`, in place; a real tensor becomes deferred."""
    if session.trace is not None and is_state(tensor):
        session.trace.new_layouts.change(tensor)
    if type(tensor) is DeferredTensor:
        if on_backend(tensor):  # resize_, set_, t_, `.data = ...` invalidate compiled steps
            session.rebinds += 1
        set_storage(tensor, storage, geometry)
        return
    new = DeferredTensor.wrap(storage, *geometry)
    if tensor.grad_fn is not None and session.trace is None:  # keep its history
        _set_data(tensor, to_host(new))
        return
    kind = type(tensor)
    if isinstance(tensor, UninitializedTensorMixin):
        kind = tensor.cls_to_become
    if kind is not Tensor and kind is not torch.nn.Parameter:
        raise CaptureError(
            f"{here()}: a real {kind.__name__} cannot become a view of a deferred tensor. Call "
            "firstloss.materialize_tensor on the deferred one first."
        )
    become(tensor, new)
    if kind is torch.nn.Parameter:
        setattr(tensor, PARAMETER_FLAG, True)
    storage.add(tensor)


def share_memory(tensor: Tensor, real: Tensor, is_computed: bool = False) -> None:
    """Make `tensor` a real tensor that shares the memory of `real`, in place.

    Args:
        is_computed: whether it has been computed from tensors that require grad.
    """
    with DisableTorchDispatch(), torch.no_grad():
        become(tensor, like(tensor, real.detach(), is_computed or not is_leaf(tensor), str(here())))


def like(tensor: Tensor, real: Tensor, is_computed: bool, line: str) -> Tensor:
    """A real tensor that shares the memory of `real`, and is a parameter if `tensor` is one.

    If it `is_computed`, its history was lost at the line `line`, and a gradient that reaches it is an error.
    """
    detached = without_history(real.detach(), line) if is_computed else None
    if not is_parameter(tensor):
        return real if detached is None else detached
    real = torch.nn.Parameter(real, tensor.requires_grad and not is_computed)
    if detached is not None:  # as in eager PyTorch, if a tensor with a history was copied into the parameter
        with torch.enable_grad():
            real.copy_(detached)
    return real


def become(tensor: Tensor, other: Tensor) -> None:
    """Make `tensor` what `other` is, in place; keeps `requires_grad`, gradient, hooks and attributes."""
    with exchanged(tensor, other):
        _become(tensor, other)


def _become(tensor: Tensor, other: Tensor) -> None:
    leaf = is_leaf(tensor)
    requires_grad, grad = tensor.requires_grad, tensor.grad if leaf else None
    hooks = hook_tables(tensor) if leaf else {}
    attributes = {k: v for k, v in tensor.__dict__.items() if k not in ("_storage", PARAMETER_FLAG)}
    if requires_grad and not other.requires_grad:
        other.requires_grad_(True)
    if grad is not None:
        tensor.grad = None
    old_class, old_attributes = (
        type(tensor),
        {k: v for k, v in tensor.__dict__.items() if k in ("_storage", PARAMETER_FLAG)},
    )
    tensor.__class__ = type(other)
    tensor.__dict__.clear()
    tensor.__dict__.update({**other.__dict__, **attributes})
    try:
        swap_tensor_impl(tensor, other)
    except RuntimeError as error:
        tensor.__class__ = old_class
        tensor.__dict__.clear()
        tensor.__dict__.update({**old_attributes, **attributes})
        if grad is not None:
            tensor.grad = grad
        raise MaterializeError(
            f"{here()}: a deferred tensor of shape {tuple(tensor.shape)} cannot be materialized here: PyTorch holds a "
            "weak reference to it in C++, as torch.jit.trace does to the tensors that it traces. Call "
            f"firstloss.materialize_module(model) before. ({str(error).splitlines()[0]})"
        ) from error
    # PyTorch may still hold the old C++ tensor, which is now that of `other`; it needs the old class. Of a weight on a
    # backend, each graph that is kept may hold one, which shows the storage's content and is never exchanged again.
    other.__class__ = old_class
    other.__dict__.clear()
    other.__dict__.update(old_attributes)
    if old_class is DeferredTensor and old_attributes["_storage"].resident is None:
        old_attributes["_storage"].add(other)
    if grad is not None:
        set_gradient(tensor, Hooks.materialize(grad) if type(tensor) is not DeferredTensor else grad)
    set_hook_tables(tensor, hooks)


def set_gradient(tensor: Tensor, grad: Tensor) -> None:
    """Assign `grad`, even if its shape or dtype differs because `.data` has been assigned."""
    if (tensor.shape, tensor.dtype) == (grad.shape, grad.dtype):
        tensor.grad = grad
        return
    data: Tensor
    fitting: Tensor
    if type(tensor) is DeferredTensor:
        data, fitting = (DeferredTensor.wrap(tensor._storage, *geometry_of(t)) for t in (tensor, grad))
    else:
        data, fitting = _data.__get__(tensor), torch.empty_like(grad)
    _set_data(tensor, fitting)
    tensor.grad = grad
    _set_data(tensor, data)


def hook_tables(tensor: Tensor) -> dict[str, Any]:
    """The hook tables of `tensor`, by attribute; empty ones, too, since hooks may be added later."""
    return {name: table for name in HOOK_TABLES if (table := getattr(tensor, name)) is not None}


def set_hook_tables(tensor: Tensor, tables: dict[str, Any]) -> None:
    """Register the hook tables of the Python object with its new C++ tensor."""
    for name, table in tables.items():
        setattr(tensor, name, table)


# -- Tensor.data -----------------------------------------------------------------------------------------------------
# PyTorch assigns `.data` without the dispatcher, and would give a real tensor the null pointer of a deferred one.

_data: Any = original("torch.Tensor.data")
_set_data = _data.__set__


def is_state(tensor: Tensor) -> bool:
    """Whether `tensor` outlives the step: it is on a backend, or existed before the active trace."""
    if type(tensor) is not DeferredTensor:
        return session.trace is not None
    storage = tensor._storage
    if storage.resident is not None or session.trace is None:
        return storage.resident is not None
    return storage.trace is not session.trace or session.trace.is_external(storage)


def _is_same_view(tensor: Tensor, other: Any) -> bool:
    """Whether `other` is the same view of the same memory as a tensor of a step."""
    if type(other) is not DeferredTensor or geometry_of(other) != geometry_of(tensor):
        return False
    if type(tensor) is DeferredTensor:
        return other._storage is tensor._storage
    held = session.trace.as_input(tensor)  # type: ignore[union-attr]
    return held is not None and held[1] is other._storage


def _assign_data(self: Tensor, other: Any) -> None:
    if type(self) is DeferredTensor and not session.this_thread.copies_alone:
        materialize_views(self)
    if type(other) is not DeferredTensor and type(self) is not DeferredTensor:
        if session.trace is not None:
            session.trace.new_memory.refuse(self, "is memory from outside of the step")
        _set_data(self, other)
        return
    same = self.shape == other.shape and self.dtype == other.dtype
    if session.trace is None and on_backend(self):
        if (
            type(other) is DeferredTensor
            and other._storage is self._storage
            and geometry_of(other) == geometry_of(self)
        ):
            return
        # Compiled steps refer to the storage: if only this tensor uses it, exchange its content.
        unshared = same and self._ref().whole and all(t is self for t in self._storage.alive())
        overlapping = [] if type(other) is DeferredTensor else list(overlapping_storages(other))
        if any(offset is None for _, offset in overlapping):
            raise BackendError(
                f"{here()}: the memory assigned to a tensor of shape {list(self.shape)} partly overlaps that of "
                "another tensor on the backend. Use tensor.data.copy_(...), or tensor.data = ....clone()."
            )
        if unshared and not overlapping and self._storage.resident.exchange(other):
            record_exported_memory(self._storage)
            # A step uses the new memory by another tensor, or the old memory by a real tensor.
            for trace in list(session.traces):
                trace.outdated |= trace.shares(other) or self._storage in trace.aliased_storages
            return
        if type(other) is not DeferredTensor:
            other = Hooks.to_backend(other)
    elif same and session.trace is not None and _is_same_view(self, other):
        return  # `p.data -= x` has edited the memory, and assigns it again
    elif is_state(self) and same:
        session.trace.new_memory.assign(self, other)  # type: ignore[union-attr]
        return
    if type(other) is not DeferredTensor:
        if session.trace is None and type(other) in (Tensor, torch.nn.Parameter):
            share_memory(self, other)
            return
        other = Hooks.constant_tensor(other)
    if session.trace is not None and is_state(self) and session.trace.is_external(other._storage):
        session.trace.new_memory.refuse(self, "is memory from outside of the step")
    rebind(self, other._storage, geometry_of(other))


def _get_data(self: Tensor) -> Tensor:
    if session.trace is not None and type(self) in (Tensor, torch.nn.Parameter):
        return self.detach()  # through the dispatcher
    return _data.__get__(self)


replaces("torch.Tensor.data")(property(_get_data, _assign_data, doc=_data.__doc__))
