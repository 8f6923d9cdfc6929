"""Put weights on the device: materialize deferred ones there, in the background, and move real ones."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from ... import switching, timeline
from ...capture.exported_memory import note_memory, store_at
from ...capture.file_value import FileValue
from ...capture.first_use import close_door
from ...capture.geometry import Geometry, geometry_of
from ...capture.other_storage import hook_tables, put_hook_tables
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.tensor import Hooks
from ...compat.torch_names import (
    HOOK_TABLES,
    PARAMETER_FLAG,
    DisableTorchDispatch,
    storage_address,
    swap_tensor_impl,
    use_count,
)
from ...engine.run import default_threads, materialize_values
from ...program.graph import Ref, Value, dense_count
from ..jax_there import is_there, on_cpu, process_count
from . import drawn, on_gpu, pages
from .buffer import DeviceBuffer, is_direct
from .conjugated import without_bits
from .host_memory import MappedWeights, is_countable, is_held

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import Mesh
    from .lazy import LazyArray

# Niceness of the threads that make weights: one yields its core to the thread that traces and lowers meanwhile.
BESIDE_TRACING = (5,)


class _Materialization(Future):
    """A materialization in a thread of its own, started by `begin` or by the first wait for its result."""

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
            with switching.often(), timeline.span("materialize"):
                self.set_result(self._make())
        except BaseException as error:  # raised in the thread that waits for the weights
            self.set_exception(error)


_after_first_loss: list[weakref.ref[_Materialization]] = []
_under_way: set[Future] = set()


def begin_behind() -> None:
    """Begin with the weights that the first loss does not need: it is there, or waits for all."""
    while _after_first_loss:
        materialization = _after_first_loss.pop(0)()
        if materialization is not None:  # nobody holds the state of a step that could not be traced
            materialization.begin()


def move_to_device(
    tensors: Iterable[torch.Tensor],
    mesh: Mesh | None = None,
    behind: bool = False,
    only_asked_for: bool = False,
    multiplied: bool = False,
) -> None:
    """Move `tensors` to the device or the mesh. Returns at once; reading a deferred one waits for it.

    Args:
        behind: the first loss does not need these; those that it needs are made first.
        only_asked_for: make deferred ones only when one of them is read.
        multiplied: PyTorch's kernels may be given them, for the first loss: deferred ones are made where those can read
            them whole.
    """
    close_door()
    pending: list[DeferredStorage] = []
    real: list[torch.Tensor] = []
    for tensor in without_bits(tensors):
        if type(tensor) is DeferredTensor:
            store = tensor._store
            if store.resident is None and store not in pending:
                pending.append(store)
        elif not any(tensor is other for other in real):
            real.append(tensor)
    if real:
        with timeline.span("move"):
            _move(real, mesh)
    if pending:
        _materialize_in_background(pending, mesh, behind, only_asked_for, multiplied)


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
    stores: list[DeferredStorage], mesh: Mesh | None, behind: bool, only_asked_for: bool, multiplied: bool
) -> None:
    shardings = {store.value: mesh.storage_sharding(store) if mesh is not None else None for store in stores}
    niceness = (19,) * default_threads() if behind else BESIDE_TRACING
    before_us = list(_under_way) if behind else []

    def make() -> dict[Value, Any]:
        wait(before_us)
        if mesh is None:
            return _make(list(shardings), niceness)
        made: dict[Value, Any] = {}
        sharded = {value: sharding for value, sharding in shardings.items() if sharding is not None}
        if multiplied and not behind and on_cpu() and process_count() == 1:
            whole = {value: sharded.pop(value) for value in list(sharded) if not _is_copied(value)}
            made = drawn.make_whole(whole, niceness)
        if sharded:
            from ..mesh import placement as mesh_placement

            made |= mesh_placement.make(sharded, niceness)
        return made

    materialization = _Materialization(make)
    for store in stores:
        store.resident = DeviceBuffer(store.value, pending=materialization, sharding=shardings[store.value])
        store.resident.fresh = not _is_copied(store.value)
    if only_asked_for:
        return
    if behind and on_cpu():  # the forward pass needs the same cores
        _after_first_loss.append(weakref.ref(materialization))
        return
    _under_way.add(materialization)
    materialization.add_done_callback(_under_way.discard)
    materialization.begin()


def _make(values: list[Value], niceness: Sequence[int]) -> dict[Value, jax.Array] | dict[Value, LazyArray]:
    """Run the recipes of `values`; on a CPU, directly into the device's memory, or where there is no JAX yet, into
    memory that becomes the device's; on a GPU that PyTorch has too, by kernels of ours what those can make."""
    if not is_there() and on_cpu() and pages.are_there():
        return drawn.make(values, niceness)
    from ..jaxlib import empties, empty, to_device

    on_its_gpu = {} if on_cpu() else on_gpu.make(values)
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
    """Move real tensors to the device: the Python objects stay, and tensors that share memory still share it."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_address(tensor.untyped_storage()), []).append(tensor)
    mapped = MappedWeights()
    for group in groups.values():
        found = [store_at(tensor) for tensor in group]
        if all(found):  # the exported memory of a weight on the backend
            for tensor, at in zip(group, found, strict=True):
                assert at is not None
                _become_resident(tensor, *at)
            continue
        base = _base(group)
        value = Value(tuple(base.shape), base.stride(), base.dtype, base.device)
        store = DeferredStorage(value)
        for tensor in group:
            _become_resident(tensor, store, geometry_of(tensor))
        if mesh is None and on_cpu() and base.numel():
            lasting = not is_countable(base, mapped)
            if lasting or is_held(base):  # by a NumPy array, or a tensor that is not moved
                store.resident = DeviceBuffer.from_host_memory(value, base, lasting)
                note_memory(store)
                continue
        from ..jaxlib import to_device

        sharding = None
        if mesh is None:
            array = to_device(base)
        else:
            from ..mesh.arrays import put

            sharding = mesh.storage_sharding(store)
            array = put(base, sharding)
        store.resident = DeviceBuffer(value, array=array, sharding=sharding)
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
    """A tensor on the backend that shares the memory of `tensor`; where that is impossible, a copy."""
    found = store_at(tensor)
    if found is not None:
        return DeferredTensor.wrap(found[0], *found[1])
    with DisableTorchDispatch(), torch.no_grad():
        base = tensor.detach()
    value = Value(tuple(base.shape), base.stride(), base.dtype, base.device)
    store = DeferredStorage(value)
    if on_cpu() and base.device.type == "cpu" and base.layout == torch.strided and base.numel():
        store.resident = DeviceBuffer.from_host_memory(value, base, not is_countable(base))
        note_memory(store)
    else:
        from ..jaxlib import to_device

        store.resident = DeviceBuffer(value, array=to_device(base))
    return DeferredTensor.wrap(store, *geometry_of(base)[:2], 0, base.dtype)


Hooks.register(to_backend=to_backend)


def _become_resident(tensor: torch.Tensor, store: DeferredStorage, geometry: Geometry) -> None:
    """Turn `tensor`, the Python object, into a view of `store`. Autograd state is kept: hooks, gradient, and the graphs
    that it is part of, so that views of weights and losses computed earlier still work."""
    leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    grad = tensor.grad if leaf else _gradient_of_a_result(tensor)
    hooks = hook_tables(tensor) if leaf else {}
    new: Any
    if leaf:
        new = DeferredTensor.wrap(store, *geometry)
        _lead_on(tensor)
    else:
        with torch.enable_grad():
            new = _Moved.apply(tensor, store, geometry)
    if isinstance(tensor, torch.nn.Parameter):
        setattr(new, PARAMETER_FLAG, True)
    if leaf and requires_grad:
        new.requires_grad_(True)
    attributes = dict(tensor.__dict__)
    if grad is not None:
        tensor.grad = None
    tensor.__class__ = DeferredTensor
    tensor.__dict__.clear()
    tensor.__dict__.update({**attributes, **new.__dict__})
    swap_tensor_impl(tensor, new)
    store.tensors[:] = [ref for ref in store.tensors if ref() is not new]
    store.add(tensor)
    if grad is not None:
        tensor.grad = grad
    put_hook_tables(tensor, hooks)
    if leaf and requires_grad:
        setattr(new, HOOK_TABLES[1], {})  # graphs that end there are led on to `tensor`, whose hooks run


def _gradient_of_a_result(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a non-leaf tensor, without PyTorch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


def _lead_on(weight: torch.Tensor) -> None:
    """Let graphs that end in the present tensor below the Python object `weight` lead on to its successor."""
    if not weight.requires_grad or use_count(weight)() < 2:
        return

    def lead_on(grads: tuple[torch.Tensor | None, ...]) -> tuple[None]:
        if grads[0] is not None:
            get_gradient_edge(weight).node(grads[0])  # type: ignore[operator]
        return (None,)

    get_gradient_edge(weight).node.register_prehook(lead_on)


class _Moved(torch.autograd.Function):
    """Moves a tensor that has a graph to the backend, within the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, store: DeferredStorage, geometry: Geometry) -> torch.Tensor:
        return DeferredTensor.wrap(store, *geometry)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None
