"""Deferred tensors: a view of a DeferredStorage, which has the current `Value`.

Tensors that share memory in eager PyTorch share a DeferredStorage, so ties and views need no special handling.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from ..compat import patches
from ..compat.locks import fork_safe_lock
from ..compat.python_names import getframe
from ..compat.torch_names import (
    PARAMETER_FLAG,
    DisableTorchDispatch,
    InferenceMode,
    OpOverload,
    disabled_torch_function,
    is_parameter,
    make_wrapper_subclass,
    throw_on_mutable_data_ptr,
    version_of,
)
from ..errors import ElsewhereError, TraceError
from ..program.graph import FileValue, Ref, Value, geometry_of
from ..program.source import here
from . import distributed, session
from .conjugate_bits import lazy_bits
from .exported_memory import record_exported_memory
from .input_numbers import is_input_number
from .printed_texts import is_for_print

Tensor = torch.Tensor

_OWN_THREADS = "firstloss"  # what the names of Firstloss's own threads begin with
_ENTERED = 0.001  # seconds, in which another thread gets from the begin of an operation to its dispatch


class Hooks:
    """Callbacks registered by higher layers."""

    first_use: Any  # the mode of `first_use.py`
    dispatch: Callable[[Any, tuple[Any, ...], dict[Any, Any]], Any]  # the recorder
    is_composite: Callable[[OpOverload], bool]  # see `op_call.py`
    run_in_host_memory: Callable[[OpOverload, tuple[Any, ...], dict[Any, Any]], Any]  # see `host_kernels.py`
    value_of: Callable[[DeferredTensor], Tensor]  # a copy of its content
    memory_of: Callable[[DeferredTensor, bool], Tensor]  # on a backend: a real tensor that shares its memory
    constant_tensor: Callable[[Tensor], DeferredTensor]  # a deferred tensor with known content
    to_backend: Callable[[Tensor], DeferredTensor]  # a tensor on the backend that shares a real tensor's memory
    mirror_of: Callable[[Tensor], DeferredStorage]  # the storage of a real conjugated or negated view, in a step
    compute: Callable[[list[DeferredStorage]], None]  # compute their content; their tensors stay deferred
    allocate_real: Callable[[DeferredStorage], None]  # make its tensors real, with uninitialized memory
    materialize: Callable[[Tensor], Tensor]  # make it real, in place
    materialize_all: Callable[[Tensor], Tensor]  # likewise, with the whole module that it belongs to
    materialize_storages: Callable[[list[DeferredStorage]], None]  # make their tensors real, in place
    assert_later: Callable[..., None]  # check a condition after each execution of the active step

    @classmethod
    def register(cls, **callbacks: Callable[..., Any]) -> None:
        """Register callbacks by name."""
        for name, callback in callbacks.items():
            setattr(cls, name, staticmethod(callback))


class DeferredStorage:
    """A storage without memory: its current Value, and the deferred tensors that share it."""

    __slots__ = (
        "value", "tensors", "fills", "resident", "trace", "first", "mirrors", "mirrored_by", "computed", "is_local",
        "__weakref__",
    )  # fmt: skip

    def __init__(self, value: Value) -> None:
        self.value: Value = value
        self.first: Value = value  # the first Value, other than uninitialized memory
        self.tensors: list[TensorRef] = []
        self.fills: int = 0  # fills of the whole storage; all but the last are dead
        self.resident: Any = None  # on a backend: its DeviceBuffer, which owns the content
        self.trace: Any = None  # the step trace that has adopted it
        self.computed: tuple[Value, Tensor] | None = None  # a Value and its computed content: see `first_use.py`
        self.mirrors: Mirror | None = None  # the storage that it conjugates or negates: see `conjugate_views.py`
        self.mirrored_by: list[weakref.ref[DeferredStorage]] = []
        self.is_local: bool = False  # whether `DTensor.from_local` was given it: it need not be a slice of a whole

    @property
    def is_computed(self) -> bool:
        """Whether the content of the current Value has been computed."""
        return self.computed is not None and self.computed[0] is self.value and self.resident is None

    @property
    def root(self) -> DeferredStorage:
        """The storage that it mirrors, directly or through other mirrors; itself if it mirrors none."""
        storage = self
        while storage.mirrors is not None:
            storage = storage.mirrors.of
        return storage

    def alive(self) -> list[DeferredTensor]:
        """The tensors that share this storage and still exist, each once."""
        tensors = {
            id(t): (t, ref) for ref in self.tensors if (t := ref()) is not None and _deferred_storage_of(t) is self
        }
        self.tensors[:] = [ref for _, ref in tensors.values()]
        return [tensor for tensor, _ in tensors.values()]

    def add(self, tensor: Tensor, version: int | None = None) -> None:
        """Register `tensor` as a view of this storage; of the result of a view operation, `version` is its base's."""
        ref = TensorRef(tensor)
        ref.among = self.tensors
        ref.version = version
        self.tensors.append(ref)

    def outdated_views(self) -> set[int]:
        """The ids of the results of view operations whose base has been edited since, as autograd counts it."""
        views = [(ref(), ref.version) for ref in self.tensors if ref.version is not None]
        return {id(view) for view, version in views if view is not None and version_of(view) != version}


