"""Data loading: the resumable `DataLoader`, and `DataExecutor`, the loop over its batches."""

from .executor import DataExecutor, current_executor
from .loader import DataLoader, RestartableDataLoader
from .steps import compute_num_steps, infer_batch_size
from .synthetic import SyntheticDataset

__all__ = [
    "DataExecutor",
    "DataLoader",
    "RestartableDataLoader",
    "SyntheticDataset",
    "compute_num_steps",
    "current_executor",
    "infer_batch_size",
]
