"""Deferred tensors with torch.distributed: nothing is sent, since every rank has the same recipe.

`distribute_tensor` and `parallelize_module` send the weights of rank 0 to the others. For a deferred weight every rank
has the recipe, as long as all run the same constructor from the same seed: so each takes its own shard of it, as with
`src_data_rank=None`. `fully_shard` does not communicate, and needs no special handling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch

from ..compat.patches import install_patch
from ..compat.python_names import getframe
from ..compat.torch_names import local_tensor_or
from ..errors import CaptureError
from ..program.source import here

_MODULE = "torch.distributed.tensor.placement_types"
_installers: list[Callable[[Any], None]] = []
_prepared = False


# The namespaces of operations that communicate with other ranks.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"})


def refuse(op: Any) -> NoReturn:
    """Refuse a collective on a deferred tensor."""
    if "deepspeed.runtime.zero.partition_parameters" in sys.modules and _is_on_stack("deepspeed"):
        raise CaptureError(
            f"{here()}: DeepSpeed's zero.Init sends each weight to other ranks while the constructor runs, and in a "
            "deferred block weights have no values. Construct without it, and pass it the module: model = "
            "firstloss.deferred_init(Model); deepspeed.zero.Init(module=model, config_dict_or_path=config), or only "
            "deepspeed.initialize(model=model, ...)."
        )
    raise CaptureError(
        f"{here()}: {op} sends a deferred tensor, which has no values yet, to other ranks. Every rank that runs the "
        "same constructor from the same seed computes the same values: remove the call, or call "
        "firstloss.materialize_tensor(tensor), or firstloss.materialize_module(model), before it."
    )


def _is_on_stack(package: str) -> bool:
    """Whether a function of this package is on the call stack."""
    frame: Any = getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False


# Modules that use a parameter's address only as an id: `Accelerator.prepare` maps an optimizer's parameters to those
# after `fully_shard`.
_USE_ADDRESS_AS_ID = frozenset({"accelerate.accelerator"})


def wants_address_as_id() -> bool:
    """Whether the caller's caller uses a tensor's address only as an id."""
    return getframe(2).f_globals.get("__name__") in _USE_ADDRESS_AS_ID


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor is returned unchanged."""
    return local_tensor_or(tensor, tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors in a tensor: the local shard of a DTensor, the inner tensors of a wrapper subclass."""
    local = local_part(tensor)
    flatten = getattr(type(local), "__tensor_flatten__", None)
    if flatten is None:
        yield local
        return
    names, _ = flatten(local)
    for name in names:
        yield from parts_of(getattr(local, name))


def prepare(is_deferred: Callable[[Any], bool]) -> None:
    """Patch the DTensor API, once it has been imported, not to send deferred tensors.

    Called when a deferred tensor is detached, which is the first thing that `distribute_tensor` does.
    """
    global _prepared
    if _prepared or _MODULE not in sys.modules:
        return
    _prepared = True
    for kind in ("Shard", "_StridedShard"):
        install_patch(f"{_MODULE}.{kind}._shard_tensor", partial(_split_only, is_deferred))
    install_patch(f"{_MODULE}.mesh_broadcast", partial(_skip_if_deferred, is_deferred))
    from torch.distributed.tensor import DTensor

    for install in _installers:
        install(DTensor)


def when_imported(install: Callable[[Any], None]) -> None:
    """Register a callback that is called with the DTensor class when that is first used with a deferred tensor."""
    _installers.append(install)


def _split_only(
    is_deferred: Callable, original: Callable, self: Any, tensor: Any, mesh: Any, dim: int, src_data_rank: Any = 0
) -> Any:
    return original(self, tensor, mesh, dim, None if is_deferred(tensor) else src_data_rank)


def _skip_if_deferred(is_deferred: Callable, original: Callable, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return None if is_deferred(tensor) else original(tensor, *args, **kwargs)
