"""Steps per second of training steps whose Python reads values, or the clock.

Each step is timed traced, traced without its read (the value is then read after the call, where the read's value is
needed anyway), eagerly, and compiled by `torch.compile`, which breaks its graph at a read. All sides are in one
process, interleaved, with touched memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from statistics import median

from benchmarks import harness, models
from firstloss import malloc_settings

NAME = "steps per second of steps that read values, against the same steps without reads, and eager PyTorch"
GOAL = (
    "97% of the step without the read for a branch and a kept number, 90% for clipping by a Python number, and eager's "
    "speed for x[mask]"
)
GOALS = {"branch": 0.97, "keep": 0.97, "total": 0.97, "clip": 0.9, "mask": None, "log": None, "clock": None}
MODELS = ("Llama", "ResNet-18")
_SECONDS = 2.0  # approximate duration of a turn


def add_arguments(parser):
    parser.add_argument("--compile", action="store_true", help="also time torch.compile, which takes minutes to start")


def _llama(tiny):
    import torch

    fields = models.LLAMA_TINY if tiny else {**models.LLAMA_24_LAYERS, "hidden_size": 256, "intermediate_size": 704}
    fields = {**fields, "use_cache": False}  # torch.compile would compile each layer by itself
    batch = torch.randint(fields["vocab_size"], (4, 64))
    return (lambda: models.llama(**fields)), (lambda call, x: call(input_ids=x, labels=x).loss), batch


def _resnet(tiny):
    import torch

    labels = torch.arange(8) % 10
    batch = torch.randn(8, 3, *(32 if tiny else 64,) * 2)
    return models.resnet18, (lambda call, x: call(x, labels).loss), batch


def _steps(model, call, loss_of, optimizer, folder):
    """By name, the steps, and how each is without its read."""
    import torch
    from torch.utils.tensorboard import SummaryWriter

    losses, total, writer = [], [0.0], SummaryWriter(folder)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    def plain(x):
        loss = loss_of(call, x)
        loss.backward()
        update()
        return loss

    def branch(x):
        loss = loss_of(call, x)
        loss.backward()
        if not loss.isfinite():
            return loss
        update()
        return loss

    def keep(x):
        loss = plain(x)
        losses.append(loss.item())
        return loss

    def add(x):
        loss = plain(x)
        total[0] += loss.item()
        return loss

    def norm():
        return torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()

    def clip(x):
        loss = loss_of(call, x)
        loss.backward()
        scale = min(1.0, 1.0 / norm().item())
        for p in model.parameters():
            p.grad.mul_(scale)
        update()
        return loss

    def clip_without(x):
        loss = loss_of(call, x)
        loss.backward()
        scale = (1.0 / norm()).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        update()
        return loss

    def mask(x):
        loss = plain(x)
        return loss + 0 * x[x > x.float().mean()].sum()

    def log(x):
        loss = plain(x)
        writer.add_scalar("loss", loss.item())
        return loss

    def clock(x):
        loss = plain(x)
        total[0] = time.monotonic()
        return loss

    return {
        "branch": (branch, plain),
        "keep": (keep, plain),
        "total": (add, plain),
        "clip": (clip, clip_without),
        "mask": (mask, plain),
        "log": (log, plain),
        "clock": (clock, plain),
    }


def child(side, args):
    import torch

    import firstloss as fl

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    make, loss_of, batch = {"Llama": _llama, "ResNet-18": _resnet}[side](args.tiny)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = fl.backend("XLA", artifact_dir=folder)
        for name in GOALS:
            sides = {}
            for way in ("traced", "without", "eager", *(["torch.compile"] if args.compile else [])):
                torch.manual_seed(0)
                if way in ("traced", "without"):
                    with backend.device:
                        model = make()
                    call = fl.compile(model, backend)
                else:
                    model = call = make()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                step = _steps(model, call, loss_of, optimizer, folder)[name][way == "without"]
                if way == "torch.compile":
                    torch._dynamo.reset()
                    step = torch.compile(step)
                sides[way] = fl.trace(step) if way in ("traced", "without") else step
            for step in sides.values():
                for _ in range(2 if args.tiny else 6):
                    step(batch).item()
            seconds = {way: _timed(step, batch, 2) for way, step in sides.items()}
            turns = []
            for _ in range(1 if args.tiny else 5):
                counts = {way: max(2, int((0.01 if args.tiny else _SECONDS) / seconds[way])) for way in sides}
                turns.append({way: 1 / _timed(step, batch, counts[way]) for way, step in sides.items()})
            found[name] = turns
    return {"turns": found}


def _timed(step, batch, count):
    began = time.perf_counter()
    for _ in range(count):
        step(batch).item()
    return (time.perf_counter() - began) / count


def measure(args):
    environment = malloc_settings.environment(malloc_settings.HUGE_PAGES, malloc_settings.KEPT)
    runs = harness.interleaved(MODELS, args.rounds, lambda side: harness.in_child("reads", side, args, environment))
    rows, met = [], True
    for model in MODELS:
        for name, goal in GOALS.items():
            turns = [turn for run in runs[model] for turn in run["turns"][name]]
            share = {way: median(turn["traced"] / turn[way] for turn in turns) for way in turns[0] if way != "traced"}
            met = met and (share["without"] >= goal if goal is not None else name != "mask" or share["eager"] >= 1)
            text = ", ".join(f"{100 * ratio:.0f}% of {way}" for way, ratio in share.items())
            rows.append((f"{model}, {name}", f"{text} ({median(turn['traced'] for turn in turns):.2f} steps/s)"))
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
