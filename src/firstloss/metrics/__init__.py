"""Metrics that are accumulated on the device: their state is the buffers of a module.

In a traced step `metric(labels=..., predictions=...)` adds to the state; `metric.compute()` and `float(metric)` read it
whenever one likes, and `metric.reset()` starts over. The names and arguments are those of `cerebras.pytorch.metrics`.
`torchmetrics` works in a traced step as well, where its updates ask for no values (`validate_args=False`).
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
