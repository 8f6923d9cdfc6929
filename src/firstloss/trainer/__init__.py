"""The Trainer, which runs training and validation from callables that make the model, optimizer and schedulers.

    from firstloss.trainer import Trainer, TrainingLoop

Start reading at `trainer.py`, which has the whole run; every other file is one idea that it uses.
"""

from . import callbacks, loggers
from .callback import Callback
from .checkpoint import Checkpoint
from .early_stop import EarlyStop
from .logging import Logging
from .loops import TrainingLoop, ValidationLoop
from .precision import MixedPrecision, Precision
from .trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStop",
    "Logging",
    "MixedPrecision",
    "Precision",
    "Trainer",
    "TrainingLoop",
    "ValidationLoop",
    "callbacks",
    "loggers",
]
