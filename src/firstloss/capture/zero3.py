"""DeepSpeed's ZeRO: each rank computes its own partitions of deferred weights.

DeepSpeed has each rank make each weight whole, sends rank 0's to the others, and in stage 3 keeps a part. The recipes
are the same on all ranks, which is checked; then nothing is sent, and a part is computed alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..compat.deepspeed_names import begin_partitions
from ..compat.patches import replaces
from ..errors import NotMaterializedWarning
from ..program.source import here, warn
from .evaluation import is_recorded
from .session import this_thread
from .tensor import DeferredTensor, Hooks

_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"


@replaces(f"{_PARTITIONS}.Init._convert_to_zero_parameters")
def partition_parameters(original: Any, init: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
    """As `Init._convert_to_zero_parameters`."""
    parameters = list(parameters)
    deferred = [p for p in parameters if is_recorded(p) and not hasattr(p, "ds_id")]
    if deferred and _are_same_on_all_ranks(deferred, init.ds_process_group, init.local_device):
        for parameter in deferred:
            begin_partitions(init, parameter)
            this_thread.copies_alone = True
            try:
                parameter.partition()  # type: ignore[attr-defined] # added by the former
            finally:
                this_thread.copies_alone = False
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=init.local_device)
            Hooks.materialize(parameter)
    original(init, parameters)


@replaces("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model")
def broadcast_model(original: Any, engine: Any) -> None:
    """As `DeepSpeedEngine._broadcast_model`."""
    deferred: list[Any] = [p for p in engine.module.parameters() if is_recorded(p)]
    experts = any(not getattr(p, "allreduce", True) for p in deferred)  # have groups of their own
    if experts or not deferred or not _are_same_on_all_ranks(deferred, engine.seq_data_parallel_group, engine.device):
        original(engine)
        return
    for parameter in deferred:
        parameter.ds_optim_param = None  # what has it is not sent
    try:
        original(engine)
    finally:
        for parameter in deferred:
            del parameter.ds_optim_param


def _are_same_on_all_ranks(tensors: list[DeferredTensor], group: Any, device: Any) -> bool:
    """Whether tensors have the same recipes on all ranks; if not, they are materialized. To be called by all."""
    import torch.distributed as dist

    from ..program.fingerprint import fingerprint

    mine = torch.frombuffer(bytearray.fromhex(fingerprint([t._ref() for t in tensors])), dtype=torch.uint8)
    mine = mine.to(device, torch.int64)
    same = mine.clone()
    dist.broadcast(same, dist.get_global_rank(group, 0) if group is not None else 0, group)
    equal = (same == mine).all().long()
    dist.all_reduce(equal, dist.ReduceOp.MIN, group)
    if not equal:
        warn(
            NotMaterializedWarning(
                f"{here()}: the ranks have other recipes for this model (other seeds, for example), so each computes "
                "all weights, and DeepSpeed sends those of rank 0. Seed all ranks alike, and each computes its part."
            )
        )
        Hooks.materialize_storages(list(dict.fromkeys(t._storage for t in tensors)))
    return bool(equal)
