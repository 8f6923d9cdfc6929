"""A small model, data and trainers."""

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from firstloss.trainer import Trainer, TrainingLoop


class Net(nn.Module):
    """With dropout and batch norm, so that runs differ if the random state or a buffer is not restored."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 4)
        )

    def forward(self, x, y):
        logits = self.layers(x)
        accuracy = (logits.argmax(-1) == y).float().mean()
        return {"loss": F.cross_entropy(logits, y), "accuracy": accuracy, "logits": logits}


def dataset(count=48):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(-1))


def loader(count=48, batch_size=8, shuffle=True, **options):
    return DataLoader(dataset(count), batch_size, shuffle=shuffle, **options)


class Noisy(TensorDataset):
    """Draws in the worker that reads a sample."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(8), y


def with_workers():
    """Shuffled in this process, with noise from two workers."""
    return DataLoader(Noisy(*dataset().tensors), 8, shuffle=True, num_workers=2)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def decayed(model, rate: float = 0.25, weight_decay: float = 0.1):
    """Weight decay only for matrices, a common pattern."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    options = ({"weight_decay": weight_decay}, {"weight_decay": 0.0})
    return torch.optim.AdamW([{"params": g, **o} for g, o in zip(groups, options, strict=True)], lr=rate)


def decay_by(optimizer, factor: float):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, factor)


def decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def trainer(folder, backend="CPU", **changes):
    """A Trainer of callables; `changes` are passed to its constructor, or to its loop if TrainingLoop has them."""
    loop = {name: changes.pop(name) for name in list(changes) if name in TrainingLoop.__dataclass_fields__}
    options = {"model": Net, "optimizer": adamw, "schedulers": decay, "loggers": [], "seed": 0, **changes}
    options.setdefault("loop", TrainingLoop(**{"max_steps": 5, **loop}))
    return Trainer(backend=backend, model_dir=folder, **options)


def bits(trainer):
    """A fingerprint of all results of training."""
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.detach().clone().numpy().tobytes())
    for entry in trainer.optimizer.state_dict()["state"].values():
        for value in entry.values():
            digest.update(torch.as_tensor(value).clone().numpy().tobytes())
    return digest.hexdigest()
