"""The optimizers of `cerebras.pytorch.optim`, with its names, arguments, defaults and formulas.

`firstloss.optim` has PyTorch's under the same names. docs/reference/cstorch.md lists the differences, and
docs/moving.md says which to use.
"""

from ...optim.adam_base import AdamBase
from ...optim.optimizer import Optimizer
from . import lr_scheduler, scheduler, weight_decay_scheduler
from .adafactor import Adafactor
from .adam import Adam, AdamW
from .muon import Muon
from .own_formulas import SGD, Lamb, NAdam
from .pytorch_formulas import ASGD, Adadelta, Adagrad, Adamax, Lion, RAdam, RMSprop, Rprop

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
