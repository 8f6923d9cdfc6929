"""Schedules for any number of an optimizer's groups, as in `cerebras.pytorch.optim.scheduler`.

Each is the schedule of `lr_scheduler` with the same formula, with arguments renamed; the number that it sets is given
by a subclass or an argument:

    class Momentum(LinearScheduler):
        param_group_key = ("betas", 0)

    LinearScheduler(optimizer, 0.9, 0.95, 1000, param_group_key=("betas", 0))
"""

from __future__ import annotations

import inspect
from typing import Any

from . import lr_scheduler as of_rates
from .schedule import Schedule as Scheduler

_VALUES = {
    "learning_rate": "val",
    "initial_learning_rate": "initial_val",
    "end_learning_rate": "end_val",
    "learning_rates": "vals",
    "base_lr": "base_val",
    "max_lr": "max_val",
    "lr_lambda": "val_lambda",
}


def renamed(name: str, schedule: type[Scheduler], key: str, module: str) -> Any:
    """A subclass of `schedule` that sets `key`, with arguments named after values rather than learning rates."""
    signature = inspect.signature(schedule.__init__)
    original_names = {_VALUES.get(word, word): word for word in signature.parameters}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Check names against this class's; Schedule checks its own keywords itself.
        wrong = [word for word in kwargs if word in _VALUES]
        if wrong:
            raise TypeError(f"{name}() got an unexpected keyword argument {wrong[0]!r}")
        schedule.__init__(self, *args, **{original_names.get(word, word): value for word, value in kwargs.items()})

    parameters = [p.replace(name=_VALUES.get(p.name, p.name)) for p in signature.parameters.values()]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    doc = f"`lr_scheduler.{schedule.__name__}` for {key or 'any number'}."
    return type(name, (schedule,), {"__init__": __init__, "param_group_key": key, "__doc__": doc, "__module__": module})


def _any(schedule: type[Scheduler]) -> Any:
    return renamed(schedule.__name__.removesuffix("LR") + "Scheduler", schedule, "", __name__)


ChainedScheduler: Any = _any(of_rates.ChainedLR)
ConstantScheduler: Any = _any(of_rates.ConstantLR)
CosineAnnealingScheduler: Any = _any(of_rates.CosineAnnealingLR)
CosineAnnealingWarmRestartsScheduler: Any = _any(of_rates.CosineAnnealingWarmRestartsLR)
CosineDecayScheduler: Any = _any(of_rates.CosineDecayLR)
CyclicScheduler: Any = _any(of_rates.CyclicLR)
ExponentialScheduler: Any = _any(of_rates.ExponentialLR)
InverseExponentialTimeDecayScheduler: Any = _any(of_rates.InverseExponentialTimeDecayLR)
InverseSquareRootDecayScheduler: Any = _any(of_rates.InverseSquareRootDecayLR)
LambdaScheduler: Any = _any(of_rates.LambdaLR)
LinearScheduler: Any = _any(of_rates.LinearLR)
MultiStepScheduler: Any = _any(of_rates.MultiStepLR)
MultiplicativeScheduler: Any = _any(of_rates.MultiplicativeLR)
OneCycleScheduler: Any = _any(of_rates.OneCycleLR)
PiecewiseConstantScheduler: Any = _any(of_rates.PiecewiseConstantLR)
PolynomialScheduler: Any = _any(of_rates.PolynomialLR)
ScalePerParamScheduler: Any = _any(of_rates.ScalePerParamLR)
SequentialScheduler: Any = _any(of_rates.SequentialLR)
StepScheduler: Any = _any(of_rates.StepLR)

__all__ = [
    "ChainedScheduler",
    "ConstantScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineDecayScheduler",
    "CyclicScheduler",
    "ExponentialScheduler",
    "InverseExponentialTimeDecayScheduler",
    "InverseSquareRootDecayScheduler",
    "LambdaScheduler",
    "LinearScheduler",
    "MultiStepScheduler",
    "MultiplicativeScheduler",
    "OneCycleScheduler",
    "PiecewiseConstantScheduler",
    "PolynomialScheduler",
    "ScalePerParamScheduler",
    "Scheduler",
    "SequentialScheduler",
    "StepScheduler",
]
