"""Deferred tensors: a geometry and a DeferredStorage.

A DeferredStorage knows the `Value` that it holds now. Tensors that share memory in eager PyTorch share one here, so
ties and views need nothing more.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch

from ..compat import patches
from ..compat.torch_names import (
    PARAMETER_FLAG,
    DisableTorchDispatch,
    OpOverload,
    disabled_torch_function,
    is_parameter,
    make_wrapper_subclass,
    throw_on_mutable_data_ptr,
)
from ..errors import ElsewhereError, TraceError
from ..program.graph import Ref, Value, geometry_of
from ..program.source import here
from . import distributed, session
from .conjugate_bits import lazy_bits
from .exported_memory import record_exported_memory

Tensor = torch.Tensor


class Hooks:
    """Callbacks of a deferred tensor, registered by the layers that build on it."""

    dispatch: Callable[[Any, tuple, dict], Any]  # the recorder's way in
    value_of: Callable[[DeferredTensor], Tensor]  # its content, in memory of its own
    memory_of: Callable[[DeferredTensor, bool], Tensor]  # on a backend: its content, in the memory that it lives in
    constant_tensor: Callable[[Tensor], DeferredTensor]  # a deferred tensor whose content is known
    to_backend: Callable[[Tensor], DeferredTensor]  # on the backend, and living in a real tensor's memory
    mirror_of: Callable[[Tensor], DeferredStorage]  # what a real conjugated or negated view looks at, in a step
    make: Callable[[list[DeferredStorage]], None]  # computes what they hold; their tensors stay deferred
    allocate_real: Callable[[DeferredStorage], None]  # makes all that looks at it real, on memory that is not written
    materialize: Callable[[Tensor], Tensor]  # makes it real, in place
    materialize_all: Callable[[Tensor], Tensor]  # likewise, with the module that it belongs to
    materialize_storages: Callable[[list[DeferredStorage]], None]  # makes all that looks at them real, in place
    assert_later: Callable[..., None]  # checks a condition, with a message, whenever the step under way has run

    @classmethod
    def register(cls, **callbacks: Callable) -> None:
        """Take what a layer above has."""
        for name, callback in callbacks.items():
            setattr(cls, name, staticmethod(callback))


class DeferredStorage:
    """What stands for one storage: the Value it holds now, and the deferred tensors that share it."""

    __slots__ = (
        "value", "tensors", "fills", "resident", "trace", "first", "mirrors", "mirrored_by", "made", "__weakref__"
    )  # fmt: skip

    def __init__(self, value: Value) -> None:
        self.value = value
        self.first = value  # what it held first, but for memory that was never written
        self.tensors: list[_TensorRef] = []
        self.fills = 0  # whole fills so far: all but the last are dead
        self.resident: Any = None  # on a backend: its device buffer, which owns the value from then on
        self.trace: Any = None  # the step trace that has taken it up
        self.made: tuple[Value, Tensor] | None = None  # a Value that it held, and its content: see `first_use.py`
        self.mirrors: Mirror | None = None  # what it shows conjugated or negated: see `conjugate_views.py`
        self.mirrored_by: list[weakref.ref[DeferredStorage]] = []

    @property
    def is_made(self) -> bool:
        """Whether what it holds now has been computed, for good."""
        return self.made is not None and self.made[0] is self.value and self.resident is None

    @property
    def root(self) -> DeferredStorage:
        """What it mirrors, perhaps by way of other mirrors; itself, if it mirrors nothing."""
        storage = self
        while storage.mirrors is not None:
            storage = storage.mirrors.of
        return storage

    def alive(self) -> list[DeferredTensor]:
        """The tensors that share this storage and still exist, each once."""
        found = {
            id(t): (t, ref) for ref in self.tensors if (t := ref()) is not None and _deferred_storage_of(t) is self
        }
        self.tensors[:] = [ref for _, ref in found.values()]
        return [tensor for tensor, _ in found.values()]

    def add(self, tensor: Tensor) -> None:
        """Note that `tensor` looks at this storage."""
        ref = _TensorRef(tensor)
        ref.among = self.tensors
        self.tensors.append(ref)


class _TensorRef(weakref.ref):
    """Refers to a tensor that looks at a storage, or has done so."""

    __slots__ = ("among",)
    among: list[_TensorRef]


def forget(tensor: Tensor) -> None:
    """Have no storage refer to a tensor that is not deferred any more: `swap_tensors` refuses weak references."""
    for ref in weakref.getweakrefs(tensor):
        if type(ref) is _TensorRef:
            ref.among[:] = [other for other in ref.among if other is not ref]


class Mirror(NamedTuple):
    """What a conjugated or negated view looks at: `computed_by` of all of a storage, as numbers of `dtype`."""

    computed_by: OpOverload
    of: DeferredStorage
    dtype: torch.dtype


def _deferred_storage_of(tensor: Any) -> DeferredStorage | None:
    return tensor._storage if type(tensor) is DeferredTensor else None


_requires_grad: Any = Tensor.requires_grad


def is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view of a weight made without gradients, edited since: PyTorch asks nobody to use it
        return False


def materialize_views(weight: DeferredTensor) -> None:
    """Make a weight, which is to be frozen or to look elsewhere, and its views, if autograd knows of some.

    Where a view has been edited PyTorch recomputes, when somebody asks, what it was computed from: of tensors
    without memory by computing it again, which gives nothing where the weight wants no gradients by then.
    """
    if session.trace is not None or on_backend(weight) or len(weight._storage.tensors) < 2 or not weight.requires_grad:
        return
    with torch.enable_grad():
        if any(not is_leaf(tensor) for tensor in weight._storage.alive() if tensor is not weight):
            Hooks.materialize_storages([weight._storage])


class DeferredTensor(Tensor):
    """A tensor with shape, dtype, device and history, and no memory."""

    _storage: DeferredStorage

    def __new__(cls, data: Any = None, requires_grad: bool = True, **attributes: Any) -> Any:
        """A parameter of `data`: what `type(parameter)(data, requires_grad=...)` means to whoever rebuilds one.

        With `**parameter.__dict__`, as accelerate does, come our own attributes too, which belong to the other tensor.
        """
        unknown = attributes.keys() - {"_storage", PARAMETER_FLAG}
        if unknown:
            raise TypeError(f"{here()}: a parameter takes no argument {sorted(unknown)[0]!r}")
        return torch.nn.Parameter(data, requires_grad)

    # What torch would do before it dispatches is right for us too.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def wrap(storage: DeferredStorage, size, stride, offset: Any, dtype: torch.dtype) -> DeferredTensor:
        """A new tensor that looks at `storage`."""
        if not patches.deferred_patches_installed():
            patches.enter(patches.DEFERRED, None)
        self = make_wrapper_subclass(
            DeferredTensor,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=storage.value.device,
        )
        self._storage = storage
        storage.add(self)
        throw_on_mutable_data_ptr(self)  # C++ that goes past our methods to its memory gets an error, not null
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if has_strangers(types):
            return NotImplemented
        return Hooks.dispatch(func, args, kwargs or {})

    def _ref(self) -> Ref:
        return Ref(self._storage.value, *geometry_of(self))

    def detach(self):
        """As `torch.Tensor.detach`."""
        distributed.prepare(is_deferred=lambda tensor: type(tensor) is DeferredTensor)
        return super().detach()

    def item(self):
        """As `torch.Tensor.item`. What PyTorch reads by itself, where it wants a number, does not come this way."""
        return Hooks.value_of(self).item() if session.trace is not None else super().item()

    def __setitem__(self, index, value):
        """As `torch.Tensor.__setitem__`; through a mask, so that the gradient of what is written has a known size."""
        if session.trace is None or not isinstance(value, Tensor) or not value.requires_grad or not _is_mask(index):
            return super().__setitem__(index, value)
        return _write_by_mask(self, index, value)

    def addcdiv(self, tensor1, tensor2, value=1):
        """As `torch.Tensor.addcdiv`; `value` may be the third argument, as Cerebras' documentation writes it."""
        return super().addcdiv(tensor1, tensor2, value=value)

    def __copy__(self):
        out: Any = DeferredTensor.wrap(
            self._storage, tuple(self.shape), self.stride(), self.storage_offset(), self.dtype
        ).requires_grad_(self.requires_grad)
        out.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_storage"})
        return out

    def __deepcopy__(self, memo):
        out: Any
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf and not is_parameter(self):  # as torch.Tensor says it; torch's own modules rely on it
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        if is_parameter(self):  # a parameter's copy shares memory with nothing, and drops its attributes
            with torch.no_grad():
                out = torch.nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            memo[id(self)] = out
            return out
        storage = self._storage
        key = ("firstloss.storage", id(storage))
        if key not in memo:
            base = DeferredTensor.wrap(storage, storage.value.shape, storage.value.stride, 0, storage.value.dtype)
            with torch.no_grad():
                memo[key] = base.clone()
        geometry = tuple(self.shape), self.stride(), self.storage_offset()
        if type(memo[key]) is DeferredTensor:
            out = DeferredTensor.wrap(memo[key]._storage, *geometry, self.dtype)
        else:  # of a tensor on a backend, which is copied to the host
            out = torch.empty(0, dtype=self.dtype).set_(memo[key].untyped_storage(), geometry[2], *geometry[:2])
        memo[id(self)] = out
        extra = {k: v for k, v in self.__dict__.items() if k != "_storage"}
        if extra:
            out.__dict__.update(copy.deepcopy(extra, memo))
        out.requires_grad_(self.requires_grad)
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def is_conj(self):
        """As `torch.Tensor.is_conj`."""
        return lazy_bits(self).conjugated

    def is_neg(self):
        """As `torch.Tensor.is_neg`."""
        return lazy_bits(self).negated

    def resolve_conj(self):
        """As `torch.Tensor.resolve_conj`: a copy of a conjugated view."""
        return self.clone() if self.is_conj() else self

    def resolve_neg(self):
        """As `torch.Tensor.resolve_neg`."""
        return self.clone() if self.is_neg() else self

    # Whoever takes hold of the memory itself gets a real tensor: this one, materialized in place, or, on a backend, one
    # that looks at the memory in which the content lives from then on (`lasting`: as long as the storage does, since
    # what is known is an address; else, as long as somebody holds that tensor or what was made of it).
    def numpy(self, *, force=False):
        """As `torch.Tensor.numpy`, of the tensor's own memory."""
        return _numpy(self.detach() if force else self)

    def __array__(self, dtype=None, copy=None):
        return _array(self, dtype, copy)

    def as_subclass(self, cls):
        """As `torch.Tensor.as_subclass`, on the materialized tensor: one tensor cannot be of two Python classes."""
        return to_host(self).as_subclass(cls)

    def requires_grad_(self, requires_grad=True):
        """As `torch.Tensor.requires_grad_`."""
        if not requires_grad:
            materialize_views(self)
        return Tensor.requires_grad_(self, requires_grad)

    def _freeze_or_not(self, requires_grad):
        if not requires_grad:
            materialize_views(self)
        _requires_grad.__set__(self, requires_grad)

    requires_grad = property(_requires_grad.__get__, _freeze_or_not)

    def register_hook(self, hook):
        """As `torch.Tensor.register_hook`; for gradients of what a traced step has made there is no graph."""
        if not self.requires_grad and on_backend(self) and self._storage.trace is None:
            raise TraceError(
                f"{here()}: this tensor wants no gradient. If a traced step has made it, its graph has ended with "
                "that: register the hook in the step, or on the weights that it is made of."
            )
        return super().register_hook(hook)

    def data_ptr(self) -> int:
        """As `torch.Tensor.data_ptr`, of memory that is there as long as the tensor.

        Who takes the address for a name gets a number that is nobody else's: all of a model would be made for it.
        """
        if is_pending(self) and session.trace is None and distributed.wants_address_as_id():
            return _number_of(self._storage) + int(self.storage_offset()) * self.itemsize
        return to_real(self, lasting=True).data_ptr()

    def __dlpack__(self, *args, **kwargs):
        real = to_real(self, writable=True)
        with DisableTorchDispatch():
            return real.__dlpack__(*args, **kwargs)

    def untyped_storage(self):
        """As `torch.Tensor.untyped_storage`, of the tensor's own memory."""
        return to_real(self, lasting=True).untyped_storage()

    def share_memory_(self):
        """As `torch.Tensor.share_memory_`: from here on the content lives in memory of all processes."""
        to_real(self, lasting=True, writable=True).share_memory_()
        if on_backend(self):
            record_exported_memory(self._storage)  # it is elsewhere now
        return self

    def tolist(self):
        """As `torch.Tensor.tolist`: computes just what this tensor needs."""
        return Hooks.value_of(self).tolist()

    def __reduce_ex__(self, protocol):
        real = to_real(self)
        if real is not self:
            if is_parameter(self):
                real = torch.nn.Parameter(real.detach(), self.requires_grad)
            real.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_storage", PARAMETER_FLAG)})
        return real.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        if session.trace is not None and session.trace.is_only_displayed(self):
            return f"<traced tensor: {list(self.shape)} {self.dtype}>"
        real = Hooks.value_of(self)  # an error if it has none yet
        return repr(torch.nn.Parameter(real, self.requires_grad) if is_parameter(self) else real)

    def __format__(self, spec):
        return format(Hooks.value_of(self), spec)


