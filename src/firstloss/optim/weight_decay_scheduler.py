"""Schedules for "weight_decay", named as in `cerebras.pytorch.optim.weight_decay_scheduler`."""

from __future__ import annotations

from typing import Any

from . import lr_scheduler as of_rates
from .schedule import Schedule
from .scheduler import renamed


class WeightDecayScheduler(Schedule):
    """Base class of schedules for "weight_decay". A subclass defines `value`."""

    param_group_key: str | tuple[str, int] = "weight_decay"


def _decay(schedule: type[Schedule]) -> Any:
    return renamed(schedule.__name__.removesuffix("LR") + "WD", schedule, "weight_decay", __name__)


ChainedWD: Any = _decay(of_rates.ChainedLR)
ConstantWD: Any = _decay(of_rates.ConstantLR)
CosineAnnealingWD: Any = _decay(of_rates.CosineAnnealingLR)
CosineAnnealingWarmRestartsWD: Any = _decay(of_rates.CosineAnnealingWarmRestartsLR)
CosineDecayWD: Any = _decay(of_rates.CosineDecayLR)
CyclicWD: Any = _decay(of_rates.CyclicLR)
ExponentialWD: Any = _decay(of_rates.ExponentialLR)
InverseExponentialTimeDecayWD: Any = _decay(of_rates.InverseExponentialTimeDecayLR)
InverseSquareRootDecayWD: Any = _decay(of_rates.InverseSquareRootDecayLR)
LambdaWD: Any = _decay(of_rates.LambdaLR)
LinearWD: Any = _decay(of_rates.LinearLR)
MultiStepWD: Any = _decay(of_rates.MultiStepLR)
MultiplicativeWD: Any = _decay(of_rates.MultiplicativeLR)
OneCycleWD: Any = _decay(of_rates.OneCycleLR)
PiecewiseConstantWD: Any = _decay(of_rates.PiecewiseConstantLR)
PolynomialWD: Any = _decay(of_rates.PolynomialLR)
ScalePerParamWD: Any = _decay(of_rates.ScalePerParamLR)
SequentialWD: Any = _decay(of_rates.SequentialLR)
StepWD: Any = _decay(of_rates.StepLR)

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
