"""Metrics accumulated on the device, in the buffers of a module.

In a traced step `metric(labels=..., predictions=...)` adds to the state; `metric.compute()` and `float(metric)` read it
at any time, and `metric.reset()` starts over. Names and arguments are those of `cerebras.pytorch.metrics`.
`torchmetrics` works in traced steps as well, as long as its updates read no values (`validate_args=False`).
"""

from .averages import AccuracyMetric, MeanMetric, MeanPerClassAccuracyMetric, PerplexityMetric
from .confusion import DiceCoefficientMetric, FBetaScoreMetric, MeanIOUMetric
from .metric import Metric, compute_all_metrics, get_all_metrics

__all__ = [
    "AccuracyMetric",
    "DiceCoefficientMetric",
    "FBetaScoreMetric",
    "MeanIOUMetric",
    "MeanMetric",
    "MeanPerClassAccuracyMetric",
    "Metric",
    "PerplexityMetric",
    "compute_all_metrics",
    "get_all_metrics",
]
