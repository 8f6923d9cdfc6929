"""A training step of one operation or layer each, compiled, against eager PyTorch: what is slower than it was?

    python -m benchmarks.operation_speed [--rounds N] [--json]

Each side runs all cases in a process of its own, since threads of PyTorch's that wait for work would take a core from
the other side. A step is the operation, the square mean of its result, the backward pass and SGD. The second loss is
timed as well: until then the step is compiled, which takes long if no two parts of it are equal.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import harness

NAME = "time of a step of one operation, relative to eager PyTorch"
GOAL = "at most 1.1 in the median, none above 1.5; two steps of each within 10 s"
_STEPS = 9
_SLOW = 1.3  # cases that are listed


class Apply(nn.Module):
    """A function of the input, scaled by a weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


class First(nn.Module):
    """The first result of a layer that returns several."""

    def __init__(self, layer: nn.Module, arguments: int = 1) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(*[x] * self.arguments)[0]


class Looked(nn.Module):
    """A table, and the rows of tokens made of the input."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x * 1e4).long().remainder(30000))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 16384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), torch.arange(x.shape[0]))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(64, 64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class Loop(nn.Module):
    """A recurrent cell in a loop over time that fills a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, out = (x.new_zeros(x.shape[0], 64),) * 2, x.new_zeros(x.shape)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out[:, t] = state[0]
        return out


def _block(channels: int) -> nn.Module:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())


