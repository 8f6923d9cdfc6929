"""Steps per second of a Llama and a ResNet-18: Firstloss, Flax NNX, eager PyTorch and torch.compile.

    python -m benchmarks.step_speed [--rounds N] [--dtype bfloat16] [--json]

Each side trains in a separate process, and they alternate in turns of a few seconds: all are built and warm before the
first turn that counts, and other load on the machine affects all of them. A step is timed up to the update of the last
weight. Only this benchmark needs Flax: pip install --no-deps -r requirements/bench.txt. A side that is not installed,
or that finds no C++ compiler (torch.compile), is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from firstloss import malloc_settings

NAME = "steps per second of what is compiled"
GOAL = "at least as fast as the Flax NNX program"
SIDES = ("firstloss", "flax", "eager", "compile")
MODELS = ("llama", "resnet", "resnet64")
LLAMA = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LENGTH, ROWS = 128, 4
CLASSES = 100
# The number of images, and their height and width in pixels. The last layers of the second see 2 x 2 pixels, less than
# their kernels: XLA on a CPU has no library for that, and neither has Flax's program.
IMAGES = {"resnet": (4, 128), "resnet64": (8, 64)}
SECONDS = 2.0  # approximate duration of a turn


def child(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Build and warm up one side; then, for each line on stdin, run that many steps, and print their duration."""
    args.model = args.models
    began = time.perf_counter()
    step, wait = (flax_step if side == "flax" else torch_step)(side, args)
    loss = wait(step())
    print(json.dumps({"first step": time.perf_counter() - began, "loss": loss}), flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(step, wait, int(line))), flush=True)
    return {}


def turn(step: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> dict[str, float]:
    """Wall and CPU seconds of `steps` steps, which are waited for only at the end."""
    cores, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        loss = step()
    value = wait(loss)
    return {"seconds": time.perf_counter() - began, "core seconds": time.process_time() - cores, "loss": value}


class Side:
    """A child process that trains one model in one way, one turn at a time."""

    def __init__(self, side: str, model: str, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "benchmarks.step_speed", "--child", side, "--models", model]
        path = os.pathsep.join([os.path.join(harness.ROOT, "src"), harness.ROOT, os.environ.get("PYTHONPATH", "")])
        self._name = side
        self._seconds = 0.1 if args.tiny else SECONDS
        self._process = subprocess.Popen(
            [*command, "--dtype", args.dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **malloc_settings.environment(malloc_settings.HUGE_PAGES, malloc_settings.KEPT),
                **os.environ,
                "PYTHONPATH": path,
            },
        )
        self.first = self._answer()
        self._steps = 1

    def turn(self) -> dict[str, float]:
        """A turn of about `SECONDS`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        found = self._answer()
        each = found["seconds"] / self._steps
        found |= {"steps per second": 1 / each, "core seconds per step": found["core seconds"] / self._steps}
        self._steps = max(3, min(200, int(self._seconds / each)))
        return found

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"benchmarks: step_speed --child {self._name} ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def torch_step(side: str, args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    import torch
    from torch.nn import functional

    import firstloss as fl

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    loss_of: Callable[..., Any]
    if args.model == "llama":
        from benchmarks.models import llama

        batch: Any = (torch.randint(LLAMA["vocab_size"], (ROWS, LENGTH)),)

        def build() -> Any:
            return llama(**LLAMA).to(dtype)

        def loss_of(model: Any, ids: Any) -> Any:
            return model(input_ids=ids, labels=ids).loss

        def optimize(parameters: Any) -> Any:
            return torch.optim.AdamW(parameters, lr=1e-3)
    else:
        from benchmarks.sweep_constructors import prepare

        prepare()
        import torchvision

        count, pixels = IMAGES[args.model]
        batch = (torch.randn(count, 3, pixels, pixels).to(dtype), torch.randint(CLASSES, (count,)))

        def build() -> Any:
            return torchvision.models.resnet18(num_classes=CLASSES).to(dtype)

        def loss_of(model: Any, images: Any, labels: Any) -> Any:
            return functional.cross_entropy(model(images), labels)

        def optimize(parameters: Any) -> Any:
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    if side == "firstloss":
        backend = fl.backend("XLA", artifact_dir=tempfile.mkdtemp())
        with backend.device:
            model = build()
        called = fl.compile(model, backend)
    else:
        called = model = build()
        if side == "compile":
            called = torch.compile(model)
    optimizer = optimize(model.parameters())

    def step(*batch: Any) -> Any:
        loss = loss_of(called, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = fl.trace(step) if side == "firstloss" else step

    def wait(loss: Any) -> float:
        if side == "firstloss":  # the loss is available before the backward pass
            for parameter in model.parameters():
                parameter._storage.resident.array().block_until_ready()
        return loss.item()

    return lambda: run(*batch), wait


def flax_step(side: str, args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    import jax
    import optax
    from flax import nnx
    from jax import numpy as jnp

    from benchmarks import flax_models

    dtype = jnp.dtype(args.dtype)
    key = jax.random.key(0)
    model: Any
    batch: Any
    if args.model == "llama":
        model, transformation = flax_models.Llama(LLAMA, nnx.Rngs(0)), optax.adamw(1e-3, weight_decay=0.01)
        batch = jax.random.randint(key, (ROWS, LENGTH), 0, LLAMA["vocab_size"])
    else:
        model, transformation = flax_models.ResNet18(CLASSES, nnx.Rngs(0)), optax.sgd(0.01, momentum=0.9)
        count, pixels = IMAGES[args.model]
        images = jax.random.normal(key, (count, pixels, pixels, 3), dtype)
        batch = (images, jax.random.randint(key, (count,), 0, CLASSES))
    if args.dtype != "float32":
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, state))
    run = flax_models.stepper(model, transformation)
    return lambda: run(batch), lambda loss: float(loss)


def is_there(side: str) -> bool:
    import importlib.util
    import shutil

    if side == "flax":
        return importlib.util.find_spec("flax") is not None and importlib.util.find_spec("optax") is not None
    return side != "compile" or any(shutil.which(c) for c in ("g++", "clang++", "c++"))


def measure(args: argparse.Namespace) -> harness.Figure:
    sides = [side for side in args.sides.split(",") if is_there(side) and not (args.tiny and side == "compile")]
    data: dict[str, Any] = {}
    rows, met = [], None  # if Flax is not installed
    for model in ["llama"] if args.tiny else args.models.split(","):
        runs = data[model] = turns(sides, model, args)
        for side in sides:
            speed, cores = (harness.middle(runs[side], key) for key in ("steps per second", "core seconds per step"))
            more = ""
            if side != "firstloss" and "firstloss" in sides:
                more = f" (Firstloss: {harness.ratio(runs['firstloss'], runs[side], 'steps per second'):.2f} times)"
            rows.append((f"{model}, {args.dtype}: {side}", f"{speed:.2f} steps/s, {cores:.3f} core s per step{more}"))
        if "flax" in sides and "firstloss" in sides:
            met = met is not False and harness.ratio(runs["firstloss"], runs["flax"], "steps per second") >= 1
    return harness.Figure(NAME, GOAL, rows, met, data)


def turns(sides: list[str], model: str, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The durations of each side's turns, without the first, a warm-up."""
    running = {}
    for side in sides:
        print(f"  {model}: {side}", file=sys.stderr, flush=True)
        running[side] = Side(side, model, args)
        running[side].turn()
        running[side].turn()
    found = harness.interleaved(sides, args.rounds, lambda side: running[side].turn())
    for side in running.values():
        side.close()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help=f"from {', '.join(MODELS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"from {', '.join(SIDES)}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
