"""Materialize: turn deferred tensors into real ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import timeline
from ..capture import recorder, replay
from ..capture.deferred import named_tensors
from ..capture.program import Value
from ..capture.recorder import DeferredTensor, Store
from ..errors import ConstantChangedError
from . import torch_engine
from .memory import allocate_huge


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Make a deferred tensor real, in place; a real tensor is returned as it is.

    Returns the same Python object. Tensors that share its memory (views, ties, `.data`) become real with it, and go
    on sharing.
    """
    if type(tensor) is DeferredTensor and tensor._store.resident is None:
        materialize_stores([tensor._store])
    return tensor


def materialize_module(
    module: torch.nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make the deferred parameters and buffers of `module` real, in place.

    Every parameter stays the Python object that it was, so optimizers built on the deferred module and ties between
    weights stay valid. The values are bit for bit those that the constructor would have made in eager PyTorch on
    this machine's CPU from the same seed, in whatever order and with however many threads they are made, and if
    only some of them are.

    Args:
        buffers_only: make the buffers and leave the parameters deferred.
        check_fn: make only the tensors that belong directly to submodules for which this returns True.
        device: where the tensors shall live; default the device they were constructed for.
        dtype: what floating-point tensors shall be converted to, after they have been made in their own dtype.
        num_threads: threads to make them with; default all cores of this process.
        progress: called now and then with (bytes made, bytes in all).
    """
    prefixes = None
    if check_fn is not None:
        prefixes = {name for name, sub in module.named_modules() if check_fn(sub)}
    stores: dict[int, Store] = {}
    for name, tensor, kind in named_tensors(module):
        if buffers_only and kind == "parameter":
            continue
        if prefixes is not None and name.rpartition(".")[0] not in prefixes:
            continue
        if type(tensor) is DeferredTensor and tensor._store.resident is None:
            stores[id(tensor._store)] = tensor._store
    materialize_stores(list(stores.values()), num_threads, progress, device, dtype)


def materialize_stores(
    stores: list[Store],
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make the content of `stores`, then turn every tensor that looks at one of them into a real tensor."""
    if not stores:
        return
    values = [store.value for store in stores]
    with timeline.span("materialize"):
        made = run_recipes(values, num_threads, progress)
        for store in stores:
            buffer = made[store.value]
            if device is not None or (dtype is not None and buffer.is_floating_point()):
                buffer = buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None)
            for tensor in store.alive():
                become(tensor, _view(buffer, tensor, store.value))


def run_recipes(
    values: list[Value],
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    allocate: Callable[[Value], torch.Tensor] = allocate_huge,
    background: bool = False,
) -> dict[Value, torch.Tensor]:
    """Run the recipes of `values` on the torch engine (see its `run`): a buffer for each, that nobody else holds."""
    with torch._C._DisableTorchDispatch():
        for value in values:
            _check_constants(value)
        done = None
        if progress is not None:
            total = sum(value.nbytes for value in values)
            made = 0

            def done(count: int) -> None:
                nonlocal made
                made += count
                progress(min(made, total), total)

        return torch_engine.run(values, allocate, num_threads, done, background)


def _check_constants(value: Value) -> None:
    real, version = value.real, value.version
    if real is not None and version is not None and real._version != version:
        raise ConstantChangedError(
            f"a tensor of shape {list(value.shape)} from outside the constructor was edited after it had been captured "
            f"at {value.label}; its weight would not be what eager PyTorch made. Clone it before the constructor, or "
            "materialize before editing it."
        )


def _view(buffer: torch.Tensor, tensor: DeferredTensor, value: Value) -> torch.Tensor:
    ref = tensor._ref()
    if buffer.dtype != value.dtype and not ref.whole:
        ref = ref._replace(dtype=buffer.dtype)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return replay.look(buffer, ref) if not ref.whole else buffer


def become(tensor: DeferredTensor, real: torch.Tensor) -> None:
    """Make `tensor`, the Python object, the tensor `real`; its class, `requires_grad`, gradient and attributes stay."""
    requires_grad, grad = tensor.requires_grad, tensor.grad
    attributes: dict[str, Any] = {k: v for k, v in tensor.__dict__.items() if k not in ("_store", "_is_param")}
    is_parameter = getattr(tensor, "_is_param", False)
    real = real.detach() if not is_parameter else torch.nn.Parameter(real, requires_grad)
    if not is_parameter and requires_grad:
        real.requires_grad_(True)
    tensor.grad = None
    tensor.__class__ = type(real)  # type: ignore[assignment]
    tensor.__dict__.clear()
    tensor.__dict__.update(attributes)
    torch._C._swap_tensor_impl(tensor, real)
    if grad is not None:
        tensor.grad = grad


def stores_of(tensors: Iterable[torch.Tensor]) -> list[Store]:
    """The Stores of the deferred tensors among `tensors`, once each."""
    found = {id(t._store): t._store for t in tensors if type(t) is DeferredTensor}
    return list(found.values())


recorder.set_materializer(materialize_tensor)
