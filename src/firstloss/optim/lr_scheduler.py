"""Learning-rate schedules, each a function of a step tensor.

The names and arguments are those of Cerebras' `cstorch.optim.lr_scheduler`; PyTorch's schedule of the same name gives
the same numbers where there is one. Every schedule takes two keywords besides its own, which `Schedule` explains:
`param_group_key`, to set another number than the learning rate, and `param_group_tags`.
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

# PyTorch's names for the same.
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
