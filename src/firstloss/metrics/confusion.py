"""Metrics computed from a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import MetricError
from .metric import Metric

Tensor = torch.Tensor


def confusion_matrix(labels: Tensor, predictions: Tensor, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Entry [i, j] is how often class j was predicted for class i, weighted; float32.

    Args:
        labels, predictions: classes from 0 to `num_classes` - 1, of the same shape; ignored where the weight is 0.

    Raises:
        MetricError: if the shapes differ.
        StepAssertionError: for other numbers in a traced step; elsewhere RuntimeError.
    """
    given = {"predictions": predictions, **({} if weights is None else {"weights": weights})}
    for name, tensor in given.items():
        if tensor.shape != labels.shape:
            raise MetricError(f"labels have the shape {list(labels.shape)}, but {name} {list(tensor.shape)}.")
    labels, predictions = labels.flatten().long(), predictions.flatten().long()
    counts = torch.ones_like(labels, dtype=torch.float32) if weights is None else weights.flatten().float()
    is_class = (labels >= 0) & (labels < num_classes) & (predictions >= 0) & (predictions < num_classes)
    torch._assert_async(
        (is_class | (counts == 0)).all(), f"a label or a prediction is not one of the classes 0 to {num_classes - 1}"
    )
    index = torch.where(is_class, labels * num_classes + predictions, 0)
    out = torch.zeros(num_classes * num_classes, dtype=torch.float32, device=labels.device)
    return out.scatter_add(0, index, torch.where(is_class, counts, 0.0)).reshape(num_classes, num_classes)


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, or 0 where `whole` is 0."""
    return torch.where(whole == 0, 0.0, part / torch.where(whole == 0, 1.0, whole))


class _ConfusionMetric(Metric):
    """Accumulates a confusion matrix."""

    confusion_matrix: Tensor

    def __init__(self, num_classes: int, ignored: Sequence[int] | None, name: str | None) -> None:
        if not isinstance(num_classes, int) or num_classes < 2:
            raise MetricError(f"num_classes={num_classes!r} is not an integer of at least 2.")
        wrong = [label for label in ignored or () if not 0 <= label < num_classes]
        if wrong:
            raise MetricError(f"the class {wrong[0]} to be ignored is not one of the classes 0 to {num_classes - 1}.")
        self.num_classes = num_classes
        self._counted = [0.0 if label in (ignored or ()) else 1.0 for label in range(num_classes)]
        super().__init__(name)

    def reset(self) -> None:
        self.register_state("confusion_matrix", torch.zeros((self.num_classes, self.num_classes)))

    def _mask(self) -> Tensor:
        return torch.tensor(self._counted, device=self.confusion_matrix.device)

    def _add(self, labels: Tensor, predictions: Tensor, weights: Tensor | None, dtype: torch.dtype | None) -> None:
        self.confusion_matrix.add_(confusion_matrix(labels, predictions, self.num_classes, weights))
        self._dtype = dtype

    def _mean_of_present(self, part: Tensor, whole: Tensor) -> Tensor:
        """The mean ratio over the classes that occur in labels or predictions; 0 if there are none."""
        mask = self._mask()
        return ratio(ratio(part * mask, whole * mask).sum(), (whole * mask != 0).float().sum())


class FBetaScoreMetric(_ConfusionMetric):
    """(1 + beta^2) precision recall / (beta^2 precision + recall); with beta = 1, the F1 score.

    Args:
        num_classes: the number of classes, at least 2.
        beta: the weight of recall relative to precision; positive.
        average_type: "micro": of all predictions together; "macro": the mean over the classes.
        ignore_labels: classes that are not counted.
        name: the name for reports; by default the class's.

    Raises:
        MetricError: for invalid arguments.
    """

    def __init__(
        self,
        num_classes: int,
        beta: float = 1.0,
        average_type: str = "micro",
        ignore_labels: Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        if not beta > 0:
            raise MetricError(f"beta={beta!r} is not a positive number.")
        if average_type not in ("micro", "macro"):
            raise MetricError(f"average_type={average_type!r}: write 'micro' or 'macro'.")
        self.beta = beta
        self.average_type = average_type
        super().__init__(num_classes, ignore_labels, name)

    def update(self, labels: Tensor, predictions: Tensor, dtype: torch.dtype | None = None) -> None:
        """Add predictions.

        Args:
            labels, predictions: classes, of the same shape.
            dtype: of the result.
        """
        self._add(labels, predictions, None, dtype)

    def compute(self) -> Tensor:
        matrix, mask = self.confusion_matrix, self._mask()
        right, predicted, actual = (x * mask for x in (matrix.diagonal(), matrix.sum(0), matrix.sum(1)))
        if self.average_type == "micro":
            right, predicted, actual = right.sum(), predicted.sum(), actual.sum()
        precision, recall, square = ratio(right, predicted), ratio(right, actual), self.beta**2
        score = ratio((1 + square) * precision * recall, square * precision + recall)
        return self._in_dtype(score if self.average_type == "micro" else score.sum() / mask.sum())


class _MeanOverClasses(_ConfusionMetric):
    def __init__(self, num_classes: int, ignore_classes: Sequence[int] | None = None, name: str | None = None) -> None:
        super().__init__(num_classes, ignore_classes, name)

    def update(
        self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Add predictions.

        Args:
            labels, predictions: classes, of the same shape.
            weights: of that shape; by default 1 each. Predictions with weight 0 are not counted.
            dtype: of the result.
        """
        self._add(labels, predictions, weights, dtype)


class MeanIOUMetric(_MeanOverClasses):
    """The mean over the classes of intersection over union. Classes that occur neither in labels nor in predictions do
    not count.

    Args:
        num_classes: the number of classes, at least 2.
        ignore_classes: classes that are not counted.
        name: the name for reports; by default the class's.

    Raises:
        MetricError: for invalid arguments.
    """

    def compute(self) -> Tensor:
        matrix = self.confusion_matrix
        right = matrix.diagonal()
        return self._in_dtype(self._mean_of_present(right, matrix.sum(0) + matrix.sum(1) - right))


class DiceCoefficientMetric(_MeanOverClasses):
    """The mean over the classes of the Dice coefficient. Classes that occur neither in labels nor in predictions do not
    count.

    Args:
        num_classes: the number of classes, at least 2.
        ignore_classes: classes that are not counted.
        name: the name for reports; by default the class's.

    Raises:
        MetricError: for invalid arguments.
    """

    def compute(self) -> Tensor:
        matrix = self.confusion_matrix
        return self._in_dtype(self._mean_of_present(2 * matrix.diagonal(), matrix.sum(0) + matrix.sum(1)))
