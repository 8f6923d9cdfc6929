"""The callbacks that Firstloss provides and, as in Model Zoo, the settings of a run."""

from ..callback import Callback
from ..checkpoint import Checkpoint
from ..early_stop import EarlyStop
from ..logging import Logging
from ..loops import TrainingLoop, ValidationLoop
from ..precision import MixedPrecision, Precision
from .clipping import GradientClipping
from .ema import ModelEMA
from .keep import KeepNCheckpoints
from .metrics import ModelEvalMetrics
from .numbers import ComputeNorm, CountParams, LogOptimizerParamGroup
from .numerics import CheckLoss, NaNChecker
from .profiler import Profiler
from .states import LoadCheckpointStates

__all__ = [
    "Callback",
    "CheckLoss",
    "Checkpoint",
    "ComputeNorm",
    "CountParams",
    "EarlyStop",
    "GradientClipping",
    "KeepNCheckpoints",
    "LoadCheckpointStates",
    "LogOptimizerParamGroup",
    "Logging",
    "MixedPrecision",
    "ModelEMA",
    "ModelEvalMetrics",
    "NaNChecker",
    "Precision",
    "Profiler",
    "TrainingLoop",
    "ValidationLoop",
]