class TensorRef(weakref.ref[Any]):
    """A reference to a tensor that is, or was, a view of a storage."""

    __slots__ = ("among", "version")
    among: list[Any]
    version: int | None

    def drop(self) -> None:
        """Remove it from what holds it."""
        self.among[:] = [other for other in self.among if other is not self]


def forget(tensor: Tensor) -> None:
    """Remove the storages' weak references to a tensor, which `swap_tensors` does not accept."""
    for ref in weakref.getweakrefs(tensor):
        if isinstance(ref, TensorRef):
            ref.drop()


class Mirror(NamedTuple):
    """The content of a mirror: `computed_by` applied to the whole storage `of`, viewed as `dtype`."""

    computed_by: OpOverload
    of: DeferredStorage
    dtype: torch.dtype


def _deferred_storage_of(tensor: Any) -> DeferredStorage | None:
    return tensor._storage if type(tensor) is DeferredTensor else None


# Held while deferred tensors become real, and while one that may become real is used, outside of captures and traces:
# several threads may use a model for the first time.
becoming_real: Any = fork_safe_lock(delays_forks=True)

_requires_grad: Any = Tensor.requires_grad


def _tensors_in(args: Iterable[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _tensors_in(arg)
        elif isinstance(arg, Tensor):
            yield arg


def is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made in no_grad mode whose base was edited since
        return False


def materialize_views(weight: DeferredTensor) -> None:
    """Materialize a weight and its views, if it has views with a history, before it is frozen or rebound.

    PyTorch regenerates the grad_fn of an edited view lazily, which fails for tensors without memory once the weight no
    longer requires gradients.
    """
    if session.trace is not None or on_backend(weight) or len(weight._storage.tensors) < 2 or not weight.requires_grad:
        return
    with torch.enable_grad():
        if any(not is_leaf(tensor) for tensor in weight._storage.alive() if tensor is not weight):
            Hooks.materialize_storages([weight._storage])


class DeferredTensor(Tensor):
    """A tensor with shape, dtype, device and autograd history, but no memory."""

    __module__ = "torch"  # by which opt_einsum, autoray and others choose what to call

    _storage: DeferredStorage

    def __new__(cls, data: Any = None, requires_grad: bool = True, **attributes: Any) -> Any:
        """Create a parameter of `data`, for code that calls `type(parameter)(data, requires_grad=...)`.

        accelerate passes `**parameter.__dict__`, too; our own attributes in it are ignored.
        """
        unknown = attributes.keys() - {"_storage", PARAMETER_FLAG}
        if unknown:
            raise TypeError(f"{here()}: a parameter takes no argument {sorted(unknown)[0]!r}")
        return torch.nn.Parameter(data, requires_grad)

    __torch_function__ = disabled_torch_function

    @staticmethod
    def wrap(
        storage: DeferredStorage,
        size: Any,
        stride: Any,
        offset: Any,
        dtype: torch.dtype,
        new: bool = False,
        version: int | None = None,
    ) -> DeferredTensor:
        """Create a view of `storage`.

        Args:
            new: whether it is the result of an operation, which is an inference tensor in `torch.inference_mode`.
                Views of weights are not, as in eager PyTorch.
            version: of what the result of a view operation is a view of.
        """
        if not new and torch.is_inference_mode_enabled():
            with InferenceMode(False):
                return DeferredTensor.wrap(storage, size, stride, offset, dtype, version=version)
        if not patches.deferred_installed:
            patches.enter(patches.DEFERRED, None)
        if len(sys.modules) != patches.modules_seen:
            patches.install_imported()
        self = make_wrapper_subclass(
            DeferredTensor,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=storage.value.device,
        )
        self._storage = storage
        storage.add(self, version)
        throw_on_mutable_data_ptr(self)  # C++ code gets an error instead of a null pointer
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if has_foreign_subclass(types):
            return NotImplemented
        if torch.is_inference_mode_enabled() and Hooks.is_composite(func):
            return func.decompose(*args, **(kwargs or {}))
        if not session.this_thread.depth and session.this_thread.trace is None:
            result = Hooks.run_in_host_memory(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
            with session.KeepsGradMode():
                with becoming_real:
                    if any(map(is_pending, _tensors_in((args, tuple(kwargs.values()) if kwargs else ())))):
                        return Hooks.dispatch(func, args, kwargs or {})
                return Hooks.dispatch(func, args, kwargs or {})
        return Hooks.dispatch(func, args, kwargs or {})

    def _ref(self) -> Ref:
        return Ref(self._storage.value, *geometry_of(self))

    def item(self) -> Any:
        """As `torch.Tensor.item`. PyTorch's own conversions to numbers do not call it."""
        return super().item() if session.trace is None else session.trace.number(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        """As `torch.Tensor.__setitem__`; with a mask, the gradient of `value` has a static size."""
        if session.trace is None or not isinstance(value, Tensor) or not value.requires_grad or not _is_mask(index):
            return super().__setitem__(index, value)
        return _write_by_mask(self, index, value)

    def addcdiv(self, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
        """As `torch.Tensor.addcdiv`; `value` may be the third argument, as Cerebras' documentation writes it."""
        return super().addcdiv(tensor1, tensor2, value=value)

    def __copy__(self) -> Any:
        out: Any = DeferredTensor.wrap(
            self._storage, tuple(self.shape), self.stride(), self.storage_offset(), self.dtype
        ).requires_grad_(self.requires_grad)
        out.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_storage"})
        return out

    def __deepcopy__(self, memo: Any) -> Any:
        with session.KeepsGradMode():
            return self._deep_copy(memo)

    def _deep_copy(self, memo):
        out: Any
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf and not is_parameter(self):  # torch's message, which torch's modules rely on
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        if is_parameter(self):  # its copy shares no memory and has no attributes
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
        else:  # a tensor on a backend is copied to the host
            out = torch.empty(0, dtype=self.dtype).set_(memo[key].untyped_storage(), geometry[2], *geometry[:2])
        memo[id(self)] = out
        extra = {k: v for k, v in self.__dict__.items() if k != "_storage"}
        if extra:
            out.__dict__.update(copy.deepcopy(extra, memo))
        out.requires_grad_(self.requires_grad)
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def is_conj(self) -> bool:
        """As `torch.Tensor.is_conj`."""
        return lazy_bits(self).conjugated

    def is_neg(self) -> bool:
        """As `torch.Tensor.is_neg`."""
        return lazy_bits(self).negated

    def resolve_conj(self) -> Any:
        """As `torch.Tensor.resolve_conj`: a copy of a conjugated view."""
        return self.clone() if self.is_conj() else self

    def resolve_neg(self) -> Any:
        """As `torch.Tensor.resolve_neg`."""
        return self.clone() if self.is_neg() else self

    # Access to the memory itself materializes the tensor in place, or, on a backend, returns a real tensor that shares
    # the memory of the content (`lasting`: for the lifetime of the storage, because the address is exported; else for
    # the lifetime of that tensor and its views).
    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`; shares memory."""
        return _numpy(self.detach() if force else self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return _array(self, dtype, copy)

    def as_subclass(self, cls: Any) -> Any:
        """As `torch.Tensor.as_subclass`, on the materialized tensor."""
        return to_host(self).as_subclass(cls)

    def requires_grad_(self, requires_grad: Any = True) -> Any:
        """As `torch.Tensor.requires_grad_`."""
        if not requires_grad:
            materialize_views(self)
        return Tensor.requires_grad_(self, requires_grad)

    def _set_requires_grad(self, requires_grad):
        if not requires_grad:
            materialize_views(self)
        _requires_grad.__set__(self, requires_grad)

    requires_grad: Any = property(_requires_grad.__get__, _set_requires_grad)

    def register_hook(self, hook: Any) -> Any:
        """As `torch.Tensor.register_hook`; refused on results of a traced step, which have no graph."""
        if not self.requires_grad and on_backend(self) and self._storage.trace is None:
            raise TraceError(
                f"{here()}: this tensor does not require grad. If it is the result of a traced step, it has no graph: "
                "register the hook in the step, or on the weights that it is computed from."
            )
        return super().register_hook(hook)

    def data_ptr(self) -> int:
        """As `torch.Tensor.data_ptr`, of memory that lives as long as the tensor.

        Callers that use the address as an id get a unique number, so that the model need not be materialized for it.
        """
        if is_pending(self) and session.trace is None and distributed.wants_address_as_id():
            return _placeholder_address(self._storage) + int(self.storage_offset()) * self.itemsize
        return to_real(self, lasting=True).data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        real = to_real(self, writable=True)
        with DisableTorchDispatch():
            return real.__dlpack__(*args, **kwargs)

    def untyped_storage(self) -> Any:
        """As `torch.Tensor.untyped_storage`."""
        # Its users can be counted, but not those of its address, which steps on one CPU cheaply keep.
        return to_real(self, lasting=not _is_off_host(self)).untyped_storage()

    def share_memory_(self) -> Any:
        """As `torch.Tensor.share_memory_`: moves the content to shared memory."""
        to_real(self, lasting=True, writable=True).share_memory_()
        if on_backend(self):
            record_exported_memory(self._storage)  # at its new address
        return self

    def tolist(self) -> Any:
        """As `torch.Tensor.tolist`; computes only this tensor."""
        return Hooks.value_of(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        real = to_real(self)
        if real is not self:
            if is_parameter(self):
                real = torch.nn.Parameter(real.detach(), self.requires_grad)
            real.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_storage", PARAMETER_FLAG)})
        return real.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if session.trace is not None and session.trace.is_only_displayed(self):
            return f"<traced tensor: {list(self.shape)} {self.dtype}>"
        real = Hooks.value_of(self)  # raises if it has no value yet
        return repr(torch.nn.Parameter(real, self.requires_grad) if is_parameter(self) else real)

    def __format__(self, spec: str) -> str:
        if session.trace is not None and not self.dim() and not is_parameter(self) and is_for_print(getframe(1)):
            number: Any = self.item()
            return number.printed(spec) if is_input_number(number) else format(number, spec)
        return format(Hooks.value_of(self), spec)


_placeholder_addresses: weakref.WeakKeyDictionary[DeferredStorage, int] = weakref.WeakKeyDictionary()
_lowest_address = 0


def _placeholder_address(storage: DeferredStorage) -> int:
    """A unique negative address for `storage`, at which no real tensor can be."""
    global _lowest_address
    if storage not in _placeholder_addresses:
        _lowest_address -= storage.value.nbytes + 1
        _placeholder_addresses[storage] = _lowest_address
    return _placeholder_addresses[storage]


def on_backend(tensor: Any) -> TypeGuard[DeferredTensor]:
    """Whether a tensor is on a backend: a DeviceBuffer has its content."""
    return type(tensor) is DeferredTensor and tensor._storage.resident is not None


def is_pending(tensor: Any) -> TypeGuard[DeferredTensor]:
    """Whether a tensor is deferred and not on a backend."""
    return type(tensor) is DeferredTensor and tensor._storage.resident is None


def enable_first_use() -> None:
    """Install the mode of `first_use.py`: a capture has ended, and its tensors may be used."""
    DeferredTensor.__torch_function__ = classmethod(Hooks.first_use)


def disable_first_use() -> None:
    """Uninstall the mode of `first_use.py`, in a capture and after materialization; its `run` handles further uses."""
    DeferredTensor.__torch_function__ = disabled_torch_function


def keep_other_threads_out() -> None:
    """Before deferred tensors become real, with `becoming_real` held: let other threads not use one meanwhile.

    PyTorch's code for an operation holds tensors without the interpreter's lock, and `_swap_tensor_impl` would exchange
    one under it, and the references that it counts. So where there are other threads, all of an operation runs in the
    mode of `first_use.py`, which holds `becoming_real` too.
    """
    if not are_other_threads():
        disable_first_use()
    elif DeferredTensor.__torch_function__ is disabled_torch_function:
        enable_first_use()
        time.sleep(_ENTERED)  # an operation that another thread has begun before


def are_other_threads() -> bool:
    """Whether threads other than this one, and Firstloss's own, may use deferred tensors."""
    if threading.active_count() == 1:
        return False
    current = threading.current_thread()
    return any(t is not current and not t.name.startswith(_OWN_THREADS) for t in threading.enumerate())


def is_in_file(tensor: DeferredTensor) -> bool:
    """Whether the content of `tensor` is in a file, unmodified."""
    return is_pending(tensor) and type(tensor._storage.value) is FileValue


def file_tensor(value: FileValue) -> DeferredTensor:
    """A deferred tensor with the content `value`."""
    return DeferredTensor.wrap(DeferredStorage(value), value.shape, value.stride, 0, value.dtype)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0


def _write_by_mask(x: Tensor, mask: Tensor, value: Tensor) -> None:
    """`x[mask] = value`: one value for all selected elements, or the n-th for the n-th element."""
    rest = x.shape[mask.dim() :]
    mask = mask.reshape(*mask.shape, *(1,) * len(rest)).expand(x.shape)
    value = value.to(x.dtype)
    if value.dim() <= len(rest) or value.shape[0] == 1:
        value = value.squeeze(0) if value.dim() > len(rest) else value
        x.copy_(torch.where(mask, value, x))
    else:
        x.masked_scatter_(mask, value.expand(value.shape[0], *rest))


def has_foreign_subclass(types: Iterable[type]) -> bool:
    """Whether there are other tensor subclasses among the types, whose __torch_dispatch__ comes first."""
    for kind in types:
        if kind is not DeferredTensor and not issubclass(kind, DeferredTensor):
            return session.trace is None
    return False


def to_real(tensor: DeferredTensor, lasting: bool = False, writable: bool = False, alone: bool = False) -> Tensor:
    """Materialize `tensor` in place; on a backend, return a real tensor that shares the memory of its content.

    Args:
        lasting: the caller keeps the address.
        writable: the caller may write to the memory, so it must not be a copy.
        alone: materialize only this tensor. Else, outside of a capture, the whole module that it belongs to.
    """
    if session.trace is not None:
        real = session.trace.memory_of(tensor, Hooks.value_of(tensor))
        return real.requires_grad_() if tensor.requires_grad else real
    with becoming_real:
        if type(tensor) is not DeferredTensor:  # another thread has materialized it
            return tensor
        if is_pending(tensor):
            return Hooks.materialize(tensor) if session.depth or alone else Hooks.materialize_all(tensor)
    if writable and not tensor._storage.resident.can_export(lasting):
        raise ElsewhereError(
            f"{here()}: the memory of this tensor is on another device, or sharded over a mesh, so it cannot be "
            "exported for writing. Use a copy, tensor.detach().clone(), and write it back with tensor.copy_(...)."
        )
    real = Hooks.memory_of(tensor, lasting)
    return real.requires_grad_() if tensor.requires_grad else real


def _is_off_host(tensor: DeferredTensor) -> bool:
    """Whether the tensor is on a backend whose memory is not this host's."""
    return session.trace is None and on_backend(tensor) and not tensor._storage.resident.in_host_memory


def to_host(tensor: DeferredTensor) -> Tensor:
    """Like `to_real`; returns a copy if the memory is not on this host."""
    if not _is_off_host(tensor):
        return to_real(tensor)
    real = Hooks.value_of(tensor)
    return real.requires_grad_() if tensor.requires_grad else real


def _numpy(tensor: Any) -> Any:
    """The tensor's memory as an array; a read-only copy if other processes hold parts of it."""
    is_copy = _is_off_host(tensor) and not tensor._storage.resident.can_export(lasting=False)
    real = to_host(tensor) if is_copy else to_real(tensor, alone=True)
    with DisableTorchDispatch():  # else, in a step, its detach() would be recorded
        array = real.numpy()
    if is_copy:
        array.flags.writeable = False
    return array


def _array(tensor: DeferredTensor, dtype: Any, copy: bool | None) -> Any:
    array = _numpy(tensor)
    if dtype is not None and array.dtype != dtype:
        if copy is False:
            raise ValueError(f"this tensor of {tensor.dtype} cannot be an array of {dtype} without a copy.")
        return array.astype(dtype)
    return array.copy() if copy else array
