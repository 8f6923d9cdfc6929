"""`firstloss.distributed`: the processes of a run."""

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
    """Join the processes of the run, before a backend is created. Like `jax.distributed.initialize`, with defaults from
    the environment that torchrun, SLURM or an indexed Kubernetes Job sets up.

    Examples:
        >>> fl.distributed.initialize()  # without a launcher
        1

    Args:
        coordinator: "host:port", where process 0 listens.
        count: the number of processes.
        index: the index of this process.
        timeout: seconds to wait for all processes; this process then ends with a message if some have not joined.
        heartbeat: seconds without a sign of life from a process after which the others end.

    Returns:
        The number of processes; 1, without any effect, if there is no launcher.

    Raises:
        BackendError: if the launcher's variables are incomplete, or processes run different versions of Firstloss, JAX,
            PyTorch or Python.
    """
    from .runtime.mesh.launchers import LaunchedProcess, launch_of

    given = (coordinator, count, index)
    if coordinator is not None and count is not None and index is not None:
        launch: LaunchedProcess | None = LaunchedProcess("fl.distributed.initialize", coordinator, count, index)
    elif any(part is not None for part in given):
        raise BackendError(
            "fl.distributed.initialize takes the coordinator, the count and the index together, or none of them."
        )
    else:
        launch = launch_of(os.environ)
    if launch is None or launch.processes == 1:
        return 1
    from . import __version__
    from .runtime.mesh.initialize import join

    join(launch, __version__, timeout, heartbeat)
    return launch.processes


# -- Cerebras' names. There, workers only stream data; here each process reads data and trains. --


def get_ordinal() -> int:
    """The index of this process.

    Returns:
        An int from 0; 0 if there is one process.
    """
    return _processes().index


def num_tasks() -> int:
    """The number of processes that train together.

    Returns:
        At least 1.
    """
    return _processes().count


def is_master_ordinal(local: bool = False) -> bool:
    """Whether this is process 0, which writes logs.

    Args:
        local: whether to ask for the first process on this machine (`LOCAL_RANK`) instead.

    Returns:
        True for one process of the run, or with `local` for one on each machine.
    """
    return int(os.environ.get("LOCAL_RANK", 0)) == 0 if local else get_ordinal() == 0


def is_streamer() -> bool:
    """Whether this process reads data: every process does.

    Returns:
        True.
    """
    return True


def num_streamers() -> int:
    """The number of processes that read data: all of them.

    Returns:
        `num_tasks()`.
    """
    return num_tasks()


def get_streaming_rank() -> int:
    """The index of this process among those that read data.

    Returns:
        `get_ordinal()`.
    """
    return get_ordinal()


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """The number of rows that each process reads of a global batch.

    A single process reads all rows, for all devices; several processes divide them, and combine theirs with
    `global_batch`.

    Args:
        effective_batch_size: the number of rows of the global batch.
        global_rank: the index of a process; by default this one.

    Returns:
        `effective_batch_size` divided by the number of processes.

    Raises:
        BackendError: if it is not a positive integer, or not divisible by the number of processes.
    """
    size, count = effective_batch_size, num_tasks()
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BackendError(f"effective_batch_size={size!r} is not a positive integer.")
    if global_rank is not None and not 0 <= global_rank < count:
        raise BackendError(f"global_rank={global_rank} is out of range: there are {count} processes, counted from 0.")
    if size % count:
        raise BackendError(f"{count} processes cannot split a batch of {size} evenly. Make it a multiple of {count}.")
    return size // count


def _processes() -> Any:
    from .runtime.backend import current_backend
    from .runtime.mesh.processes import processes

    return processes(current_backend(raise_exception=False))


def global_batch(batch: Any) -> Any:
    """Combine what each process has read into one global batch.

    A traced step computes on the batch of all devices. Each process may read its own rows: this concatenates them in
    the order of the mesh, without communication. All processes must call it, with the same number of rows.

    Args:
        batch: tensors of this process, in lists, tuples, dicts and dataclasses; their first dimension is rows.

    Returns:
        `batch` with tensors of the backend that have the rows of all processes.

    Raises:
        BackendError: if the current backend has no mesh.
    """
    from .runtime.backend import current_backend

    backend = current_backend()
    if backend.mesh is None:
        raise BackendError("a global batch needs a mesh. Create the backend with mesh= or cluster_config=.")
    from .runtime.device.buffer import resident
    from .runtime.mesh.sharded_arrays import put_shards
    from .runtime.pytrees import flatten

    mesh = backend.mesh
    leaves, spec = flatten(batch)
    put = [resident(put_shards(leaf, mesh)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(put, spec)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the values of a weight that is sharded over processes. All processes must call it.

    Args:
        tensor: a weight on the backend, with any sharding; any other tensor is copied.

    Returns:
        A new tensor in host memory.
    """
    from .capture.tensor import on_backend

    if not on_backend(tensor):
        return tensor.detach().clone()

    return tensor._ref().view(tensor._storage.resident.gathered()).clone()
