"""Distributed tensors and collectives in a capture. Nothing is sent, since every rank has the same recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ..compat.python_names import getframe
from ..compat.torch_names import local_tensor_or
from ..errors import CaptureError
from ..program.source import here

# The namespaces of operations that communicate with other ranks.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"})


def refuse(op: Any) -> NoReturn:
    """Refuse a collective on a deferred tensor."""
    if "deepspeed.runtime.zero.partition_parameters" in sys.modules and _is_on_stack("deepspeed"):
        if _is_on_stack("transformers"):
            instead = (
                "transformers enters it by itself once there are TrainingArguments(deepspeed=...) with ZeRO stage 3: "
                "construct the model, or call from_pretrained, before you make them."
            )
        else:
            instead = (
                "Construct without it, and pass it the module: model = firstloss.deferred_init(Model); "
                "deepspeed.zero.Init(module=model, config_dict_or_path=config), or only "
                "deepspeed.initialize(model=model, ...)."
            )
        raise CaptureError(
            f"{here()}: DeepSpeed's zero.Init sends each weight to other ranks while the constructor runs, and in a "
            f"deferred block weights have no values. {instead}"
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
