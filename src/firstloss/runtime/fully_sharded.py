"""Models that `fully_shard` or `distribute_tensor` has distributed, when they come to a backend.

The backend distributes weights itself, over the devices of its mesh. Over one process nothing is distributed: the
parameters become plain ones again, and FSDP's hooks are removed.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from ..compat.torch_names import (
    buffers_of,
    fsdp_groups,
    fsdp_state_of,
    local_tensor,
    parameters_of,
    remove_fsdp_hooks,
)
from ..errors import BackendError
from ..program.source import here


def undo_over_one_process(model: torch.nn.Module) -> None:
    """Give a model that was distributed over one process plain parameters and buffers, also in its optimizers.

    Raises:
        BackendError: if it is distributed over several processes, or if FSDP computes in another dtype or keeps weights
            elsewhere.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    fully_sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fully_sharded:
        module.reshard()  # after a forward pass, the outermost module has whole parameters
    distributed = [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if isinstance(t, DTensor)]
    if not distributed:
        return
    for name, tensor in distributed:
        if tensor.device_mesh.size() > 1:
            raise BackendError(
                f"{here()}: {name} is distributed over {tensor.device_mesh.size()} processes, by fully_shard or "
                "distribute_tensor. The backend distributes weights itself: leave that out, and write "
                'firstloss.backend("XLA", mesh={"fsdp": ...}) for the devices of this process, after '
                "firstloss.distributed.initialize() for those of all processes. PyTorch's own FSDP runs a deferred "
                "model without a backend: see docs/trainers.md."
            )
    states = [fsdp_state_of(module)() for module in fully_sharded]
    for state in states:
        _refuse_policies(state)
    for state in states:
        remove_fsdp_hooks(state)
    plain: dict[int, torch.Tensor] = {}
    for owner in model.modules():
        for table in (parameters_of(owner), buffers_of(owner)):
            for name, tensor in table.items():
                if isinstance(tensor, DTensor):
                    if id(tensor) not in plain:
                        plain[id(tensor)] = _plain(tensor)
                    table[name] = plain[id(tensor)]
    for optimizer in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)]:
        _replace_in(optimizer, plain)


def _plain(tensor: Any) -> torch.Tensor:
    new = local_tensor(tensor).detach()
    if not isinstance(tensor, torch.nn.Parameter):
        return new
    parameter = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        parameter.grad = local_tensor(tensor.grad)
    return parameter


def _refuse_policies(state: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    for group in fsdp_groups(state):
        if group.mp_policy != MixedPrecisionPolicy() or type(group.offload_policy) is not OffloadPolicy:
            raise BackendError(
                f"{here()}: the model is fully sharded with {group.mp_policy} and {group.offload_policy}, which the "
                "backend does not follow. Leave fully_shard out; for half precision, run the step in "
                "firstloss.amp.autocast()."
            )


def _replace_in(optimizer: torch.optim.Optimizer, plain: dict[int, torch.Tensor]) -> None:
    """Let an optimizer that was created before work on the plain parameters."""
    for group in optimizer.param_groups:
        group["params"] = [plain.get(id(p), p) for p in group["params"]]
    for parameter in [p for p in optimizer.state if id(p) in plain]:
        state = optimizer.state.pop(parameter)
        optimizer.state[plain[id(parameter)]] = {
            key: local_tensor(value) if hasattr(value, "device_mesh") else value for key, value in state.items()
        }
