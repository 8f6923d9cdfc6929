"""Optimizers whose state can be made before the first step, and schedules that are functions of a step tensor.

Those of `torch.optim`, but LBFGS and SparseAdam, and those of `torch.optim.lr_scheduler` work in a traced step as well.
"""

from . import lr_scheduler, scheduler, weight_decay_scheduler
from .adam_base import AdamBase
from .lamb import Lamb
from .lion import Lion
from .optimizer import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamBase",
    "AdamW",
    "Adamax",
    "Lamb",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "lr_scheduler",
    "scheduler",
    "weight_decay_scheduler",
]
