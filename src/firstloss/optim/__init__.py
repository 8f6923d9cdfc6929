"""Optimizers with `preinitialize`, and learning rate schedules that are functions of a step tensor.

`torch.optim`'s optimizers, except LBFGS and SparseAdam, and `torch.optim.lr_scheduler` work in a traced step as well.
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
