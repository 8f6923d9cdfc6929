"""Metrics that are a sum divided by a count."""

from __future__ import annotations

import torch

from ..errors import MetricError
from .metric import Metric

Tensor = torch.Tensor


class MeanMetric(Metric):
    """The weighted mean of values.

    Args:
        name: the name for reports; by default the class's.
    """

    mean_value: Tensor
    weight: Tensor

    def __init__(self, name: str | None) -> None:
        super().__init__(name)

    def reset(self) -> None:
        self.register_state("mean_value", torch.zeros((), dtype=torch.float32))
        self.register_state("weight", torch.zeros((), dtype=torch.float32))

    def update(self, value: Tensor | float, weight: Tensor | float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Add values.

        Args:
            value: of any shape.
            weight: of a shape that broadcasts to that of `value`.
            dtype: of the result.
        """
        value = torch.as_tensor(value, dtype=torch.float32)
        weight = torch.as_tensor(weight, dtype=torch.float32).broadcast_to(value.shape)
        self.mean_value.add_((value * weight).sum())
        self.weight.add_(weight.sum())
        self._dtype = dtype

    def compute(self) -> Tensor:
        return self._in_dtype(self.mean_value / self.weight)


class AccuracyMetric(Metric):
    """The fraction of predictions that are correct.

    With weights, correct predictions count by weight, and the sum is divided by the number of positive weights.

    Examples:
        >>> from firstloss.metrics import AccuracyMetric
        >>> accuracy = AccuracyMetric("accuracy")
        >>> _ = accuracy(labels=torch.tensor([1, 0]), predictions=torch.tensor([1, 1]))
        >>> float(accuracy)
        0.5

    Args:
        name: the name for reports; by default the class's.
    """

    total_correct_predictions: Tensor
    total_num_tokens: Tensor

    def __init__(self, name: str | None) -> None:
        super().__init__(name)

    def reset(self) -> None:
        self.register_state("total_correct_predictions", torch.zeros((), dtype=torch.float32))
        self.register_state("total_num_tokens", torch.zeros((), dtype=torch.float32))

    def update(
        self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Add predictions.

        Args:
            labels: classes, of any shape.
            predictions: as many classes (not logits).
            weights: of the shape of `labels`; by default 1 each.
            dtype: of the result.

        Raises:
            MetricError: if the numbers of predictions and labels differ.
        """
        if labels.numel() != predictions.numel():
            raise MetricError(
                f"accuracy compares labels of shape {list(labels.shape)} with predictions of shape "
                f"{list(predictions.shape)}. From logits, predictions are logits.argmax(-1)."
            )
        right = (labels == predictions.reshape(labels.shape)).float()
        if weights is None:
            self.total_correct_predictions.add_(right.sum())
            self.total_num_tokens.add_(labels.numel())
        else:
            self.total_correct_predictions.add_((right * weights).sum())
            self.total_num_tokens.add_((weights > 0).float().sum())
        self._dtype = dtype

    def compute(self) -> Tensor:
        return self._in_dtype(self.total_correct_predictions / self.total_num_tokens)


class PerplexityMetric(Metric):
    """The exponential of the mean loss per token.

    Args:
        name: the name for reports; by default the class's.
    """

    total_loss: Tensor
    total_num_tokens: Tensor

    def __init__(self, name: str | None) -> None:
        super().__init__(name)

    def reset(self) -> None:
        self.register_state("total_loss", torch.zeros((), dtype=torch.float32))
        self.register_state("total_num_tokens", torch.zeros((), dtype=torch.float32))

    def update(
        self, labels: Tensor, loss: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Add a loss.

        Args:
            labels: one per token.
            loss: the sum of the tokens' losses; from a mean loss, pass loss * labels.numel().
            weights: of the shape of `labels`; tokens with weight 0 are not counted. By default all are.
            dtype: of the result.
        """
        self.total_loss.add_(loss)
        self.total_num_tokens.add_(labels.numel() if weights is None else (weights > 0).float().sum())
        self._dtype = dtype

    def compute(self) -> Tensor:
        return self._in_dtype(torch.exp(self.total_loss / self.total_num_tokens))


class MeanPerClassAccuracyMetric(Metric):
    """The mean of the classes' accuracies; a class that no label has counts as 0.

    Args:
        num_classes: the number of classes.
        name: the name for reports; by default the class's.
    """

    correct: Tensor
    total: Tensor

    def __init__(self, num_classes: int, name: str | None = None) -> None:
        self.num_classes = num_classes
        super().__init__(name)

    def reset(self) -> None:
        self.register_state("correct", torch.zeros(self.num_classes, dtype=torch.float32))
        self.register_state("total", torch.zeros(self.num_classes, dtype=torch.float32))

    def update(
        self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Add predictions; arguments as for `MeanIOUMetric`."""
        from .confusion import confusion_matrix

        matrix = confusion_matrix(labels, predictions, self.num_classes, weights)
        self.correct.add_(matrix.diagonal())
        self.total.add_(matrix.sum(1))
        self._dtype = dtype

    def compute(self) -> Tensor:
        from .confusion import ratio

        return self._in_dtype(ratio(self.correct, self.total).mean())
