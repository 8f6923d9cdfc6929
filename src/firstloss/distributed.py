"""`firstloss.distributed`: the processes and devices of a run."""

from __future__ import annotations

import os
from typing import Any

import torch

from .compat.torch_names import pytree
from .errors import BackendError
from .runtime.cluster_config import ClusterConfig as ClusterConfig


def initialize(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    timeout: int = 120,
    heartbeat: int = 10,
) -> int:
    """Join the processes of the run, before the backend is made: `jax.distributed.initialize`, from what
    torchrun, SLURM or an indexed Kubernetes Job has left in the environment.

    Examples:
        >>> fl.distributed.initialize()  # this process has been started by no launcher
        1

    Args:
        coordinator: "host:port", where process 0 listens.
        count: how many processes there are.
        index: which one this is, from 0.
        timeout: seconds to wait for all of them; if some have not come then, this process says so and ends.
        heartbeat: after so many seconds without a sign of one of them, the others end.

    Returns:
        How many there are: 1, and nothing is done, where no launcher has started this process.

    Raises:
        BackendError: if what the launcher says is incomplete, or if some processes have other versions of Firstloss,
            JAX, PyTorch or Python than process 0.
    """
    from .runtime.mesh.launchers import LaunchedProcess, launch_of

    given = (coordinator, count, index)
    if coordinator is not None and count is not None and index is not None:
        launch: LaunchedProcess | None = LaunchedProcess("fl.distributed.initialize", coordinator, count, index)
    elif any(part is not None for part in given):
        raise BackendError("fl.distributed.initialize takes the coordinator, the count and the index, or none of them.")
    else:
        launch = launch_of(os.environ)
    if launch is None or launch.processes == 1:
        return 1
    from . import __version__
    from .runtime.mesh.initialize import join

    join(launch, __version__, timeout, heartbeat)
    return launch.processes


# -- which process this is. Cerebras' names: its workers only stream data; here each process reads and trains. --


def get_ordinal() -> int:
    """The number of this process, from 0.

    Returns:
        0 where there is one process.
    """
    return _processes().index


def num_tasks() -> int:
    """How many processes train together.

    Returns:
        At least 1.
    """
    return _processes().count


def is_master_ordinal(local: bool = False) -> bool:
    """Whether this is process 0, which writes logs.

    Args:
        local: the same, among those on this machine (`LOCAL_RANK`).

    Returns:
        True for one process in all, or for one on each machine if `local`.
    """
    return int(os.environ.get("LOCAL_RANK", 0)) == 0 if local else get_ordinal() == 0


def is_streamer() -> bool:
    """Whether this process reads data: each does.

    Returns:
        True.
    """
    return True


def num_streamers() -> int:
    """How many processes read data: all of them.

    Returns:
        `num_tasks()`.
    """
    return num_tasks()


def get_streaming_rank() -> int:
    """The number of this process among those that read data: its own among all.

    Returns:
        `get_ordinal()`.
    """
    return get_ordinal()


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """How many rows of each batch a process reads, if all devices together are to compute on so many.

    One process reads all of them, for as many devices as there are; several share them, and put theirs together with
    `global_batch`.

    Args:
        effective_batch_size: rows of a batch for an update.
        global_rank: of another process than this one; None: this one.

    Returns:
        Rows: `effective_batch_size` divided by the number of processes.

    Raises:
        BackendError: if it is no positive whole number, or the processes cannot share it evenly.
    """
    size, count = effective_batch_size, num_tasks()
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BackendError(f"effective_batch_size={size!r} is not a positive integer.")
    if global_rank is not None and not 0 <= global_rank < count:
        raise BackendError(f"global_rank={global_rank}: there are {count} processes, counted from 0.")
    if size % count:
        raise BackendError(f"{count} processes cannot share a batch of {size} evenly. Make it a multiple of {count}.")
    return size // count


def _processes() -> Any:
    from .runtime.backend import current_backend
    from .runtime.mesh.processes import processes

    return processes(current_backend(raise_exception=False))


def global_batch(batch: Any) -> Any:
    """One batch for all processes, made of what each has read.

    A traced step computes on the batch of all devices. Where several processes train together, each may read its own
    rows: this puts them one behind the other, in the order of the mesh, without sending them anywhere. All processes
    have to call it, with as many rows each.

    Args:
        batch: tensors of this process, in lists, tuples, dicts and dataclasses; their first dimension is rows.

    Returns:
        `batch` with tensors of the backend, which have the rows of all processes.

    Raises:
        BackendError: if the current backend has no mesh.
    """
    from .runtime.backend import current_backend

    backend = current_backend()
    if backend.mesh is None:
        raise BackendError("a global batch is one for a mesh. Make the backend with mesh= or cluster_config=.")
    from .runtime.device.tensors import resident
    from .runtime.mesh.sharded_arrays import put_shards
    from .runtime.pytrees import flatten

    mesh = backend.mesh
    leaves, spec = flatten(batch)
    put = [resident(put_shards(leaf, mesh)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(put, spec)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a weight, parts of which are in other processes. All processes have to call it.

    Any other tensor is copied.

    Args:
        tensor: a weight of the backend, of any sharding; any other tensor is copied.

    Returns:
        A new tensor in host memory, whole.
    """
    from .capture.tensor import on_backend

    if not on_backend(tensor):
        return tensor.detach().clone()

    return tensor._ref().view(tensor._storage.resident.gathered()).clone()
