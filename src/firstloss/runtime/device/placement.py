"""Placement of weights on the device: deferred ones are materialized there in the background, real ones are moved."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from ... import interpreter, timeline
from ...capture.exported_memory import record_exported_memory, storage_at
from ...capture.gradient_nodes import exchanged
from ...capture.recorder import DeferredStorage
from ...capture.storage_swap import hook_tables, set_hook_tables, share_memory
from ...capture.tensor import DeferredTensor, Hooks, disable_first_use
from ...compat.torch_names import PARAMETER_FLAG, DisableTorchDispatch, storage_address, swap_tensor_impl
from ...engine.cpu_engine import materialize_values
from ...errors import BackendError
from ...program.graph import FileValue, Geometry, Ref, Value, dense_count, geometry_of
from ...program.source import here
from ..lazy_jax import is_imported, on_cpu, process_count
from . import host_weights, on_gpu, pages
from .buffer import DeviceBuffer, is_direct
from .host_memory import MappedWeights, has_other_owners, is_countable

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import Mesh
    from .lazy_array import LazyArray

# Niceness of threads that materialize weights: one of them yields its core to the thread that traces and lowers.
BESIDE_TRACING = (5,)


class _Materialization(Future[Any]):
    """A materialization in its own thread, started by `begin` or by the first wait for its result."""

    def __init__(self, make: Callable[[], dict[Value, Any]]) -> None:
        super().__init__()
        self._make = make
        self._lock = threading.Lock()
        self._begun = False

    def begin(self) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
        # Not a daemon: a daemon would go on while the interpreter shuts down, and crash.
        threading.Thread(target=self._work, name="firstloss-materialize").start()

    def result(self, timeout: float | None = None) -> dict[Value, Any]:
        self.begin()
        return super().result(timeout)

    def _work(self) -> None:
        try:
            with interpreter.switch_interval.changed(), timeline.span("materialize"):
                self.set_result(self._make())
        except BaseException as error:  # re-raised in the thread that waits for the weights
            self.set_exception(error)


_pending_after_first_loss: list[weakref.ref[_Materialization]] = []
_in_progress: set[Future[Any]] = set()


def start_waiting_materializations() -> None:
    """Start materializing the weights that the first loss does not need."""
    while _pending_after_first_loss:
        materialization = _pending_after_first_loss.pop(0)()
        if materialization is not None:  # None after a trace failed
            materialization.begin()


def move_to_device(
    tensors: Iterable[torch.Tensor],
    mesh: Mesh | None = None,
    behind: bool = False,
    on_demand: bool = False,
    for_kernels: bool = False,
) -> None:
    """Move `tensors` to the device or the mesh. Returns at once; reading a deferred one waits for it.

    Args:
        behind: whether the first loss does not need these; those that it needs are made first.
        on_demand: whether to materialize deferred ones only when one of them is read.
        for_kernels: whether PyTorch's kernels may compute the first loss with them, so that deferred ones are made
            unsharded, in memory that these can read.
    """
    disable_first_use()
    pending: list[DeferredStorage] = []
    real: list[torch.Tensor] = []
    for tensor in movable(tensors):
        if type(tensor) is DeferredTensor:
            storage = tensor._storage
            if storage.resident is None and storage not in pending:
                pending.append(storage)
        elif not any(tensor is other for other in real):
            real.append(tensor)
    if real:
        with timeline.span("move"):
            _move(real, mesh)
    if pending:
        _materialize_in_background(pending, mesh, behind, on_demand, for_kernels)


def _is_copied(value: Value) -> bool:
    """Whether a recipe only copies existing data, such as a checkpoint's weights."""
    if isinstance(value, FileValue):
        return True
    node = value.node
    if node is None or node.op is not torch.ops.aten.copy_.default:
        return False
    source = node.args[1]
    return type(source) is Ref and (source.value.known or isinstance(source.value, FileValue))


