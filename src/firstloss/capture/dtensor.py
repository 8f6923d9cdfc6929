"""DTensors whose shards are deferred: nothing is sent, and they are initialized as a single process would.

`distribute_tensor` and `parallelize_module` send the weights of rank 0 to the others. For a deferred weight every rank
has the recipe, as long as all run the same constructor from the same seed: so each takes its own shard of it, as with
`src_data_rank=None`. `fully_shard` does not communicate, and needs no special handling.

`fully_shard(model); model.init_weights()` fills DTensors. In PyTorch each rank draws its own shard, so the numbers
depend on the mesh, and on a CPU mesh all ranks draw the same ones. If the shard is deferred, the operation is recorded
on a whole tensor instead, from which this rank's shard is copied; only that shard is computed.

A shard that was given to `DTensor.from_local` is this rank's own, and need not be a slice of anything (transformers
allocates the weights that a checkpoint lacks so, under tensor parallelism). It is filled as without Firstloss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.ops import aten

from ..compat.patches import DTENSOR, replaces, when_imported
from ..compat.torch_names import local_tensor, local_tensor_or, operation_handlers
from .tensor import DeferredTensor, Hooks, is_pending

# In-place fills, which PyTorch would run on each shard.
_FILLS = [
    *(getattr(aten, name).default for name in "normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_".split()),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to, aten.bernoulli_.float),
]
_LIKE = [aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype]
_EYE = [aten.eye.m_out, aten.eye.out]
# Initializers that use operations which DTensors do not support, or compute differently.
_INITIALIZERS = ("torch.nn.init.orthogonal_", "torch.nn.init.sparse_", "torch.nn.init.dirac_")
_PADDING = tuple(f"torch.nn.{kind}._fill_padding_idx_with_zero" for kind in ("Embedding", "EmbeddingBag"))


def shards_a_deferred_tensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor whose local shard is a part of a deferred tensor."""
    local = local_tensor_or(tensor, None)
    return is_pending(local) and not local._storage.is_local


def fill_as_one_process(tensor: Any, fill: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `fill` to a whole tensor, and copy this rank's shard of it to the DTensor `tensor`; returns `tensor`."""
    with torch.no_grad():
        whole = _whole(tensor, tensor.dtype)
        fill(whole)
        local_tensor(tensor).copy_(local_tensor(_distributed(whole, tensor)))
    return tensor


def _whole(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    options = {"dtype": dtype, "device": local_tensor(tensor).device}
    return Hooks.dispatch(aten.empty_strided.default, (tuple(tensor.shape), tensor.stride()), options)


def _distributed(whole: torch.Tensor, like: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _install_handlers() -> None:
    from torch.distributed.tensor import DTensor

    handlers = operation_handlers(DTensor)
    for op in _FILLS:
        handlers[op] = _deferred_handler(op, _fill)
    for op in _LIKE:
        handlers[op] = _deferred_handler(op, _like)
    for op in _EYE:
        handlers[op] = _deferred_handler(op, _eye, target="out")


when_imported(DTENSOR, _install_handlers)


@replaces(*(f"{DTENSOR}.placement_types.{kind}._shard_tensor" for kind in ("Shard", "_StridedShard")))
def split_only(original: Any, self: Any, tensor: Any, mesh: Any, dim: int, src_data_rank: Any = 0) -> Any:
    """As `Shard._shard_tensor`; each rank takes its own shard of a deferred tensor."""
    return original(self, tensor, mesh, dim, None if type(tensor) is DeferredTensor else src_data_rank)


@replaces(f"{DTENSOR}._api._FromTorchTensor.forward")
def from_local(original: Any, context: Any, local: Any, *args: Any) -> Any:
    """As `DTensor.from_local`."""
    if type(local) is DeferredTensor:
        local._storage.is_local = True
    return original(context, local, *args)


@replaces(f"{DTENSOR}.placement_types.mesh_broadcast")
def broadcast(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """As `mesh_broadcast`; a deferred tensor is the same on all ranks."""
    return None if type(tensor) is DeferredTensor else original(tensor, *args, **kwargs)


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    return fill_as_one_process(args[0], lambda whole: op(whole, *args[1:], **kwargs))


def _like(op: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    whole = _whole(args[0], kwargs.get("dtype") or args[0].dtype)
    return _distributed(op(whole, *args[1:], **kwargs), args[0])


def _eye(op: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    return fill_as_one_process(kwargs["out"], lambda whole: op(*args, **{**kwargs, "out": whole}))


def _deferred_handler(op: Any, handle: Callable[..., Any], target: str | None = None) -> Callable[..., Any]:
    """A handler of `op` that calls `handle` for a shard of a deferred tensor, else PyTorch."""

    def handler(op_call: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        if shards_a_deferred_tensor(args[0] if target is None else kwargs[target]):
            return handle(op_call, args, kwargs)
        with _without_handler(op):
            return op_call(*args, **kwargs)

    return handler


@contextmanager
def _without_handler(op: Any) -> Iterator[None]:
    from torch.distributed.tensor import DTensor

    handlers = operation_handlers(DTensor)  # context parallelism replaces the table by a copy
    handler = handlers.pop(op, None)  # None if another thread has it
    try:
        yield
    finally:
        if handler is not None:
            handlers[op] = handler


@replaces(*_INITIALIZERS)
def initialize(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """As the initializer `original`."""
    if shards_a_deferred_tensor(tensor):
        return fill_as_one_process(tensor, lambda whole: original(whole, *args, **kwargs))
    return original(tensor, *args, **kwargs)


@replaces(*_PADDING)
def fill_padding(original: Any, self: Any) -> None:
    """Zero the row `padding_idx` of the local shard; DTensor would gather the whole weight and edit a copy."""
    if self.padding_idx is None or not shards_a_deferred_tensor(self.weight):
        original(self)
        return
    with torch.no_grad():
        row = _whole(self.weight, torch.bool).zero_()
        row[self.padding_idx].fill_(True)
        local_tensor(self.weight).masked_fill_(local_tensor(_distributed(row, self.weight)), 0)
