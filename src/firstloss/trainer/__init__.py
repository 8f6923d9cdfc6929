"""The Trainer: given callables for model, optimizer and schedulers, everything starts as early as possible.

    from firstloss.trainer import Trainer, TrainingLoop

`trainer.py` is the whole run from top to bottom; each other file is one idea that it uses.
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
