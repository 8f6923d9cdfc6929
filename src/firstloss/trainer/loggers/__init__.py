"""Loggers: callbacks that record the metrics of a run."""

from ..callback import Callback
from .files import CSVLogger, JSONLogger
from .progress import ProgressLogger
from .services import MLflowLogger, WandbLogger
from .tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "JSONLogger",
    "MLflowLogger",
    "ProgressLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "default_loggers",
]


def default_loggers() -> list[Callback]:
    """The loggers of a Trainer that was given none: a progress display and JSON lines.

    Returns:
        New loggers.
    """
    return [ProgressLogger(), JSONLogger()]
