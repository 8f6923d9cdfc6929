"""Data: `DataLoader`, which can be restarted where it stopped, and `DataExecutor`, the loop over its batches."""

from .executor import DataExecutor, current_executor
from .loader import DataLoader

__all__ = ["DataExecutor", "DataLoader", "current_executor"]
