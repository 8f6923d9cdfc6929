"""Bring weights to the device: materialize the deferred ones there, in the background, and move the real ones."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import torch

from .. import timeline
from ..capture.program import Value, dense_count, is_contiguous
from ..capture.recorder import DeferredTensor, Store
from ..capture.replay import allocate as allocate_host
from ..init.materialize import run_recipes
from ..init.torch_engine import default_threads
from . import mesh_placement
from .cell import Cell
from .jaxlib import empty, on_cpu, to_device
from .mesh import Mesh, put

# Smaller weights go through host memory: a buffer of the device's own costs a call.
_DIRECT_BYTES = 1 << 16
_SWITCH_SECONDS = 0.0003


# Priorities of the threads that make weights: one leaves its core to the thread that traces and lowers meanwhile.
BESIDE_TRACING = (5,)


_under_way: set[Future] = set()


def claim(tensors: Iterable[torch.Tensor], mesh: Mesh | None = None, behind: bool = False) -> None:
    """Make `tensors` live on the device, or on the mesh. Returns at once; who needs a deferred one's content waits.

    Args:
        behind: these are not needed for the first loss; what is, comes before them.
    """
    pending: list[Store] = []
    real: list[torch.Tensor] = []
    for tensor in tensors:
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
        _materialize_in_background(pending, mesh, behind)


def _materialize_in_background(stores: list[Store], mesh: Mesh | None, behind: bool) -> None:
    future: Future[dict[Value, jax.Array]] = Future()
    shardings = {store.value: mesh.of_store(store) if mesh is not None else None for store in stores}
    for store in stores:
        store.resident = Cell(store.value, pending=future, sharding=shardings[store.value])

    niceness = (19,) * default_threads() if behind else BESIDE_TRACING
    before_us = list(_under_way) if behind else []
    _under_way.add(future)
    future.add_done_callback(_under_way.discard)

    def work() -> None:
        wait(before_us)
        # Python hands its lock over only every 5 ms otherwise, 20 times as long as a piece of a fill takes.
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _SWITCH_SECONDS))
        try:
            with timeline.span("materialize"):
                future.set_result(
                    _make(list(shardings), niceness) if mesh is None else mesh_placement.make(shardings, niceness)
                )
        except BaseException as error:  # the thread that waits for the weights raises it
            future.set_exception(error)
        finally:
            sys.setswitchinterval(before)

    threading.Thread(target=work, name="firstloss-materialize", daemon=True).start()


def _make(values: list[Value], niceness: Sequence[int]) -> dict[Value, jax.Array]:
    """Run the recipes of `values` straight into memory that the device owns, where the device is this machine's CPU."""
    arrays: dict[int, jax.Array] = {}

    def allocate(value: Value) -> torch.Tensor:
        if not on_cpu() or value.nbytes < _DIRECT_BYTES or not is_contiguous(value.shape, value.stride):
            return allocate_host(value)
        array, memory = empty(value.shape, value.dtype)
        arrays[memory.data_ptr()] = array
        return memory

    buffers = run_recipes(values, allocate=allocate, niceness=niceness)
    out: dict[Value, jax.Array] = {}
    for value, buffer in buffers.items():
        array = arrays.get(buffer.data_ptr()) if buffer.numel() else None
        out[value] = array if array is not None else to_device(buffer)
    return out


def _move(tensors: list[torch.Tensor], mesh: Mesh | None) -> None:
    """Real tensors become tensors on the device, the same Python objects; those that share memory go on sharing it."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for group in groups.values():
        base = _base(group)
        value = Value(tuple(base.shape), base.stride(), base.dtype, base.device)
        store = Store(value)
        for tensor in group:
            _become_resident(tensor, store)
        sharding = None if mesh is None else mesh.of_store(store)
        array = to_device(base) if sharding is None else put(base, sharding)
        store.resident = Cell(value, array=array, sharding=sharding)
        del base


def _base(group: list[torch.Tensor]) -> torch.Tensor:
    """A tensor that is all of the group's storage."""
    with torch.no_grad():
        for tensor in group:
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
            if whole and dense_count(tensor.shape, tensor.stride()) == tensor.numel():
                return tensor.detach()
        tensor = group[0]
        flat = torch.empty(0, dtype=tensor.dtype)
        return flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))


def _become_resident(tensor: torch.Tensor, store: Store) -> None:
    requires_grad, grad = tensor.requires_grad, tensor.grad
    new: Any = DeferredTensor.wrap(store, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        new._is_param = True
    if requires_grad:
        new.requires_grad_(True)
    store.tensors.clear()
    attributes = dict(tensor.__dict__)
    tensor.grad = None
    tensor.__class__ = DeferredTensor
    tensor.__dict__.clear()
    tensor.__dict__.update({**attributes, **new.__dict__})
    torch._C._swap_tensor_impl(tensor, new)
    store.tensors.append(weakref.ref(tensor))
    if grad is not None:
        tensor.grad = grad