def _materialize_in_background(
    storages: list[DeferredStorage], mesh: Mesh | None, behind: bool, on_demand: bool, for_kernels: bool
) -> None:
    shardings = {storage.value: mesh.storage_sharding(storage) if mesh is not None else None for storage in storages}
    niceness = (19,) * interpreter.cores() if behind else BESIDE_TRACING
    earlier = list(_in_progress) if behind else []

    def materialize() -> dict[Value, Any]:
        wait(earlier)
        if mesh is None:
            return _materialize(list(shardings), niceness)
        arrays: dict[Value, Any] = {}
        sharded = {value: sharding for value, sharding in shardings.items() if sharding is not None}
        if for_kernels and not behind and on_cpu() and process_count() == 1:
            unsharded = {value: sharded.pop(value) for value in list(sharded) if not _is_copied(value)}
            arrays = host_weights.materialize_unsharded(unsharded, niceness)
        if sharded:
            from ..mesh import sharded_weights

            arrays |= sharded_weights.materialize(sharded, niceness)
        return arrays

    materialization = _Materialization(materialize)
    for storage in storages:
        storage.resident = DeviceBuffer(storage.value, pending=materialization, sharding=shardings[storage.value])
        storage.resident.fresh = not _is_copied(storage.value)
    if on_demand:
        return
    if behind and on_cpu():  # the forward pass needs the same cores
        _pending_after_first_loss.append(weakref.ref(materialization))
        return
    _in_progress.add(materialization)
    materialization.add_done_callback(_in_progress.discard)
    materialization.begin()


def _materialize(values: list[Value], niceness: Sequence[int]) -> dict[Value, jax.Array] | dict[Value, LazyArray]:
    """Run the recipes of `values`: on a CPU, directly in the device's memory, or before JAX is imported, in memory that
    becomes the device's; on a GPU shared with PyTorch, with Firstloss's kernels as far as these support them."""
    if not is_imported() and on_cpu() and pages.ARE_AVAILABLE:
        return host_weights.materialize(values, niceness)
    from ..jax_support import empties, empty, to_device

    on_its_gpu = {} if on_cpu() else on_gpu.materialize(values)
    values = [value for value in values if value not in on_its_gpu]
    ready: dict[Any, list[tuple[jax.Array, torch.Tensor]]] = {}
    kinds = [_kind(value) for value in values if is_direct(value)]
    for kind, pair in zip(kinds, empties(kinds) if kinds else (), strict=True):  # allocated in one call
        ready.setdefault(kind, []).append(pair)
    arrays: dict[int, jax.Array] = {}

    def allocate(value: Value) -> torch.Tensor:
        if not is_direct(value):
            return value.empty()
        try:  # called from several threads
            array, memory = ready[_kind(value)].pop()
        except (KeyError, IndexError):  # an intermediate value
            array, memory = empty(*_kind(value))
        arrays[memory.data_ptr()] = array
        return memory

    buffers = materialize_values(values, allocate=allocate, niceness=niceness)
    out = on_its_gpu
    for value, buffer in buffers.items():
        array = arrays.get(buffer.data_ptr()) if buffer.numel() else None
        out[value] = array if array is not None else to_device(buffer)
    return out


def _kind(value: Value) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


def _move(tensors: list[torch.Tensor], mesh: Mesh | None) -> None:
    """Move real tensors to the device: Python objects keep their identity, and shared memory stays shared."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_address(tensor.untyped_storage()), []).append(tensor)
    mapped = MappedWeights()
    for group in groups.values():
        aliased = [storage_at(tensor) for tensor in group]
        if all(aliased):  # the exported memory of a weight on the backend
            for tensor, storage_and_geometry in zip(group, aliased, strict=True):
                assert storage_and_geometry is not None
                become_resident(tensor, *storage_and_geometry)
            continue
        base = _base(group)
        value = Value(tuple(base.shape), base.stride(), base.dtype, base.device)
        storage = DeferredStorage(value)
        for tensor in group:
            become_resident(tensor, storage, geometry_of(tensor))
        sharding = mesh.storage_sharding(storage) if mesh is not None else None
        buffer = storage.resident = DeviceBuffer(value, sharding=sharding)
        lasting = not is_countable(base, mapped)
        # Others hold it, such as a NumPy array, or a tensor that is not moved.
        if base.numel() and buffer.can_export(lasting) and (lasting or has_other_owners(base)):
            buffer.use_memory(base, lasting)
            record_exported_memory(storage)
        else:
            buffer.set_from(base)
        del base


def _base(group: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of the group's whole storage."""
    with torch.no_grad():
        for tensor in group:
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
            if whole and dense_count(tensor.shape, tensor.stride()) == tensor.numel():
                return tensor.detach()
        tensor = group[0]
        flat = torch.empty(0, dtype=tensor.dtype)
        return flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))


