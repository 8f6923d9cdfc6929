"""Steps per second of a traced step, against the same step called directly as a jitted JAX function.

A deep model's step is divided into segments (`firstloss.lower.segments`); the JAX function is the whole Program,
jitted as a JAX user would. In addition, the functions that the traced step calls are called directly, to separate the
runtime's overhead from the effect of segmentation.

Memory that has been touched stays with each process, so that no side pays for fresh memory: with glibc's default
malloc settings, the jitted function's scratch memory would be mapped again at each step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

from benchmarks import harness, models
from firstloss import malloc_settings

NAME = "steps per second of a Llama with AdamW, traced, against the same step called as a jitted JAX function"
GOAL = "at least 97% of the jitted function's steps per second"
SIZES = {
    "hidden 256, 8 layers, batch 4 x 128": ({"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}, 4),
    "hidden 64, 24 layers, batch 2 x 32": ({}, 2),
}
_SECONDS = 1.0  # approximate duration of a turn


def child(side, args):
    """All in one process, interleaved, so that other load on the machine affects both."""
    import torch

    import firstloss as fl

    fields, size = SIZES[side]
    fields = models.LLAMA_TINY if args.tiny else {**models.LLAMA_24_LAYERS, **fields}
    torch.manual_seed(0)
    batch = torch.randint(256, (size, 32 * size))
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts)
        sides = {"traced": traced(fields, batch, backend)}
        sides |= {name: called(fields, batch, backend, whole=name == "jitted") for name in ("bare", "jitted")}
        seconds = {name: timed(*step, 5) for name, step in sides.items()}  # warm
        turns = []
        for _ in range(1 if args.tiny else 7):
            counts = {name: max(2, int((0.01 if args.tiny else _SECONDS) / seconds[name])) for name in sides}
            turns.append({name: 1 / timed(*step, counts[name]) for name, step in sides.items()})
    return {"turns": turns}


def traced(fields, batch, backend):
    """A step, and a function that waits for all of it: the loss is available before the backward pass."""
    model, step = training(fields, batch, backend)

    def wait(_):
        for parameter in model.parameters():
            parameter._storage.resident.array().block_until_ready()

    return lambda: step(batch), wait


def called(fields, batch, backend, whole):
    """The same Program without the runtime: as one jitted function, or as the functions that the traced step calls."""
    import jax

    from firstloss.lower import segments
    from firstloss.runtime.jax_support import x64
    from firstloss.runtime.step.shapes import Shapes

    least = segments._SAVED
    try:
        segments._SAVED = 1 << 62 if whole else least
        _, step = training(fields, batch, backend)
    finally:
        segments._SAVED = least
    compiled = step._cache.latest
    owners = compiled.traced.owners
    seed = jax.numpy.zeros(2, jax.numpy.uint32)
    arguments, _ = Shapes("step", "recompile").admit((batch,), {})
    with x64():
        arrays = [tuple(compiled.inputs.array(v, arguments) for v in vs) for vs in (owners.changed, owners.read)]

    def run():
        with x64():
            arrays[0], _, loss = compiled.executable(*arrays, seed)
        return loss

    return run, lambda _: jax.block_until_ready(arrays[0])


def training(fields, batch, backend):
    import torch

    with backend.device:
        model = models.llama(**fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = models.training_step(model, optimizer, backend)
    for _ in range(3):
        step(batch).item()
    return model, step


def timed(step, wait, count):
    """Seconds per step."""
    began = time.perf_counter()
    for _ in range(count):
        result = step()
    wait(result)
    return (time.perf_counter() - began) / count


def measure(args):
    environment = malloc_settings.environment(malloc_settings.HUGE_PAGES, malloc_settings.KEPT)
    runs = harness.interleaved(
        tuple(SIZES), args.rounds, lambda side: harness.in_child("traced_loop", side, args, environment)
    )
    rows, parts = [], []
    for name in SIZES:
        turns = [turn for run in runs[name] for turn in run["turns"]]
        share = {side: median(turn["traced"] / turn[side] for turn in turns) for side in ("jitted", "bare")}
        parts.append(share["jitted"])
        rows.append((f"{name}: relative to the jitted function", f"{100 * share['jitted']:.0f}%"))
        rows.append(("  relative to the same compiled functions called directly", f"{100 * share['bare']:.0f}%"))
        for side in ("jitted", "bare", "traced"):
            rows.append((f"  {side}", f"{harness.middle(turns, side):.2f} steps/s"))
    return harness.Figure(NAME, GOAL, rows, min(parts) >= 0.97, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
