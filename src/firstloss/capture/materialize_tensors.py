"""Materialize deferred tensors in place: compute their Values, and make the tensors real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .. import timeline
from ..compat.torch_names import (
    DisableTorchDispatch,
    InferenceMode,
    are_functorch_transforms_active,
    base_of,
    creation_meta_of,
    is_parameter,
    set_creation_meta,
    without_functorch,
)
from ..errors import MaterializeError
from ..interpreter import Uninterrupted
from ..program.graph import Value
from ..program.source import here
from . import conjugate_views
from .autograd_boundary import with_autograd
from .distributed import parts_of
from .storage_swap import become, like
from .tensor import DeferredStorage, DeferredTensor, becoming_real, is_pending, keep_other_threads_out

_BATCH_BYTES = 1 << 30  # made on the host before they are moved or converted


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Make a deferred tensor real, in place; a real tensor is returned unchanged.

    Tensors that share its memory (views, ties, `.data`) become real, too, and still share it.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> fl.materialize_tensor(model.bias) is model.bias
        True
        >>> fl.is_deferred(model.bias), fl.is_deferred(model.weight)
        (False, True)

    Args:
        tensor: a deferred or real tensor, or a DTensor whose local shard is deferred.

    Returns:
        The same Python object.
    """
    materialize_storages(pending(tensor))
    return tensor


def pending(tensor: torch.Tensor) -> list[DeferredStorage]:
    """The storages that have to be made for a tensor to become real."""
    return [part._storage for part in parts_of(tensor) if is_pending(part)]


def materialize_storages(
    storages: list[DeferredStorage],
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Compute the content of `storages`, and make every tensor that is a view of one of them real."""
    if not storages:
        return
    if device is not None:
        _check_device(device)
    # Weights are ordinary tensors, wherever they are first used.
    with InferenceMode(False), becoming_real:
        keep_other_threads_out()
        _materialize(storages, num_threads, progress, device, dtype)


def _materialize(
    storages: list[DeferredStorage],
    num_threads: int | None,
    progress: Callable[[int, int], None] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """As `materialize_storages`. What was computed is kept in the storage until its tensors are real, and as long as
    another thread's operation holds the deferred one, so that both have the same memory."""
    family = conjugate_views.with_mirrors(storages)
    mirrors = [storage for storage in family if storage.mirrors is not None]
    lazy = [(view, base, _has_history(view)) for storage in mirrors for view, base in conjugate_views.bases(storage)]
    storages = [storage for storage in family if storage.mirrors is None]
    total, before = sum(storage.value.nbytes for storage in storages), 0
    report = progress
    with timeline.span("materialize"):
        on_gpu = _on_gpus([storage.value for storage in storages if not storage.is_computed], device)
        # Weights to be moved or converted are made in batches, to avoid a second copy of all of them.
        for batch in [storages] if device is None and dtype is None else _batches(storages):
            if progress is not None:
                report = partial(_report, progress, before, total)
            values = [storage.value for storage in batch if not storage.is_computed]
            buffers = _make([value for value in values if value not in on_gpu], num_threads, report)
            buffers.update((value, on_gpu.pop(value)) for value in values if value in on_gpu)
            for storage in batch:
                if not storage.is_computed:
                    storage.computed = storage.value, buffers.pop(storage.value)
            converted = [_converted(storage, device, dtype) for storage in batch]
            with Uninterrupted():  # tensors that share memory become real together
                for storage, buffer in zip(batch, converted, strict=True):
                    _make_all_real(storage, buffer)
                    if buffer is not storage.computed[1]:  # type: ignore[index]
                        storage.computed = None
                    before += storage.value.nbytes
        with Uninterrupted():
            for view, base, is_computed in lazy:
                _make_real_view(view, base, is_computed)


def _on_gpus(values: list[Value], device: torch.device | str | None) -> dict[Value, torch.Tensor]:
    """Make directly on their GPU the Values that `gpu/` has kernels for; the others are made on the CPU and moved."""
    by_device: dict[torch.device, list[Value]] = {}
    for value in values:
        target = value.device if device is None else torch.device(device)
        if target.type == "cuda":
            by_device.setdefault(target, []).append(value)
    buffers: dict[Value, torch.Tensor] = {}
    for target, on_target in by_device.items():
        from ..gpu import weights

        index = torch.cuda.current_device() if target.index is None else target.index
        buffers.update(weights.materialize(on_target, torch.device("cuda", index)))
    return buffers


def allocate_real(storage: DeferredStorage) -> None:
    """Make the tensors of `storage` real, with uninitialized memory that the caller fills; drops the recipe."""
    with InferenceMode(False):
        with DisableTorchDispatch():
            memory = storage.value.empty()
        storage.computed = None
        with becoming_real:
            keep_other_threads_out()
            with Uninterrupted():
                _make_all_real(storage, memory)


def compute(storages: list[DeferredStorage]) -> None:
    """Compute the content of `storages`, and store it there; their tensors stay deferred."""
    storages = [storage for storage in storages if not storage.is_computed]
    with InferenceMode(False), timeline.span("materialize"):
        buffers = _make([storage.value for storage in storages], None, None)
    for storage in storages:
        storage.computed = storage.value, buffers.pop(storage.value)


def _report(progress: Callable[[int, int], None], before: int, total: int, nbytes: int, batch_total: int) -> None:
    progress(before + nbytes, total)


def _batches(storages: list[DeferredStorage]) -> Iterator[list[DeferredStorage]]:
    batch: list[DeferredStorage] = []
    nbytes = 0
    for storage in storages:
        if batch and nbytes + storage.value.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(storage)
        nbytes += storage.value.nbytes
    yield batch


def _check_device(device: torch.device | str) -> None:
    """Raise an error, before anything is made, if the device cannot be used."""
    try:
        with DisableTorchDispatch():
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError by a build without CUDA
        reason = str(error).splitlines()[0].rstrip(".")
        raise MaterializeError(
            f"{here()}: the weights cannot be made on device {str(device)!r}: {reason}. They are still deferred; omit "
            "`device` to make them on the device that they were constructed for, or use one that this machine has."
        ) from None


def _converted(storage: DeferredStorage, device: torch.device | str | None, dtype: torch.dtype | None) -> torch.Tensor:
    """The content of a storage that was computed, moved and converted."""
    assert storage.computed is not None
    buffer = storage.computed[1]
    if device is None and (dtype is None or not buffer.is_floating_point()):
        return buffer
    return buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None)