_numbers: weakref.WeakKeyDictionary[DeferredStorage, int] = weakref.WeakKeyDictionary()
_lowest = 0


def _number_of(storage: DeferredStorage) -> int:
    """Where the memory of `storage` would begin, if it were in a memory below address 0, where no real tensor is."""
    global _lowest
    if storage not in _numbers:
        _lowest -= storage.value.nbytes + 1
        _numbers[storage] = _lowest
    return _numbers[storage]


def on_backend(tensor: Any) -> TypeGuard[DeferredTensor]:
    """Whether a tensor lives on a backend: a device buffer has its content."""
    return type(tensor) is DeferredTensor and tensor._storage.resident is not None


def is_pending(tensor: Any) -> TypeGuard[DeferredTensor]:
    """Whether a tensor is deferred and on no backend: to be real, it has to be materialized."""
    return type(tensor) is DeferredTensor and tensor._storage.resident is None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0


def _write_by_mask(x: Tensor, mask: Tensor, value: Tensor) -> None:
    """`x[mask] = value`: one value for all places, or the n-th for the n-th place."""
    rest = x.shape[mask.dim() :]
    mask = mask.reshape(*mask.shape, *(1,) * len(rest)).expand(x.shape)
    value = value.to(x.dtype)
    if value.dim() <= len(rest) or value.shape[0] == 1:
        value = value.squeeze(0) if value.dim() > len(rest) else value
        x.copy_(torch.where(mask, value, x))
    else:
        x.masked_scatter_(mask, value.expand(value.shape[0], *rest))