def _encoder(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(512, 8, 2048, dropout=dropout, batch_first=True)


def _resized(mode: str) -> nn.Module:
    return Apply(lambda x: F.interpolate(x, scale_factor=2, mode=mode))


def _at(count: int) -> torch.Tensor:
    return torch.arange(4096) * 7919 % count


SQUARE, IMAGES = (4096, 1024), (8, 64, 56, 56)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(1024, 4096), (512, 1024)),
    "MLP": (lambda: nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)), (1024, 768)),
    "Bilinear": (Twice, (512, 64)),
    "Conv1d": (lambda: nn.Conv1d(128, 256, 5, padding=2), (16, 128, 500)),
    "Conv2d": (lambda: nn.Conv2d(64, 128, 3, padding=1), IMAGES),
    "Conv2d, 7 x 7, stride 2": (lambda: nn.Conv2d(3, 64, 7, 2, 3), (8, 3, 224, 224)),
    "Conv2d, 1 x 1": (lambda: nn.Conv2d(256, 64, 1), (8, 256, 56, 56)),
    "Conv2d, depthwise": (lambda: nn.Conv2d(192, 192, 3, padding=1, groups=192), (8, 192, 32, 32)),
    "Conv2d, groups": (lambda: nn.Conv2d(128, 128, 3, padding=1, groups=32), (8, 128, 32, 32)),
    "Conv2d, dilated": (lambda: nn.Conv2d(64, 64, 3, padding=4, dilation=4), (4, 64, 64, 64)),
    "Conv2d, patches": (lambda: nn.Conv2d(3, 768, 16, 16), (8, 3, 224, 224)),
    "Conv3d": (lambda: nn.Conv3d(8, 16, 3, padding=1), (2, 8, 16, 64, 64)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(64, 32, 8, 4, 2), (8, 64, 256)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), (8, 64, 32, 32)),
    "Conv2d, BatchNorm2d, ReLU": (lambda: _block(64), IMAGES),
    "LayerNorm": (lambda: nn.LayerNorm(768), (4096, 768)),
    "RMSNorm": (lambda: nn.RMSNorm(768), (4096, 768)),
    "GroupNorm": (lambda: nn.GroupNorm(32, 256), (8, 256, 32, 32)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(64, affine=True), (8, 64, 64, 64)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(512), (4096, 512)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(64), (16, 64, 56, 56)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(16), (4, 16, 16, 32, 32)),
    "LocalResponseNorm": (lambda: Apply(nn.LocalResponseNorm(5)), IMAGES),
    "RNN": (lambda: First(nn.RNN(128, 256)), (100, 16, 128)),
    "GRU": (lambda: First(nn.GRU(128, 128, 2, batch_first=True)), (16, 100, 128)),
    "LSTM": (lambda: First(nn.LSTM(128, 256, batch_first=True)), (16, 100, 128)),
    "LSTM, both directions": (lambda: First(nn.LSTM(64, 64, bidirectional=True)), (100, 16, 64)),
    "a loop over time": (Loop, (16, 100, 64)),
    "MultiheadAttention": (lambda: First(nn.MultiheadAttention(512, 8, batch_first=True), 3), (8, 256, 512)),
    "encoder layer": (lambda: _encoder(0.0), (8, 256, 512)),
    "encoder layer, dropout": (lambda: _encoder(0.1), (8, 256, 512)),
    "Dropout": (lambda: Apply(nn.Dropout(0.1)), SQUARE),
    "Dropout2d": (lambda: Apply(nn.Dropout2d(0.1)), (32, 256, 28, 28)),
    "MaxPool2d": (lambda: Apply(nn.MaxPool2d(3, 2, 1)), (8, 64, 112, 112)),
    "AvgPool2d": (lambda: Apply(nn.AvgPool2d(2)), (8, 64, 112, 112)),
    "AdaptiveAvgPool2d": (lambda: Apply(nn.AdaptiveAvgPool2d(1)), (16, 512, 28, 28)),
    "interpolate, nearest": (lambda: _resized("nearest"), (4, 64, 56, 56)),
    "interpolate, bilinear": (lambda: _resized("bilinear"), (4, 64, 56, 56)),
    "interpolate, bicubic": (lambda: _resized("bicubic"), (4, 32, 48, 48)),
    "grid_sample": (lambda: Apply(lambda x: F.grid_sample(x, x[:, :2].movedim(1, 3).detach())), (4, 32, 64, 64)),
    "PixelShuffle": (lambda: Apply(nn.PixelShuffle(2)), IMAGES),
    "unfold": (lambda: Apply(lambda x: F.unfold(x, 3, padding=1)), (4, 32, 56, 56)),
    "pad, reflect": (lambda: Apply(lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect")), IMAGES),
    "Embedding": (lambda: Looked(nn.Embedding(30000, 512)), (64, 128)),
    "EmbeddingBag": (lambda: Looked(nn.EmbeddingBag(30000, 128)), (64, 128)),
    "cross_entropy": (Classifier, (1024, 512)),
    "smooth_l1_loss": (lambda: Apply(lambda x: F.smooth_l1_loss(x, -x.detach(), reduction="none")), SQUARE),
    "cosine_similarity": (lambda: Apply(lambda x: F.cosine_similarity(x[:, None], x[None], -1)), (256, 128)),
    "relu": (lambda: Apply(F.relu), SQUARE),
    "silu": (lambda: Apply(F.silu), SQUARE),
    "gelu": (lambda: Apply(F.gelu), SQUARE),
    "glu": (lambda: Apply(F.glu), SQUARE),
    "softplus": (lambda: Apply(F.softplus), SQUARE),
    "tanh": (lambda: Apply(torch.tanh), SQUARE),
    "exp": (lambda: Apply(torch.exp), SQUARE),
    "sin": (lambda: Apply(torch.sin), SQUARE),
    "erf": (lambda: Apply(torch.erf), SQUARE),
    "pow": (lambda: Apply(lambda x: (x.abs() + 0.1) ** 1.7), SQUARE),
    "clamp": (lambda: Apply(lambda x: x.clamp(-1, 1)), SQUARE),
    "where": (lambda: Apply(lambda x: torch.where(x > 0, x, x * 0.1)), SQUARE),
    "softmax": (lambda: Apply(lambda x: x.softmax(-1)), SQUARE),
    "softmax of channels": (lambda: Apply(lambda x: x.softmax(1)), (8, 64, 64, 64)),
    "log_softmax": (lambda: Apply(lambda x: x.log_softmax(-1)), (2048, 8192)),
    "logsumexp": (lambda: Apply(lambda x: x.logsumexp(-1)), SQUARE),
    "sum of columns": (lambda: Apply(lambda x: x.sum(0)), SQUARE),
    "mean of images": (lambda: Apply(lambda x: x.mean((2, 3))), (16, 256, 56, 56)),
    "std": (lambda: Apply(lambda x: x.std(-1)), SQUARE),
    "norm": (lambda: Apply(lambda x: x.norm(dim=-1)), SQUARE),
    "max": (lambda: Apply(lambda x: x.max(-1)[0]), SQUARE),
    "amax of columns": (lambda: Apply(lambda x: x.amax(0)), SQUARE),
    "sort": (lambda: Apply(lambda x: x.sort(-1)[0]), (512, 1024)),
    "topk": (lambda: Apply(lambda x: x.topk(8)[0]), (1024, 1024)),
    "cumsum": (lambda: Apply(lambda x: x.cumsum(-1)), (512, 2048)),
    "cumsum of columns": (lambda: Apply(lambda x: x.cumsum(0)), (2048, 512)),
    "cummax": (lambda: Apply(lambda x: x.cummax(-1)[0]), (256, 1024)),
    "logcumsumexp": (lambda: Apply(lambda x: x.logcumsumexp(-1)), (256, 1024)),
    "cat": (lambda: Apply(lambda x: torch.cat([x, x * 2, x], 1)), (2048, 1024)),
    "permute": (lambda: Apply(lambda x: x.permute(0, 2, 3, 1).contiguous()), (16, 256, 56, 56)),
    "roll": (lambda: Apply(lambda x: x.roll((3, 3), (2, 3))), (8, 96, 56, 56)),
    "flip": (lambda: Apply(lambda x: x.flip(-1)), (8, 96, 56, 56)),
    "triu": (lambda: Apply(lambda x: x.triu()), (8, 1024, 1024)),
    "gather": (lambda: Apply(lambda x: x.gather(1, _at(512)[:, None].expand(4096, 512))), (4096, 512)),
    "index_select": (lambda: Apply(lambda x: x[_at(4096)]), (4096, 512)),
    "index_add": (lambda: Apply(lambda x: torch.zeros(512, 512).index_add(0, _at(512), x)), (4096, 512)),
    "einsum": (lambda: Apply(lambda x: torch.einsum("bhid,bhjd->bhij", x, x)), (4, 8, 256, 64)),
    "cdist": (lambda: Apply(lambda x: torch.cdist(x, x)), (1024, 64)),
    "rfft": (lambda: Apply(lambda x: torch.fft.rfft(x).abs()), (512, 1024)),
    "irfft2": (lambda: Apply(lambda x: torch.fft.irfft2(torch.fft.rfft2(x))), (8, 32, 64, 64)),
    "stft": (lambda: Apply(lambda x: torch.stft(x, 400, 160, return_complex=True).abs()), (8, 16000)),
    "svdvals": (lambda: Apply(torch.linalg.svdvals), (16, 64, 64)),
    "inv": (lambda: Apply(torch.linalg.inv), (16, 64, 64)),
    "slogdet": (lambda: Apply(lambda x: torch.linalg.slogdet(x)[1]), (16, 64, 64)),
}


def child(side: str, args: Any) -> dict[str, Any]:
    """Seconds per step of each case, and seconds until its second loss."""
    import warnings

    import firstloss as fl

    warnings.simplefilter("ignore")
    found = {}
    for name, (build, shape) in CASES.items():
        if args.tiny:
            if "LSTM" not in name and name not in ("topk", "BatchNorm2d"):
                continue
            shape = tuple(min(n, 64) if d == 0 else n for d, n in enumerate(shape))
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as artifacts:
            if side == "eager":
                model = call = build()
            else:
                backend = fl.backend("XLA", artifact_dir=artifacts)
                with backend.device:
                    model = build()
                call = fl.compile(model, backend)
            step = _step(call, torch.optim.SGD(model.parameters(), lr=1e-6))
            step = step if side == "eager" else fl.trace(step)
            x = torch.randn(shape)
            seconds = [_timed(step, x) for _ in range(2 + (2 if args.tiny else _STEPS))]
        found[name] = {"step": median(seconds[2:]), "two": sum(seconds[:2])}
    return found


def _step(call: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _timed(step: Callable[..., torch.Tensor], x: torch.Tensor) -> float:
    began = time.perf_counter()
    step(x).item()
    return time.perf_counter() - began


def measure(args: Any) -> harness.Figure:
    cache = tempfile.mkdtemp()
    os.environ["FIRSTLOSS_CACHE"] = cache  # empty: both losses include what a first start compiles
    runs = harness.interleaved(
        ("eager", "firstloss"), args.rounds, lambda side: harness.in_child("operation_speed", side, args)
    )
    names = list(runs["eager"][0])
    ratios = {
        name: harness.ratio([r[name] for r in runs["firstloss"]], [r[name] for r in runs["eager"]], "step")
        for name in names
    }
    two = {name: runs["firstloss"][0][name]["two"] for name in names}
    ordered = sorted(names, key=lambda name: -ratios[name])
    rows = [
        (f"the median of {len(names)} operations", f"{median(ratios.values()):.2f}"),
        ("as fast as eager PyTorch or faster", str(sum(r <= 1 for r in ratios.values()))),
        *((f"  {name}", f"{ratios[name]:.2f}") for name in ordered if ratios[name] >= _SLOW),
        *((f"  two steps of {name}", f"{two[name]:.1f} s") for name in sorted(names, key=lambda n: -two[n])[:3]),
    ]
    met = median(ratios.values()) <= 1.1 and max(ratios.values()) <= 1.5 and max(two.values()) <= 10
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
