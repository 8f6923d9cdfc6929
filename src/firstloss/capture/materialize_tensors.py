"""Materialize deferred tensors in place: compute their Values, and turn the tensors into real ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch.overrides import enable_reentrant_dispatch

from .. import timeline
from ..compat.torch_names import (
    DisableTorchDispatch,
    base_of,
    creation_meta_of,
    is_parameter,
    set_creation_meta,
)
from ..engine.cpu_engine import materialize_values
from ..errors import MaterializeError
from ..program.graph import Value
from ..program.source import here
from . import conjugate_views
from .distributed import parts_of
from .first_use import disable_first_use
from .storage_swap import become, like
from .tensor import DeferredStorage, DeferredTensor, is_pending

# Made on the host before it is moved or converted.
_BATCH_BYTES = 1 << 30


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Make a deferred tensor real, in place; a real tensor is returned as it is.

    Returns the same Python object. Tensors that share its memory (views, ties, `.data`) become real with it, and go
    on sharing.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> fl.materialize_tensor(model.bias) is model.bias
        True
        >>> fl.is_deferred(model.bias), fl.is_deferred(model.weight)
        (False, True)

    Args:
        tensor: deferred, or real, or a DTensor whose local shard is deferred.

    Returns:
        The same Python object, which holds real memory now.
    """
    materialize_storages(pending(tensor))
    return tensor


def pending(tensor: torch.Tensor) -> list[DeferredStorage]:
    """What has to be made for a tensor to be real."""
    return [part._storage for part in parts_of(tensor) if is_pending(part)]