def has_strangers(types: Iterable[type]) -> bool:
    """Whether there are tensor classes among them that see to operations themselves, and are not ours."""
    return session.trace is None and any(not issubclass(kind, DeferredTensor) for kind in types)


def to_real(tensor: DeferredTensor, lasting: bool = False, writable: bool = False, alone: bool = False) -> Tensor:
    """`tensor` made real, in place; on a backend, a real tensor that shares the memory of its content.

    Args:
        lasting: whoever asks goes on to use the address.
        writable: whoever asks could write to it, and not be told that it is a copy.
        alone: somebody reads this one. Else, outside of a capture, all of the module that it belongs to is made.
    """
    if session.trace is not None:  # an error there
        return Hooks.value_of(tensor)
    if is_pending(tensor):
        return Hooks.materialize(tensor) if session.depth or alone else Hooks.materialize_all(tensor)
    if writable and not tensor._storage.resident.in_host_memory:
        raise ElsewhereError(
            f"{here()}: the memory of this tensor is on another device, or in parts on a mesh, so nobody can be given "
            "it to write to. Take a copy: tensor.detach().clone(); and bring edits back with tensor.copy_(...)."
        )
    real = Hooks.memory_of(tensor, lasting)
    return real.requires_grad_() if tensor.requires_grad else real


