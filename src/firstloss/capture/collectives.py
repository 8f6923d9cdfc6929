"""Collectives in a traced step. A process group of one process sends nothing: they copy, or do nothing.

A step of one process among several cannot be compiled, since the executable computes on this process's devices only;
the error says how a step runs on many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from ..compat.patches import replaces
from ..compat.torch_names import finished_work, process_group_of_name
from ..errors import TraceError
from ..program.source import here
from . import session

# Operations of c10d that leave the tensors of one process as they are, and that copy their second argument to the first
# one.
_IN_PLACE = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier"}
COPYING = {"allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_", "gather_", "scatter_",
           "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "alltoall_",
           "alltoall_base_"}  # fmt: skip
# Those that return only the work, without the tensors.
_RETURN_WORK = {"allreduce_coalesced_", "reduce_", "barrier", "gather_", "allgather_into_tensor_coalesced_",
                "reduce_scatter_tensor_coalesced_", "alltoall_base_"}  # fmt: skip
_FUNCTIONAL = {"all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
               "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single",
               "broadcast"}  # fmt: skip


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a collective on traced tensors.

    Raises:
        TraceError: if its process group has more than one process, or if it is none of the above.
    """
    namespace, _, name = op.name().partition(".")[0].partition("::")
    values = (*args, *kwargs.values())
    if namespace == "c10d" and name in _IN_PLACE | COPYING:
        boxed = next(v for v in values if isinstance(v, torch.ScriptObject) and "ProcessGroup" in str(v))
        _refuse_many(op, torch.distributed.ProcessGroup.unbox(boxed).size())
        if name in COPYING:
            for target, source in zip(_tensors(args[0]), _tensors(args[1]), strict=True):
                if target is not source:
                    target.copy_(source)
        work = finished_work().boxed()
        return work if name in _RETURN_WORK else (args[0], work)
    if namespace.startswith("_c10d_functional"):
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return args[0]
        if name.removesuffix("_") in _FUNCTIONAL:
            group = next(value for value in reversed(values) if isinstance(value, str))
            _refuse_many(op, process_group_of_name(group).size())
            if name.endswith("_"):
                return args[0]
            return [t.clone() for t in args[0]] if isinstance(args[0], (list, tuple)) else args[0].clone()
    _refuse(str(op))


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    else:
        for one in part:
            yield from _tensors(one)


def _refuse_many(op: Any, processes: int) -> None:
    if processes > 1:
        _refuse(f"{op} among {processes} processes")


def _refuse(what: str) -> NoReturn:
    raise TraceError(
        f"{here()}: {what} in a traced step. A step is compiled for the devices of a mesh, and what they exchange is "
        "part of it: create the backend with mesh=..., or with firstloss.distributed.initialize() for the devices of "
        "several processes, and call the model itself. Or communicate between two steps."
    )


@replaces("torch.nn.parallel.DistributedDataParallel.forward")
def forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """As DistributedDataParallel's forward pass; its gradients are averages over the processes of its group."""
    if session.trace is None:
        return original(self, *args, **kwargs)
    if self.process_group.size() > 1:
        _refuse(f"DistributedDataParallel of {self.process_group.size()} processes")
    if getattr(self, "_comm_hooks", None):
        _refuse("DistributedDataParallel with a communication hook")
    return self.module(*args, **kwargs)
