"""A module whose weights are initialized in as many ways as possible, for tests of the engines."""

import math

import numpy as np
import torch
from torch import nn

from firstloss.compat.cpu_fills import rounds_single


class Odd(nn.Module):
    """Fills and edits, ragged ends, rejection, views, ties, constants, and operations that only the CPU supports."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.embedding = nn.Embedding(200, 32, padding_idx=3)
        self.head = nn.Linear(32, 200, bias=False)
        self.head.weight = self.embedding.weight
        self.ragged = nn.Parameter(torch.randn(100, 51) * 0.02 + 1)
        self.uneven = nn.Parameter(torch.empty(125, 64).uniform_(-0.3, 0.7))
        self.inside = nn.Parameter(nn.init.trunc_normal_(torch.empty(88, 56), std=1.0, a=-1.0, b=1.0))
        # its stream position depends on the one before
        self.after = nn.Parameter(torch.empty(8, 16, 40).normal_(std=0.5))
        self.turned = nn.Parameter(torch.rand(80, 64).t())
        if not self.on_devices or rounds_single("normal", torch.bfloat16):
            self.narrow = nn.Parameter(torch.empty(64, 88, dtype=torch.bfloat16).normal_(std=0.02))
        self.convolution = nn.Conv2d(8, 16, 3)
        self.norm = nn.LayerNorm(32)
        self.mostly_zero = nn.Parameter(torch.zeros(96, 48).bernoulli_(0.3))
        self.register_buffer("whole_numbers", torch.randint(-5, 1 << 40, (96, 48)))
        self.register_buffer("mask", torch.tril(torch.ones(72, 72)))
        self.register_buffer("angles", 10000.0 ** -(torch.arange(0, 64, 2) / 64))
        self.few = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(math.pi))
        if not self.on_devices:
            self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(72, 72)))
            self.order = nn.Parameter(torch.randperm(5000).float())  # no device implementation

    on_devices = False


class OddOnDevices(Odd):
    """The weights of `Odd` that a device computes bit-identically too."""

    on_devices = True


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)


class Layers(nn.Module):
    """Identical layers between an embedding and a head that share a weight."""

    def __init__(self, count=2, width=32):
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))
        self.head = nn.Linear(width, 96, bias=False)
        self.head.weight = self.embedding.weight


TABLE = np.sin(np.arange(6000, dtype=np.float32)).reshape(100, 60)


class Mixed(nn.Module):
    """In-place edits, buffers, and NumPy arrays, some of which remain real tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 48)
        with torch.no_grad():
            self.linear.weight[:, 3].zero_()
            self.linear.weight[5:9].mul_(0.5).add_(1.0)
            self.linear.bias.fill_(0.25)
            self.linear.bias[::2].normal_()
        self.register_buffer("table", torch.from_numpy(TABLE))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tril(torch.ones(40, 40, dtype=torch.bool)))
        self.position = nn.Parameter(torch.from_numpy(TABLE) * 2 + torch.rand(100, 60))
        self.rows = nn.Parameter(torch.as_tensor(TABLE[:5]))
        self.norm = nn.BatchNorm1d(33)
        sparse = nn.init.uniform_(torch.empty(90, 70), -1, 1)
        sparse[sparse.abs() < 0.1] = 0
        self.sparse = nn.Parameter(sparse)
        self.edited = nn.Parameter(torch.randn(80, 90))
        self.edited.data[10:20, :].uniform_(-0.1, 0.1)
        self.edited.data.copy_(self.edited.data * torch.from_numpy(np.linspace(0, 1, 90, dtype=np.float32)))
        self.tied = self.edited