def _make_all_real(storage: DeferredStorage, buffer: torch.Tensor) -> None:
    """Make every tensor of `storage` a real view of `buffer`."""
    tensors = storage.alive()
    with_history = {id(tensor) for tensor in tensors if _has_history(tensor)}
    views = _views_and_bases(tensors) if buffer.dtype == storage.value.dtype else []
    view_ids = {id(view) for view, _ in views}
    outdated = (storage.outdated_views() & view_ids) - with_history if views else set()
    for tensor in tensors:
        if id(tensor) not in view_ids:
            _make_real(tensor, buffer, storage.value, id(tensor) in with_history)
    # Autograd notices by a tensor's version that its base has been edited since: their order is that of eager PyTorch.
    for view, base in views:
        if id(view) in outdated:
            _make_real_view(view, base, False)
    for _, base in views:
        if outdated and not base.is_inference():
            torch.autograd.graph.increment_version(base)
    for view, base in views:
        if id(view) not in outdated:
            _make_real_view(view, base, id(view) in with_history)


def _make(
    values: list[Value], num_threads: int | None, progress: Callable[[int, int], None] | None
) -> dict[Value, torch.Tensor]:
    """Materialize Values, and report progress."""
    from ..engine.cpu_engine import materialize_values  # not before the first use: a capture does without it

    if are_functorch_transforms_active():  # which would apply to what this thread computes
        with without_functorch():
            return materialize_values(values, num_threads=num_threads)
    if progress is None:
        return materialize_values(values, num_threads=num_threads)
    lock = threading.Lock()
    total = sum(value.nbytes for value in values)
    finished = 0

    def done(count: int) -> None:
        nonlocal finished
        with lock:
            finished += count
            progress(min(finished, total), total)

    return materialize_values(values, num_threads=num_threads, on_progress=done)


def _view(buffer: torch.Tensor, tensor: DeferredTensor, value: Value) -> torch.Tensor:
    ref = tensor._ref()
    if buffer.dtype != value.dtype and not ref.whole:
        ref = ref._replace(dtype=buffer.dtype)
    with DisableTorchDispatch(), torch.no_grad():
        return ref.view(buffer) if not ref.whole else buffer


def _make_real(tensor: DeferredTensor, buffer: torch.Tensor, value: Value, is_computed: bool) -> None:
    """Make `tensor` a real view of `buffer`, in place."""
    real = _view(buffer, tensor, value)
    become(tensor, like(tensor, real.detach(), is_computed, _line(value)))


def _line(value: Value) -> str:
    return str(value.node.source) if value.node is not None else "a constructor"


def _has_history(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a grad_fn. Call once: PyTorch raises the error below only once."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError as error:
        # A view made in no_grad mode whose base was edited since. Or an edited view of a weight that was then frozen,
        # whose grad_fn PyTorch cannot regenerate for a tensor without memory.
        return "INTERNAL ASSERT" in str(error)


def _views_and_bases(tensors: list[DeferredTensor]) -> list[tuple[DeferredTensor, torch.Tensor]]:
    """The tensors that autograd considers views of a leaf among `tensors`, each with its base."""
    ids = {id(t) for t in tensors}
    return [
        (t, base)
        for t in tensors
        if (base := base_of(t)) is not None and id(base) in ids and base.is_leaf and not is_parameter(t)
    ]


def _is_cut_off(view: torch.Tensor) -> bool:
    """Whether gradients of a view do not reach its base: it is a view of one made in no_grad mode."""
    node = view.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is None


def _make_real_view(tensor: DeferredTensor, base: torch.Tensor, is_computed: bool) -> None:
    """Make `tensor` a real view of `base`, as in eager PyTorch, with its autograd metadata."""
    with with_autograd(), DisableTorchDispatch(), torch.set_grad_enabled(is_computed):
        if is_computed and _is_cut_off(tensor):
            with torch.no_grad():
                base = base.view_as(base)
        view = conjugate_views.view_of(tensor, base)
        if base_of(tensor) is not None and base_of(view) is not None:  # not in inference mode
            set_creation_meta(view, creation_meta_of(tensor))
    become(tensor, torch.nn.Parameter(view.detach(), tensor.requires_grad) if is_parameter(tensor) else view)
