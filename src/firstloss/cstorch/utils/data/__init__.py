"""`firstloss.utils.data` with the arguments of `cerebras.pytorch.utils.data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....errors import ExecutorError
from ....runtime.device.numpy_arrays import from_numpy, to_numpy
from ....utils.data import DataExecutor as _DataExecutor
from ....utils.data import (
    DataLoader,
    RestartableDataLoader,
    SyntheticDataset,
    compute_num_steps,
    current_executor,
    infer_batch_size,
)
from ...accepted import say
from ..tracker import Activity, Profiler
from .sampler import DistributedSampler
from .schedule import Schedule


class DataExecutor(_DataExecutor):
    """`firstloss.utils.data.DataExecutor` whose first argument is called `dataloader`. Without `num_steps` it uses the
    loader's own.

    Args:
        dataloader, num_steps, activation_steps: as there.
        checkpoint_steps: also a `Schedule` of steps, counted from 0.
        profiler_activities: the classes of activities of `profiler`.
        cs_config: earlier versions' settings of Cerebras' cluster: no effect.
        writer: likewise; summaries are written by step closures.

    Attributes:
        profiler: counts samples: `executor.profiler.rate_tracker.global_rate`.
        samples: the samples of all batches so far.
    """

    profiler: Profiler

    def __init__(
        self,
        dataloader: Any,
        num_steps: int | None = None,
        checkpoint_steps: int | Schedule | None = None,
        activation_steps: int | None = None,
        profiler_activities: list[type[Activity]] | None = None,
        *,
        cs_config: Any = None,
        writer: Any = None,
    ) -> None:
        if cs_config is not None:
            say("utils.data.DataExecutor(cs_config=)")
        if writer is not None:
            say("utils.data.DataExecutor(writer=)")
        self._schedule = checkpoint_steps if isinstance(checkpoint_steps, Schedule) else None
        every = None if isinstance(checkpoint_steps, Schedule) else checkpoint_steps
        super().__init__(dataloader, num_steps, every, activation_steps)
        self._activities = profiler_activities
        self.profiler = Profiler(activities=profiler_activities)
        self.samples: int = 0

    @property
    def dataloader(self) -> DataLoader:
        """The loader whose batches it yields."""
        return self.loader

    @property
    def is_checkpoint_step(self) -> bool:
        """Whether checkpoint closures run at this step."""
        if self._schedule is None:
            return super().is_checkpoint_step
        return self._executes() and self._schedule.match(self.iteration)

    def __iter__(self) -> Iterator[Any]:
        self.profiler, self.samples = Profiler(activities=self._activities), 0
        for batch in super().__iter__():
            count = _rows(batch)
            self.samples += count
            self.profiler.step(count)
            yield batch


def _rows(batch: Any) -> int:
    """The batch size; 0 if it has none."""
    try:
        return infer_batch_size(batch) or 0
    except ExecutorError:
        return 0


__all__ = [
    "DataExecutor",
    "DataLoader",
    "DistributedSampler",
    "RestartableDataLoader",
    "Schedule",
    "SyntheticDataset",
    "compute_num_steps",
    "current_executor",
    "from_numpy",
    "infer_batch_size",
    "to_numpy",
]
