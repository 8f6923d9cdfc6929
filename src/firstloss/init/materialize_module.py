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
        raise MaterializeError(f"buffers_only={buffers_only!r}: write True or False.")
    if check_fn is not None and not callable(check_fn):
        raise MaterializeError(f"check_fn={check_fn!r} is not a function of a module.")
    if num_threads is not None and (type(num_threads) is not int or num_threads < 1):
        raise MaterializeError(f"num_threads={num_threads!r}: give a whole number from 1 on, or None for all cores.")


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

    Every parameter stays the Python object that it was, so optimizers built on the deferred module and ties between
    weights stay valid. The values are bit for bit those that the constructor would have made in eager PyTorch on
    this machine's CPU from the same seed, in whatever order and with however many threads they are made, and if
    only some of them are.

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
        buffers_only: make the buffers and leave the parameters deferred.
        check_fn: make only the tensors that belong directly to submodules for which this returns True.
        device: where the tensors shall live; default the device they were constructed for. They are made on the CPU,
            some at a time, and moved.
        dtype: what floating-point tensors shall be converted to, after they have been made in their own dtype.
        num_threads: threads to make them with; default all cores of this process.
        progress: called now and then with (bytes made, bytes in all).

    Returns:
        `module`.

    Raises:
        MaterializeError: if nothing can be made on `device`; all stays deferred. If `module` has tensors on the meta
            device, of which nobody knows what they shall hold, and none that is deferred; they are named. (Beside
            deferred ones they are left alone, with a `MetaTensorsWarning`.)
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
    """Say that some tensors stay without values; an error where all that there is to be made are these."""
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    message = (
        f"{here()}: of this {type(module).__name__}, {some} {'is' if len(names) == 1 else 'are'} on the meta device: "
        "there is neither a value nor a recipe for one. Construct without the meta device: firstloss.deferred_init "
        "takes its place, and remembers what the weights shall hold; or give them values before, by "
        "load_state_dict(..., assign=True)."
    )
    if nothing_else:
        raise MaterializeError(message)
    warn(MetaTensorsWarning(message))


def _owner(name: str, modules: dict[str, torch.nn.Module]) -> str:
    """The submodule that a tensor of this name belongs to, be it in a list or dict that the submodule keeps."""
    name = name.rpartition(".")[0]
    while name not in modules:
        name = name.rpartition(".")[0]
    return name
