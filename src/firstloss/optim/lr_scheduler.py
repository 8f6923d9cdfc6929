"""Learning rate schedules as functions of a step tensor.

Names and arguments are those of Cerebras' `cstorch.optim.lr_scheduler`; values are those of PyTorch's schedule of the
same name, if there is one. Every schedule also takes the keywords `param_group_key`, to set another number than the
learning rate, and `param_group_tags`; see `Schedule`.
"""

from .composed import ChainedLR, PiecewiseConstantLR, ScalePerParamLR, SequentialLR
from .curves import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestartsLR,
    CosineDecayLR,
    ExponentialLR,
    InverseExponentialTimeDecayLR,
    InverseSquareRootDecayLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from .cyclic import CyclicLR, OneCycleLR
from .schedule import Schedule

# PyTorch's names of the same schedules.
ChainedScheduler = ChainedLR
CosineAnnealingWarmRestarts = CosineAnnealingWarmRestartsLR
LRScheduler = Schedule

__all__ = [
    "ChainedLR",
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CosineAnnealingWarmRestartsLR",
    "CosineDecayLR",
    "CyclicLR",
    "ExponentialLR",
    "InverseExponentialTimeDecayLR",
    "InverseSquareRootDecayLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PiecewiseConstantLR",
    "PolynomialLR",
    "ScalePerParamLR",
    "Schedule",
    "SequentialLR",
    "StepLR",
]
