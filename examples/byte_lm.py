"""A byte-level language model, trained on the source of Python's own standard library: real data, no download.

python examples/byte_lm.py --steps 200
firstloss fit examples/byte_lm.yaml --trainer.loop.max_steps=200

Requires the extra xla; `firstloss fit` also requires cli.
"""

import argparse
import os
import sysconfig

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from firstloss.trainer import Checkpoint, Trainer, TrainingLoop


class Block(nn.Module):
    """Attention and an MLP, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteLM(nn.Module):
    """Predicts each byte from those before it; returns the loss."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 128):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text):
        x = self.bytes(text[:, :-1])
        x = x + self.places.weight[: x.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        return {"loss": loss, "bits_per_byte": loss / 0.6931471805599453}


class StandardLibrary(Dataset):
    """Pieces of `length` + 1 bytes; every tenth file is kept for validation."""

    def __init__(self, length: int, validation: bool):
        root = sysconfig.get_paths()["stdlib"]
        files = sorted(name for name in os.listdir(root) if name.endswith(".py"))
        chosen = [name for i, name in enumerate(files) if (i % 10 == 9) == validation]
        text = b"".join(open(os.path.join(root, name), "rb").read() for name in chosen)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, i):
        return self.text[i * self.length : (i + 1) * self.length + 1].long()


def batches(length: int = 128, batch_size: int = 16, validation: bool = False) -> DataLoader:
    """A loader of whole batches, shuffled for training."""
    data = StandardLibrary(length, validation)
    return DataLoader(data, batch_size, shuffle=not validation, drop_last=True)


def schedule(optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A short warm-up, then constant."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="XLA")
    parser.add_argument("--out", default="runs/byte_lm")
    args = parser.parse_args()
    trainer = Trainer(
        device=args.device,
        model_dir=args.out,
        model=ByteLM,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        schedulers=schedule,
        loop=TrainingLoop(max_steps=args.steps, clip_grad_norm=1.0),
        checkpoint=Checkpoint(steps=100),
        seed=0,
    )
    trainer.fit(batches(), batches(validation=True))


if __name__ == "__main__":
    main()
