"""Weights and optimizer state as plain tensors, for steps whose Python runs at each call.

An operation on a deferred tensor costs some 15 us more than one on a plain tensor. So where steps are run by their
Python at several calls in a row, what they use becomes plain tensors, in the same memory and as the same Python
objects, until a step is traced or compiled again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator

import torch

from ...capture import first_use, session
from ...capture.exported_memory import record_exported_memory, storage_at
from ...capture.storage_swap import become, hook_tables, like, set_gradient
from ...capture.tensor import (
    DeferredStorage,
    DeferredTensor,
    TensorRef,
    are_other_threads,
    becoming_real,
    is_leaf,
    on_backend,
)
from ...compat.python_names import frames_of_threads
from ...compat.torch_names import DisableTorchDispatch, InferenceMode, disable_dynamo, use_count
from ...errors import MaterializeError
from ...interpreter import Undo, Uninterrupted
from ...program.graph import Geometry, geometry_of
from .placement import become_resident, move_to_device

# The modules of Python's in which threads wait.
_WAITING = ("threading", "queue", "selectors", "multiprocessing.connection", "concurrent.futures.thread", "subprocess")

# The number of steps in a row that run by their Python before their tensors become plain, which takes 30 us for each.
_STEPS = 1


class _PlainTensor(TensorRef):
    """A reference to a tensor that is plain now, and was a view of `storage`, which is forgotten with it."""

    __slots__ = ("storage", "geometry")
    storage: DeferredStorage | None
    geometry: Geometry


def _forget(ref: _PlainTensor) -> None:
    ref.storage = None


_steps = 0  # since the last that was traced or compiled
_used: set[weakref.ref[DeferredStorage]] = set()  # by the last of them, as deferred tensors
_plain: list[_PlainTensor] = []
_ids: set[int] = set()  # of these tensors and their storages, which may be gone, and their ids given to others
_holders: dict[int, weakref.ref[torch.Tensor]] = {}  # weights that stay deferred, whose gradients may be plain, by id
_running: set[int] = set()  # the threads that run such a step


def are_in_use() -> bool:
    """Whether the last step has run by its Python."""
    return _steps > 0


def are_among(tensors: Iterable[object]) -> bool:
    """Whether some of `tensors`, or their storages, are plain now."""
    ids = set(map(id, tensors))
    if ids.isdisjoint(_ids):
        return False
    return any(id(held) in ids for ref in _plain for held in (ref(), ref.storage) if held is not None)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Run a step by its Python."""
    global _steps
    thread = threading.get_ident()
    if thread in _running:  # a step that another one calls
        yield
        return
    # Exchanged tensors have other nodes for their gradients: without the hooks of C++ by which DDP reduces them.
    may_be_reduced = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _steps >= _STEPS and _used and not may_be_reduced and (not are_other_threads() or _others_wait()):
        _make_plain([storage for ref in _used if (storage := ref()) is not None])
    _steps += 1
    _used.clear()
    _running.add(thread)
    session.this_thread.used = _used
    try:
        with Undo() as undo, undo, first_use.in_step():
            disable_dynamo(undo)  # it knows no tensors of other classes; they may also be exchanged while it compiles
            yield
    finally:
        session.this_thread.used = None
        _running.discard(thread)


def _others_wait() -> bool:
    """Whether all other threads wait for something, as those of loaders, writers and progress bars do, so that none is
    within an operation on what is exchanged."""
    frames = frames_of_threads()
    others = [frames.get(t.ident) for t in threading.enumerate() if t is not threading.current_thread()]
    return all(frame is None or frame.f_globals.get("__name__") in _WAITING for frame in others)


def _make_plain(storages: list[DeferredStorage]) -> None:
    with becoming_real, Uninterrupted(), InferenceMode(False), torch.no_grad():
        gradients = [t.grad for storage in storages for t in storage.alive() if is_leaf(t)]
        storages += [gradient._storage for gradient in gradients if on_backend(gradient)]
        storages = list(filter(_can_be_plain, dict.fromkeys(storages)))
        tensors = [tensor for storage in storages for tensor in storage.alive() if is_leaf(tensor)]
        with _without_gradients(tensors):
            for storage in storages:
                leaves = list(filter(is_leaf, storage.alive()))
                # All of them do, which remain views of each other. A storage that its tensors have left, as after
                # `resize_`, has no content.
                if not leaves or any(map(_must_stay, leaves)):
                    continue
                memory = storage.resident.memory(lasting=False)
                for tensor in leaves:
                    _become_plain(tensor, storage, memory)
        _holders.update((id(tensor), weakref.ref(tensor)) for tensor in tensors if type(tensor) is DeferredTensor)


def _can_be_plain(storage: DeferredStorage) -> bool:
    buffer = storage.resident
    has_mirrors = storage.mirrors is not None or storage.mirrored_by
    return buffer is not None and buffer.in_host_memory and not has_mirrors and storage.value.nbytes > 0


@contextlib.contextmanager
def _without_gradients(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which `tensors`, and their gradients, may be exchanged in C++, where a tensor holds its gradient."""
    gradients = [(tensor, gradient) for tensor in tensors if (gradient := tensor.grad) is not None]
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in gradients:
            set_gradient(tensor, gradient)


def _must_stay(tensor: torch.Tensor) -> bool:
    """Whether it is the gradient of another tensor, or one backward pass through graphs of before and after would call
    its hooks twice."""
    return use_count(tensor)() > 1 and (not tensor.requires_grad or any(hook_tables(tensor).values()))


def _become_plain(tensor: DeferredTensor, storage: DeferredStorage, memory: torch.Tensor) -> None:
    record_exported_memory(storage)
    geometry = geometry_of(tensor)
    with DisableTorchDispatch():
        new = like(tensor, tensor._ref().view(memory).detach(), False, "")
    with contextlib.suppress(MaterializeError):  # C++ code holds a weak reference to it: it stays as it is
        become(tensor, new)
        ref = _PlainTensor(tensor, _forget)
        ref.storage, ref.geometry, ref.among = storage, geometry, _plain
        _plain.append(ref)
        _ids.update((id(tensor), id(storage)))


def end() -> None:
    """Before a step is traced, or one compiled with them is called: make the tensors views of their storages again."""
    global _steps
    if _running - {threading.get_ident()}:  # their steps use them, in memory that a compiled step sees
        return
    _steps = 0
    _used.clear()
    if not _plain:
        return
    with becoming_real, Uninterrupted(), InferenceMode(False), torch.no_grad():
        plain = [(ref(), ref.storage, ref.geometry) for ref in _plain]
        _plain.clear()
        _ids.clear()
        moved = []
        holders = [tensor for ref in _holders.values() if (tensor := ref()) is not None]
        _holders.clear()
        leaves = [tensor for tensor, _, _ in plain if tensor is not None and is_leaf(tensor)]
        with _without_gradients([*leaves, *holders]):
            for tensor, storage, geometry in plain:
                if tensor is None or storage is None or type(tensor) is DeferredTensor:
                    continue
                at = storage_at(tensor)
                if at is not None and at[0] is storage and at[1] == geometry:
                    become_resident(tensor, storage, geometry)
                else:  # its memory or its shape has been changed
                    moved.append(tensor)
        if moved:
            session.rebinds += 1
            move_to_device(moved)