def materialize_storages(
    storages: list[DeferredStorage],
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make the content of `storages`, then turn every tensor that looks at one of them into a real tensor."""
    disable_first_use()
    if not storages:
        return
    if device is not None:
        _check_device(device)
    family = conjugate_views.with_mirrors(storages)
    mirrors = [storage for storage in family if storage.mirrors is not None]
    lazy = [(view, base, _has_history(view)) for storage in mirrors for view, base in conjugate_views.bases(storage)]
    storages = [storage for storage in family if storage.mirrors is None]
    total, before = sum(storage.value.nbytes for storage in storages), 0
    told = progress
    with timeline.span("materialize"):
        on_gpu = _on_gpus([storage.value for storage in storages if not storage.is_made], device)
        # What is moved or converted is made some at a time, so that no second copy of all weights is in memory.
        for some in [storages] if device is None and dtype is None else _batches(storages):
            if progress is not None:
                told = partial(_tell, progress, before, total)
            values = [storage.value for storage in some if not storage.is_made]
            made = _make([value for value in values if value not in on_gpu], num_threads, told)
            made.update((value, on_gpu.pop(value)) for value in values if value in on_gpu)
            for storage in some:
                buffer = storage.made[1] if storage.is_made and storage.made is not None else made.pop(storage.value)
                storage.made = None
                _make_all_real(storage, buffer, device, dtype)
                before += storage.value.nbytes
        for view, base, is_computed in lazy:
            _make_real_view(view, base, is_computed)


def _on_gpus(values: list[Value], device: torch.device | str | None) -> dict[Value, torch.Tensor]:
    """What kernels of ours make on the GPU where it is wanted; the rest is made on the CPU and moved."""
    wanted: dict[torch.device, list[Value]] = {}
    for value in values:
        where = value.device if device is None else torch.device(device)
        if where.type == "cuda":
            wanted.setdefault(where, []).append(value)
    found: dict[Value, torch.Tensor] = {}
    for where, some in wanted.items():
        from ..gpu import weights

        index = torch.cuda.current_device() if where.index is None else where.index
        found.update(weights.make(some, torch.device("cuda", index)))
    return found


def allocate_real(storage: DeferredStorage) -> None:
    """Turn every tensor that looks at `storage` real, on memory that the caller fills: its recipe is dropped."""
    with DisableTorchDispatch():
        memory = storage.value.empty()
    storage.made = None
    _make_all_real(storage, memory, None, None)


def make(storages: list[DeferredStorage]) -> None:
    """Compute what `storages` hold, and keep it there; their tensors stay deferred."""
    storages = [storage for storage in storages if not storage.is_made]
    with timeline.span("materialize"):
        made = materialize_values([storage.value for storage in storages])
    for storage in storages:
        storage.made = storage.value, made.pop(storage.value)


def _tell(progress: Callable[[int, int], None], before: int, total: int, done: int, of: int) -> None:
    progress(before + done, total)


def _batches(storages: list[DeferredStorage]) -> Iterator[list[DeferredStorage]]:
    some: list[DeferredStorage] = []
    held = 0
    for storage in storages:
        if some and held + storage.value.nbytes > _BATCH_BYTES:
            yield some
            some, held = [], 0
        some.append(storage)
        held += storage.value.nbytes
    yield some


def _check_device(device: torch.device | str) -> None:
    """An error, before anything is made, if nothing can be moved there."""
    try:
        with DisableTorchDispatch():
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a build of PyTorch without CUDA
        reason = str(error).splitlines()[0].rstrip(".")
        raise MaterializeError(
            f"{here()}: the weights cannot be made on device {str(device)!r}: {reason}. They are still deferred; leave "
            "device out to make them where they were constructed for, or name a device that this machine has."
        ) from None


def _make_all_real(
    storage: DeferredStorage, buffer: torch.Tensor, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    """Let every tensor that looks at `storage` be a real one that looks at `buffer`, moved and converted."""
    if device is not None or (dtype is not None and buffer.is_floating_point()):
        buffer = buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None)
    tensors = storage.alive()
    with_history = {id(tensor) for tensor in tensors if _has_history(tensor)}
    views = _views_and_bases(tensors) if buffer.dtype == storage.value.dtype else []
    later = {id(view) for view, _ in views}
    for tensor in tensors:
        if id(tensor) not in later:
            _make_real(tensor, buffer, storage.value, id(tensor) in with_history)
    for view, base in views:
        _make_real_view(view, base, id(view) in with_history)


def _make(
    values: list[Value], num_threads: int | None, progress: Callable[[int, int], None] | None
) -> dict[Value, torch.Tensor]:
    """Make the Values, and tell `progress` how far that is."""
    if progress is None:
        return materialize_values(values, num_threads=num_threads)
    lock = threading.Lock()
    total = sum(value.nbytes for value in values)
    made = 0

    def done(count: int) -> None:
        nonlocal made
        with lock:
            made += count
            progress(min(made, total), total)

    return materialize_values(values, num_threads=num_threads, done=done)


def _view(buffer: torch.Tensor, tensor: DeferredTensor, value: Value) -> torch.Tensor:
    ref = tensor._ref()
    if buffer.dtype != value.dtype and not ref.whole:
        ref = ref._replace(dtype=buffer.dtype)
    with DisableTorchDispatch(), torch.no_grad():
        return ref.view(buffer) if not ref.whole else buffer


def _make_real(tensor: DeferredTensor, buffer: torch.Tensor, value: Value, is_computed: bool) -> None:
    """Make `tensor`, the Python object, a real view of `buffer`."""
    real = _view(buffer, tensor, value)
    become(tensor, like(tensor, real.detach(), is_computed, _line(value)))


def _line(value: Value) -> str:
    return str(value.node.source) if value.node is not None else "a constructor"


def _has_history(tensor: torch.Tensor) -> bool:
    """Whether autograd says that it was computed. To be asked once: after an error it says no."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError as error:
        # A view made in no_grad mode of what was edited since: torch wants nobody to use it. Or a view of a weight
        # that was edited and then frozen: eager PyTorch keeps a history, and cannot for a tensor without memory.
        return "INTERNAL ASSERT" in str(error)


def _views_and_bases(tensors: list[DeferredTensor]) -> list[tuple[DeferredTensor, torch.Tensor]]:
    """The views among `tensors`, as autograd sees it, of weights and buffers among them, each with what it is of."""
    own = {id(t) for t in tensors}
    return [
        (t, base)
        for t in tensors
        if (base := base_of(t)) is not None and id(base) in own and base.is_leaf and not is_parameter(t)
    ]


@contextlib.contextmanager
def _autograd_at_work() -> Iterator[None]:
    """Operations go through autograd, also where one is under way that has passed it already."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(enable_reentrant_dispatch())
        except RuntimeError:  # none is under way
            pass
        yield


def _is_cut_off(view: torch.Tensor) -> bool:
    """Whether a gradient gets lost on its way from a view: it is one of a view that was made in no_grad mode."""
    node = view.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is None


def _make_real_view(tensor: DeferredTensor, base: torch.Tensor, is_computed: bool) -> None:
    """Make `tensor` a real view of `base`, as eager PyTorch has it: gradients flow through it, edits are seen by both,
    and one that was made in no_grad mode is known for that."""
    with _autograd_at_work(), DisableTorchDispatch(), torch.set_grad_enabled(is_computed):
        if is_computed and _is_cut_off(tensor):
            with torch.no_grad():
                base = base.view_as(base)
        view = conjugate_views.view_of(tensor, base)
        if base_of(tensor) is not None and base_of(view) is not None:  # else it is inference mode
            set_creation_meta(view, creation_meta_of(tensor))
    become(tensor, torch.nn.Parameter(view.detach(), tensor.requires_grad) if is_parameter(tensor) else view)


def pending_storages_of(tensors: Iterable[torch.Tensor]) -> list[DeferredStorage]:
    """The Stores of the deferred tensors among `tensors`, once each."""
    found = {id(t._storage): t._storage for t in tensors if type(t) is DeferredTensor}
    return list(found.values())
