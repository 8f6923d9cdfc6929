"""A vision run with averaged weights, using Model Zoo's Trainer from Python:
`python -m examples.model_zoo.vision CPU`.

Scikit-learn's digits; batches are dataclasses of NumPy arrays.
"""

import dataclasses
import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import firstloss.cstorch as cstorch
from firstloss.trainer import Trainer
from firstloss.trainer.callbacks import (
    CheckLoss,
    Checkpoint,
    Logging,
    ModelEMA,
    ModelEvalMetrics,
    NaNChecker,
    Profiler,
    TrainingLoop,
)
from firstloss.trainer.loggers import JSONLogger, ProgressLogger


@dataclasses.dataclass
class Digits:
    image: np.ndarray
    label: np.ndarray


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )
        self.accuracy = cstorch.metrics.AccuracyMetric("accuracy")
        self.iou = cstorch.metrics.MeanIOUMetric(num_classes=10, name="iou")

    def forward(self, image, label):
        logits = self.blocks(image)
        if not self.training:
            self.accuracy(labels=label, predictions=logits.argmax(-1))
            self.iou(labels=label, predictions=logits.argmax(-1))
        return F.cross_entropy(logits, label)


def input_fn(first, last, shuffle):
    images, labels = load_digits(return_X_y=True)
    images = (images[first:last].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    samples = list(zip(images, labels[first:last], strict=True))
    return torch.utils.data.DataLoader(
        samples,
        batch_size=32,
        shuffle=shuffle,
        generator=torch.Generator().manual_seed(1),
        drop_last=True,
        collate_fn=lambda batch: Digits(np.stack([x for x, _ in batch]), np.array([y for _, y in batch])),
    )


train_dataloader = cstorch.utils.data.DataLoader(input_fn, 0, 1024, shuffle=True)
val_dataloader = cstorch.utils.data.DataLoader(input_fn, 1024, 1280, shuffle=False)


def trainer(device, model_dir, max_steps=12):
    return Trainer(
        device=device,
        model_dir=model_dir,
        model=ConvNet,
        optimizer=lambda model: cstorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
        schedulers=lambda optimizer: cstorch.optim.lr_scheduler.CosineDecayLR(optimizer, 0.05, 0.005, 12),
        loop=TrainingLoop(max_steps=max_steps, eval_frequency=0.5),
        checkpoint=Checkpoint(steps=4),
        logging=Logging(log_steps=1),
        callbacks=[CheckLoss(), NaNChecker(), ModelEMA(decay=0.9), ModelEvalMetrics(), Profiler(2, 4)],
        loggers=[ProgressLogger(), JSONLogger()],
        seed=1,
    )


if __name__ == "__main__":
    made = trainer(sys.argv[1] if len(sys.argv) > 1 else "CSX", "runs/vision")
    made.fit(train_dataloader, val_dataloader)
    print(made.validate_all([val_dataloader], "runs/vision/checkpoints/step_*"))
