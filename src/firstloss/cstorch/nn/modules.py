"""PyTorch's losses under the names of `cerebras.pytorch.nn.modules`, and two losses for segmentation."""

from __future__ import annotations

import torch
from torch.nn import (
    BCELoss,
    BCEWithLogitsLoss,
    CosineEmbeddingLoss,
    CrossEntropyLoss,
    CTCLoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MarginRankingLoss,
    MSELoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
    TripletMarginLoss,
    TripletMarginWithDistanceLoss,
)

from .functional import one_hot


class DiceLoss:
    """Dice coefficients of a segmentation of volumes (Milletari and others, 2016, equation 2, with sums in place of
    squares): `2 sum(t p) / (sum(t) + sum(p) + 1e-6)`.

    Args:
        num_classes: how many.
        to_onehot_y: whether targets are indices of classes.
        to_onehot_x: whether predictions are.
        use_softmax: whether predictions are logits.
        use_argmax: whether to take the most probable class instead; without `use_softmax` only.
        include_background: whether class 0 counts.
    """

    def __init__(
        self,
        num_classes: int,
        to_onehot_y: bool = True,
        to_onehot_x: bool = False,
        use_softmax: bool = True,
        use_argmax: bool = False,
        include_background: bool = False,
    ) -> None:
        self.num_classes = num_classes
        self.to_onehot_y = to_onehot_y
        self.to_onehot_x = to_onehot_x
        self.use_softmax = use_softmax
        self.use_argmax = use_argmax
        self.include_background = include_background

    def __call__(self, prediction: torch.Tensor, target: torch.Tensor, input_shape: object = None) -> torch.Tensor:
        """The coefficient of each class: shape (N, C).

        Args:
            prediction: shape (N, C, D, H, W).
            target: shape (N, D, H, W).
            input_shape: ignored; it is that of the prediction.
        """
        if self.use_softmax:
            prediction = torch.softmax(prediction, dim=1)
        elif self.use_argmax:
            prediction = torch.argmax(prediction, dim=1)
        if self.to_onehot_y:
            target = self._one_hot(target)
        if self.to_onehot_x:
            prediction = self._one_hot(prediction)
        if target.shape != prediction.shape:
            raise ValueError(f"targets {list(target.shape)} and predictions {list(prediction.shape)} differ in shape")
        if not self.include_background:
            if prediction.shape[1] < 2:
                raise ValueError("without the background there must be more than one class")
            classes = (torch.arange(prediction.shape[1], device=prediction.device) > 0).to(prediction.dtype)
            classes = classes.reshape(1, -1, *[1] * (prediction.ndim - 2))
            prediction, target = prediction * classes, target * classes
        inner = list(range(2, prediction.ndim))
        both, total = (target * prediction).sum(inner), target.sum(inner) + prediction.sum(inner)
        return 2 * both / (total + 1e-6)

    def _one_hot(self, classes: torch.Tensor) -> torch.Tensor:
        return one_hot(classes.long(), self.num_classes).float().movedim(-1, 1)


class DiceCELoss(torch.nn.Module):
    """`wc` times the cross entropy plus `wd` times 1 minus the mean Dice coefficient.

    Args:
        num_classes, include_background: as of `DiceLoss`.
        wc, wd: the weights.
    """

    def __init__(self, num_classes: int, include_background: bool, wc: float = 0.5, wd: float = 0.5) -> None:
        super().__init__()
        self.cross_entropy: CrossEntropyLoss = CrossEntropyLoss()
        self.dice: DiceLoss = DiceLoss(num_classes, include_background=include_background)
        self.wc: float = wc
        self.wd: float = wd

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor, input_shape: object = None) -> torch.Tensor:
        """A scalar; `outputs` are logits of shape (N, C, D, H, W), `labels` classes of shape (N, D, H, W)."""
        coefficients = self.dice(outputs, labels)
        if not self.dice.include_background:
            coefficients = coefficients[:, 1:]
        return self.wc * self.cross_entropy(outputs, labels.long()) + self.wd * (1 - coefficients.mean())


__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "DiceCELoss",
    "DiceLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MarginRankingLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
]
