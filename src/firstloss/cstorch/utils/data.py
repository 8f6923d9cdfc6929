"""`firstloss.utils.data` with the arguments of `cerebras.pytorch.utils.data`."""

from __future__ import annotations

from typing import Any

from ...runtime.device.numpy_arrays import from_numpy, to_numpy
from ...utils.data import DataExecutor as _DataExecutor
from ...utils.data import (
    DataLoader,
    RestartableDataLoader,
    SyntheticDataset,
    compute_num_steps,
    current_executor,
    infer_batch_size,
)


class DataExecutor(_DataExecutor):
    """`firstloss.utils.data.DataExecutor` whose first argument is called `dataloader`. Without `num_steps` it uses the
    loader's own."""

    def __init__(
        self,
        dataloader: Any,
        num_steps: int | None = None,
        checkpoint_steps: int | None = None,
        activation_steps: int | None = None,
    ) -> None:
        super().__init__(dataloader, num_steps, checkpoint_steps, activation_steps)

    @property
    def dataloader(self) -> DataLoader:
        """The loader whose batches it yields."""
        return self.loader


__all__ = [
    "DataExecutor",
    "DataLoader",
    "RestartableDataLoader",
    "SyntheticDataset",
    "compute_num_steps",
    "current_executor",
    "from_numpy",
    "infer_batch_size",
    "to_numpy",
]
