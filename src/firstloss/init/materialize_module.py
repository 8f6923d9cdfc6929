"""Materialize: turn deferred tensors into real ones, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..capture.deferred import named_tensors
from ..capture.distributed import parts_of
from ..capture.materialize_tensors import materialize_storages, materialize_tensor, pending
from ..capture.tensor import DeferredStorage
from ..errors import MaterializeError, MetaTensorsWarning
from ..program.source import here, warn

__all__ = ["materialize_module", "materialize_tensor"]

Module = TypeVar("Module", bound=torch.nn.Module)


def _check_arguments(module: Any, buffers_only: Any, check_fn: Any, num_threads: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise MaterializeError(f"materialize_module takes a module, not an object of type {type(module).__name__}.")
    if not isinstance(buffers_only, bool):
        raise MaterializeError(f"buffers_only={buffers_only!r} must be True or False.")
    if check_fn is not None and not callable(check_fn):
        raise MaterializeError(f"check_fn={check_fn!r} is not a function of a module.")
    if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
        raise MaterializeError(f"num_threads={num_threads!r} must be a positive integer, or None for all cores.")


def materialize_module(
    module: Module,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Module:
    """Make the deferred parameters and buffers of `module` real, in place, and return it.

    Every parameter remains the same Python object, so optimizers built on the deferred module and ties between weights
    remain valid. The values are bit-identical to those of the constructor in eager PyTorch on this machine's CPU from
    the same seed, regardless of the order and the number of threads, and even if only some of them are made.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> fl.materialize_module(model, dtype=torch.bfloat16) is model
        True
        >>> model.weight.dtype
        torch.bfloat16
        >>> optimizer.param_groups[0]["params"][0] is model.weight
        True

    Args:
        module: a Module, some of whose parameters and buffers are deferred; DTensors get their local shard.
        buffers_only: make only the buffers, and leave the parameters deferred.
        check_fn: make only tensors that belong directly to submodules for which this returns True.
        device: the target device; defaults to the device that the tensors were constructed for. They are made on the
            CPU in batches and moved.
        dtype: the dtype that floating-point tensors are converted to, after they have been made in their own dtype.
        num_threads: defaults to all cores of this process.
        progress: called from time to time with (bytes made, total bytes).

    Returns:
        `module`.

    Raises:
        MaterializeError: if `device` cannot be used; everything stays deferred. If `module` has tensors on the meta
            device, which have no recipe, and no deferred ones; names them. (If it has deferred ones, too, this is a
            `MetaTensorsWarning`.)
        ConstantChangedError: if a tensor from outside that a recipe reads has been edited since.
    """
    _check_arguments(module, buffers_only, check_fn, num_threads)
    modules = dict(module.named_modules()) if check_fn is not None else {}
    chosen = {name for name, sub in modules.items() if check_fn is not None and check_fn(sub)}
    storages: dict[int, DeferredStorage] = {}
    on_meta: list[str] = []
    for name, tensor, kind in named_tensors(module):
        if buffers_only and (kind == "parameter" or isinstance(tensor, torch.nn.Parameter)):
            continue
        if check_fn is not None and _owner(name, modules) not in chosen:
            continue
        storages.update((id(storage), storage) for storage in pending(tensor))
        if kind != "attribute" and any(part.is_meta for part in parts_of(tensor)):
            on_meta.append(name)
    if on_meta:
        _report_meta(module, on_meta, nothing_else=not storages)
    materialize_storages(list(storages.values()), num_threads, progress, device, dtype)
    return module


def _report_meta(module: torch.nn.Module, names: list[str], nothing_else: bool) -> None:
    """Warn about tensors on the meta device; an error if there are no others to make."""
    examples = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    message = (
        f"{here()}: of this {type(module).__name__}, {examples} {'is' if len(names) == 1 else 'are'} on the meta "
        "device: they have neither a value nor a recipe. Construct without the meta device, with "
        "firstloss.deferred_init, which records how the weights are initialized; or load values before, by "
        "load_state_dict(..., assign=True)."
    )
    if nothing_else:
        raise MaterializeError(message)
    warn(MetaTensorsWarning(message))


def _owner(name: str, modules: dict[str, torch.nn.Module]) -> str:
    """The submodule that a tensor of this name belongs to, directly or in a list or dict."""
    name = name.rpartition(".")[0]
    while name not in modules:
        name = name.rpartition(".")[0]
    return name
