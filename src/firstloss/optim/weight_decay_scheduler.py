"""Schedules for "weight_decay", named as in `cerebras.pytorch.optim.weight_decay_scheduler`."""

from __future__ import annotations

from typing import Any

from . import lr_scheduler as of_rates
from .schedule import Schedule
from .scheduler import renamed


class WeightDecayScheduler(Schedule):
    """Base class of schedules for "weight_decay". A subclass defines `value`."""

    param_group_key = "weight_decay"


def _decay(schedule: type[Schedule]) -> Any:
    return renamed(schedule.__name__.removesuffix("LR") + "WD", schedule, "weight_decay", __name__)


ChainedWD = _decay(of_rates.ChainedLR)
ConstantWD = _decay(of_rates.ConstantLR)
CosineAnnealingWD = _decay(of_rates.CosineAnnealingLR)
CosineAnnealingWarmRestartsWD = _decay(of_rates.CosineAnnealingWarmRestartsLR)
CosineDecayWD = _decay(of_rates.CosineDecayLR)
CyclicWD = _decay(of_rates.CyclicLR)
ExponentialWD = _decay(of_rates.ExponentialLR)
InverseExponentialTimeDecayWD = _decay(of_rates.InverseExponentialTimeDecayLR)
InverseSquareRootDecayWD = _decay(of_rates.InverseSquareRootDecayLR)
LambdaWD = _decay(of_rates.LambdaLR)
LinearWD = _decay(of_rates.LinearLR)
MultiStepWD = _decay(of_rates.MultiStepLR)
MultiplicativeWD = _decay(of_rates.MultiplicativeLR)
OneCycleWD = _decay(of_rates.OneCycleLR)
PiecewiseConstantWD = _decay(of_rates.PiecewiseConstantLR)
PolynomialWD = _decay(of_rates.PolynomialLR)
ScalePerParamWD = _decay(of_rates.ScalePerParamLR)
SequentialWD = _decay(of_rates.SequentialLR)
StepWD = _decay(of_rates.StepLR)

__all__ = [
    "ChainedWD",
    "ConstantWD",
    "CosineAnnealingWD",
    "CosineAnnealingWarmRestartsWD",
    "CosineDecayWD",
    "CyclicWD",
    "ExponentialWD",
    "InverseExponentialTimeDecayWD",
    "InverseSquareRootDecayWD",
    "LambdaWD",
    "LinearWD",
    "MultiStepWD",
    "MultiplicativeWD",
    "OneCycleWD",
    "PiecewiseConstantWD",
    "PolynomialWD",
    "ScalePerParamWD",
    "SequentialWD",
    "StepWD",
    "WeightDecayScheduler",
]
