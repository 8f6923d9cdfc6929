"""Steps per second of a traced step, against the same step called directly as a jitted JAX function."""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

from benchmarks import harness, models

NAME = "steps per second of a Llama with AdamW, traced, against the same step called as a jitted JAX function"
GOAL = "97%"
SIZES = {
    "hidden 256, 8 layers, batch 4 x 128": ({"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}, 4),
    "hidden 64, 24 layers, batch 2 x 32": ({}, 2),
}
_SECONDS = 1.0  # that a turn takes, about


def child(side, args):
    """Both in one process, in turns, so that what else the machine does falls on both."""
    import torch

    fields, size = SIZES[side]
    fields = models.LLAMA_TINY if args.tiny else {**models.LLAMA_24_LAYERS, **fields}
    torch.manual_seed(0)
    batch = torch.randint(256, (size, 32 * size))
    with tempfile.TemporaryDirectory() as artifacts:
        sides = {"traced": traced(fields, batch, artifacts), "jitted": jitted(fields, batch, artifacts)}
        seconds = {name: timed(*step, 5) for name, step in sides.items()}  # warm
        turns = []
        for _ in range(1 if args.tiny else 7):
            counts = {name: max(2, int((0.01 if args.tiny else _SECONDS) / seconds[name])) for name in sides}
            turns.append({name: 1 / timed(*step, counts[name]) for name, step in sides.items()})
    return {"turns": turns}


def traced(fields, batch, artifacts):
    """A step, and what waits until all of it is through: the loss is there before the backward pass."""
    model, step = training(fields, batch, artifacts)

    def wait(_):
        for parameter in model.parameters():
            parameter._store.resident.array().block_until_ready()

    return lambda: step(batch), wait


def jitted(fields, batch, artifacts):
    """The same Program as one jitted function, as who writes JAX would have it."""
    import jax

    from firstloss.lower import segments
    from firstloss.runtime.jaxlib import x64

    segments._SAVED = 1 << 62
    _, step = training(fields, batch, artifacts)
    executable = step._latest.latest()
    seed = jax.numpy.zeros(2, jax.numpy.uint32)
    with x64():
        arrays = [
            tuple(executable.inputs.array(v, [batch]) for v in vs) for vs in (executable._changed, executable._read)
        ]

    def run():
        with x64():
            arrays[0], _, loss = executable._compiled(*arrays, seed)
        return loss

    return run, lambda _: jax.block_until_ready(arrays[0])


def training(fields, batch, artifacts):
    import torch

    import firstloss as fl

    backend = fl.backend("XLA", artifact_dir=artifacts)
    with backend.device:
        model = models.llama(**fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = models.training_step(model, optimizer, backend)
    for _ in range(3):
        step(batch).item()
    return model, step


def timed(step, wait, count):
    """Seconds a step."""
    began = time.perf_counter()
    for _ in range(count):
        result = step()
    wait(result)
    return (time.perf_counter() - began) / count


def measure(args):
    runs = harness.interleaved(tuple(SIZES), args.rounds, lambda side: harness.in_child("traced_loop", side, args))
    rows, parts = [], []
    for name in SIZES:
        turns = [turn for run in runs[name] for turn in run["turns"]]
        parts.append(median(turn["traced"] / turn["jitted"] for turn in turns))
        rows.append((name, f"{100 * parts[-1]:.0f}%"))
        for side in ("jitted", "traced"):
            rows.append((f"  {side}", f"{harness.middle(turns, side):.2f} steps/s"))
    return harness.Figure(NAME, GOAL, rows, min(parts) >= 0.97, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
