"""Deferred tensors and torch.distributed: collectives move nothing, since every rank has the same recipe.

`distribute_tensor` and `parallelize_module` send the weights of rank 0 to the others. A deferred weight is no data but
a recipe, and as long as every rank runs the same constructor from the same seed, all have it: so each takes its own
part of it, as with `src_data_rank=None`. `fully_shard` communicates nothing, and needs nothing done.
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


# The namespaces of operations that talk to other ranks.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"})


def refuse(op: Any) -> NoReturn:
    """A collective was called with a deferred tensor."""
    if "deepspeed.runtime.zero.partition_parameters" in sys.modules and _below("deepspeed"):
        raise CaptureError(
            f"{here()}: DeepSpeed's zero.Init sends each weight to other ranks while the constructor runs, and in a "
            "deferred block there is nothing to send. Construct without it, and hand the module over: model = "
            "firstloss.deferred_init(Model); deepspeed.zero.Init(module=model, config_dict_or_path=config), or "
            "deepspeed.initialize(model=model, ...) alone."
        )
    raise CaptureError(
        f"{here()}: {op} sends a deferred tensor to other ranks, and there is nothing to send yet. Every rank that "
        "runs the same constructor from the same seed makes the same values: leave the call out, or call "
        "firstloss.materialize_tensor(tensor), or firstloss.materialize_module(model), before it."
    )


def _below(package: str) -> bool:
    """Whether code of this package is running."""
    frame: Any = getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False


# Where a parameter's address is its name, and nothing else: `Accelerator.prepare` finds by it, after `fully_shard`, the
# sharded parameter that takes an optimizer's parameter's place.
_ADDRESSES_ARE_NAMES = frozenset({"accelerate.accelerator"})


def wants_address_as_id() -> bool:
    """Whether who has called our caller asks for an address to know a tensor by it, and reads nothing there."""
    return getframe(2).f_globals.get("__name__") in _ADDRESSES_ARE_NAMES


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor is returned as it is."""
    return local_tensor_or(tensor, tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of: what this rank holds of a DTensor, what a wrapper class wraps."""
    local = local_part(tensor)
    flatten = getattr(type(local), "__tensor_flatten__", None)  # as torch.compile has it
    if flatten is None:
        yield local
        return
    names, _ = flatten(local)
    for name in names:
        yield from parts_of(getattr(local, name))


def prepare(is_deferred: Callable[[Any], bool]) -> None:
    """Teach the DTensor API, once it has been imported, to leave deferred tensors where they are.

    Called when a deferred tensor is detached: that is how `distribute_tensor` begins.
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
    """Have `install` called with the DTensor class when that has been imported and a deferred tensor meets it."""
    _installers.append(install)


def _split_only(
    is_deferred: Callable, original: Callable, self: Any, tensor: Any, mesh: Any, dim: int, src_data_rank: Any = 0
) -> Any:
    return original(self, tensor, mesh, dim, None if is_deferred(tensor) else src_data_rank)


def _skip_if_deferred(is_deferred: Callable, original: Callable, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return None if is_deferred(tensor) else original(tensor, *args, **kwargs)
