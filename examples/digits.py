"""A convolutional net on scikit-learn's handwritten digits (1,797 images of 8 by 8): over 97% validation accuracy.

python examples/digits.py

Requires scikit-learn and the extra xla.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from firstloss.trainer import Checkpoint, EarlyStop, Trainer, TrainingLoop


class ConvNet(nn.Module):
    """Two convolutions with batch norm, pooled; returns the loss, and how many it got right."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10))

    def forward(self, image, digit):
        logits = self.head(self.features(image))
        right = (logits.argmax(-1) == digit).float().mean()
        return {"loss": F.cross_entropy(logits, digit), "accuracy": right}


def loaders(batch_size=32):
    """Every fifth image is for validation."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 4
    train = TensorDataset(images[~held_out], labels[~held_out])
    validation = TensorDataset(images[held_out], labels[held_out])
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(validation, len(validation))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--device", default="XLA")
    parser.add_argument("--out", default="runs/digits")
    args = parser.parse_args(argv)
    train, validation = loaders()
    trainer = Trainer(
        device=args.device,
        model_dir=args.out,
        model=ConvNet,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        loop=TrainingLoop(max_epochs=args.epochs),
        checkpoint=Checkpoint(best="val_accuracy", mode="max"),
        callbacks=[EarlyStop("val_accuracy", mode="max", patience=4)],
        seed=0,
    )
    trainer.fit(train, validation)
    best = trainer.folder.best()
    found = trainer.validate(validation, ckpt_path=trainer.folder.at(best["step"]))
    print(f"validation accuracy {found['val_accuracy']:.4f}")
    return found


if __name__ == "__main__":
    main()
