"""The processes of a run, under the names of `cerebras.pytorch.distributed`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..distributed import (
    ClusterConfig,
    gather,
    get_ordinal,
    get_streaming_batch_size,
    get_streaming_rank,
    global_batch,
    initialize,
    is_master_ordinal,
    is_streamer,
    num_streamers,
    num_tasks,
)
from ..errors import LoaderError
from ..program.source import here
from ..utils.data import current_executor
from .utils.tools import get_dir_size


@dataclass
class DataLoaderCheckpoint:
    """The position of a loader in the loop that reads it.

    Attributes:
        local_worker_id, num_workers_per_csx, num_csx, wse_id: of this process: 0, 1, the number of processes, and its
            rank.
        appliance_step: the steps of the loop so far.
        worker_step: the same.
        samples_streamed: the samples of these steps in this process.
        user_state_dict: for the loader's own state.
    """

    local_worker_id: int
    num_workers_per_csx: int
    num_csx: int
    wse_id: int
    appliance_step: int
    worker_step: int
    samples_streamed: int
    user_state_dict: dict[str, Any] = field(default_factory=dict)

    @property
    def global_worker_id(self) -> int:
        """The rank of this process."""
        return self.wse_id * self.num_workers_per_csx + self.local_worker_id

    @property
    def total_num_workers(self) -> int:
        """The number of processes."""
        return self.num_workers_per_csx * self.num_csx


def get_worker_state() -> DataLoaderCheckpoint:
    """Where the loop that reads the loader is, for a loader's `state_dict`.

    Raises:
        LoaderError: outside of a loop over a DataExecutor.
    """
    executor = current_executor()
    if executor is None:
        raise LoaderError(f"{here()}: get_worker_state() needs a running loop over a DataExecutor, to say where it is.")
    step, samples = executor.step, getattr(executor, "samples", None)
    return DataLoaderCheckpoint(0, 1, num_streamers(), get_streaming_rank(), step, step, samples or 0)


def num_receivers() -> int:
    """Processes that only receive results: 0."""
    return 0


def is_receiver() -> bool:
    """Whether this process only receives results: False."""
    return False


__all__ = [
    "ClusterConfig",
    "DataLoaderCheckpoint",
    "gather",
    "get_dir_size",
    "get_ordinal",
    "get_streaming_batch_size",
    "get_streaming_rank",
    "get_worker_state",
    "global_batch",
    "initialize",
    "is_master_ordinal",
    "is_receiver",
    "is_streamer",
    "num_receivers",
    "num_streamers",
    "num_tasks",
]
