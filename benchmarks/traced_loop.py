"""Steps per second of a traced step, against the same step called directly as a jitted JAX function."""

from __future__ import annotations

import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "steps per second of a Llama with AdamW, traced, against the same step called as a jitted JAX function"
GOAL = "97%"
SIZES = {
    "hidden 256, 8 layers, batch 4 x 128": ({"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}, 4),
    "hidden 64, 24 layers, batch 2 x 32": ({}, 2),
}
_STEPS = 40


def child(side, args):
    import jax
    import torch

    import firstloss as fl
    from firstloss.lower import segments
    from firstloss.runtime.jaxlib import x64

    kind, name = side.split(": ")
    fields, size = SIZES[name]
    if kind == "jitted":
        segments._SAVED = 1 << 62  # one function, as who writes JAX would have it
    torch.manual_seed(0)
    batch = torch.randint(256, (size, 32 * size))
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts)
        with backend.device:
            model = models.llama(**(models.LLAMA_TINY if args.tiny else {**models.LLAMA_24_LAYERS, **fields}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = models.training_step(model, optimizer, backend)
        for _ in range(3):
            step(batch).item()
        if kind == "traced":
            began = time.perf_counter()
            for _ in range(_STEPS):
                loss = step(batch)
            for parameter in model.parameters():  # the loss is there before the backward pass
                parameter._store.resident.array().block_until_ready()
            loss = loss.item()
            return {"rate": _STEPS / (time.perf_counter() - began), "loss": loss}
        executable = step._latest.latest()
        with x64():
            state = tuple(executable._array(value, [batch]) for value in executable._changed)
            rest = tuple(executable._array(value, [batch]) for value in executable._read)
            seed = jax.numpy.zeros(2, jax.numpy.uint32)
            began = time.perf_counter()
            for _ in range(_STEPS):
                state, _, (loss,) = executable._compiled(state, rest, seed)
            jax.block_until_ready(state)
            loss = float(loss)
            return {"rate": _STEPS / (time.perf_counter() - began), "loss": loss}


def measure(args):
    sides = tuple(f"{kind}: {name}" for name in SIZES for kind in ("jitted", "traced"))
    runs = harness.interleaved(sides, args.rounds, lambda side: harness.in_child("traced_loop", side, args))
    rows, parts = [], []
    for name in SIZES:
        jitted, traced = runs[f"jitted: {name}"], runs[f"traced: {name}"]
        parts.append(harness.ratio(traced, jitted, "rate"))
        rows.append((name, f"{100 * parts[-1]:.0f}%"))
        rows.append(("  jitted JAX function", f"{harness.middle(jitted, 'rate'):.2f} steps/s"))
        rows.append(("  traced", f"{harness.middle(traced, 'rate'):.2f} steps/s"))
    return harness.Figure(NAME, GOAL, rows, min(parts) >= 0.97, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