def to_backend(tensor: torch.Tensor) -> DeferredTensor:
    """A tensor on the backend that shares the memory of `tensor`, or if that is impossible, has a copy."""
    aliased = storage_at(tensor)
    if aliased is not None:
        return DeferredTensor.wrap(aliased[0], *aliased[1])
    with DisableTorchDispatch(), torch.no_grad():
        base = tensor.detach()
    value = Value(tuple(base.shape), base.stride(), base.dtype, base.device)
    storage = DeferredStorage(value)
    buffer = storage.resident = DeviceBuffer(value)
    if on_cpu() and base.device.type == "cpu" and base.layout == torch.strided and base.numel():
        buffer.use_memory(base, not is_countable(base))
        record_exported_memory(storage)
    else:
        buffer.set_from(base)
    return DeferredTensor.wrap(storage, *geometry_of(base)[:2], 0, base.dtype)


Hooks.register(to_backend=to_backend)


def become_resident(tensor: torch.Tensor, storage: DeferredStorage, geometry: Geometry) -> None:
    """Turn the Python object `tensor` into a view of `storage`.

    Its autograd state is kept: hooks, gradient, and the graphs that it is part of, so that existing views of weights
    and losses still work.
    """
    leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    grad = tensor.grad if leaf else _gradient_of_a_result(tensor)
    hooks = hook_tables(tensor) if leaf else {}
    new: Any
    if leaf:
        new = DeferredTensor.wrap(storage, *geometry)
    else:
        with torch.enable_grad():
            new = _Moved.apply(tensor, storage, geometry)
    if isinstance(tensor, torch.nn.Parameter):
        setattr(new, PARAMETER_FLAG, True)
    if leaf and requires_grad:
        new.requires_grad_(True)
    attributes = dict(tensor.__dict__)
    if grad is not None:
        tensor.grad = None
    with exchanged(tensor, new):
        tensor.__class__ = DeferredTensor
        tensor.__dict__.clear()
        tensor.__dict__.update({**attributes, **new.__dict__})
        swap_tensor_impl(tensor, new)
        storage.tensors[:] = [ref for ref in storage.tensors if ref() is not new]
        storage.add(tensor)
        if grad is not None:
            tensor.grad = grad
        set_hook_tables(tensor, hooks)


def _gradient_of_a_result(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a non-leaf tensor, without PyTorch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


class _Moved(torch.autograd.Function):
    """Moves a non-leaf tensor to the backend, within its autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, storage: DeferredStorage, geometry: Geometry) -> torch.Tensor:
        return DeferredTensor.wrap(storage, *geometry)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def movable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `tensors` that can be moved to a backend, with conjugate and negative bits resolved.

    A conjugated or negated tensor that owns its memory is resolved in place. One that shares memory stays a real view,
    whose base a step finds when it uses it.

    Raises:
        BackendError: if a parameter is such a view of shared memory.
    """
    tensors = [tensor for tensor in tensors if not _is_of_another_class(tensor)]
    for tensor in tensors:
        if type(tensor) is DeferredTensor and tensor._storage.resident is None and tensor._storage.mirrors is not None:
            Hooks.materialize_storages([tensor._storage])  # with everything that shares its memory
    with_bits = [t for t in tensors if type(t) is not DeferredTensor and (t.is_conj() or t.is_neg())]
    unresolved = {id(tensor) for tensor in with_bits if not _resolved(tensor, tensors)}
    return [tensor for tensor in tensors if id(tensor) not in unresolved]


def _is_of_another_class(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class is not PyTorch's: it may have methods of its own, and others may ask for it."""
    return type(tensor) is not DeferredTensor and type(tensor).__module__.partition(".")[0] != "torch"


def _resolved(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether `tensor` could be given memory of its own with the values that it shows."""
    if not tensor.is_conj() and not tensor.is_neg():  # already resolved
        return True
    others = (t for t in tensors if t is not tensor and type(t) is not DeferredTensor)
    at = storage_address(tensor.untyped_storage())
    if has_other_owners(tensor) or any(storage_address(other.untyped_storage()) == at for other in others):
        if isinstance(tensor, torch.nn.Parameter):
            raise BackendError(
                f"{here()}: a parameter of shape {list(tensor.shape)} is a conjugated or negated view of memory that "
                "another tensor shares, which a backend does not support. Give it memory of its own: "
                "nn.Parameter(tensor.resolve_conj().resolve_neg())."
            )
        return False
    with DisableTorchDispatch(), torch.no_grad():
        share_memory(tensor, tensor.detach().resolve_conj().resolve_neg())
    return True