def _elsewhere(tensor: DeferredTensor) -> bool:
    """Whether it lives on a backend, in memory that is not this host's."""
    return session.trace is None and on_backend(tensor) and not tensor._storage.resident.in_host_memory


def to_host(tensor: DeferredTensor, alone: bool = False) -> Tensor:
    """As `to_real`; where the memory is elsewhere, a copy in memory of the caller's own."""
    if not _elsewhere(tensor):
        return to_real(tensor, alone=alone)
    real = Hooks.value_of(tensor)
    return real.requires_grad_() if tensor.requires_grad else real


def _numpy(tensor: DeferredTensor) -> Any:
    """Its memory as an array; where it is elsewhere, a copy that cannot be written."""
    elsewhere = _elsewhere(tensor)
    real = to_host(tensor, alone=True)
    with DisableTorchDispatch():  # else what it detaches, in a step, were a tensor without memory
        array = real.numpy()
    if elsewhere:
        array.flags.writeable = False
    return array


def _array(tensor: DeferredTensor, dtype: Any, copy: bool | None) -> Any:
    array = _numpy(tensor)
    if dtype is not None and array.dtype != dtype:
        if copy is False:
            raise ValueError(f"this tensor of {tensor.dtype} cannot be an array of {dtype} without a copy.")
        return array.astype(dtype)
    return array.copy() if copy else array
