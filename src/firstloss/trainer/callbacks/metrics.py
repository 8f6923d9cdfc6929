"""Reporting of metrics that are modules of the model."""

from __future__ import annotations

from typing import Any

from ...metrics import Metric
from ..callback import Callback


class ModelEvalMetrics(Callback):
    """Report the `firstloss.metrics` modules of the model: reset before each validation, computed after it, and named
    "val_" plus their name."""

    def on_validation_start(self, trainer: Any) -> None:
        for metric in _metrics(trainer):
            metric.reset()

    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        for metric in _metrics(trainer):
            if metric.num_updates:
                metrics[f"val_{metric.name}"] = float(metric)


def _metrics(trainer: Any) -> list[Metric]:
    return [module for module in trainer.model.modules() if isinstance(module, Metric)]
