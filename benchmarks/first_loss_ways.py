"""Time to first loss of a Llama of 1.1B parameters with momentum: each way to bring weights to the device; twice."""

from __future__ import annotations

import os
import sys
import tempfile

from benchmarks import harness, models

NAME = "time to first loss, Llama of 1.1B parameters, SGD with momentum, batch 1 x 128, import left out"
GOAL = "60% less than eager construction and move; 80% less at a second start"
WAYS = {
    "eager": "constructed eagerly, then moved",
    "at-once": "lazy_initialization = False: each weight moved as it is made",
    "lazy": "Firstloss",
    "lazy-again": "Firstloss, second start (compiled steps cached)",
}
_ARTIFACTS = "FIRSTLOSS_BENCHMARK_ARTIFACTS"


def child(side, args):
    import jax  # noqa: F401  (the import is left out, on all sides)
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import firstloss as fl
    from firstloss import timeline

    batch = torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(1))
    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_1B
    harness.warm_memory(12 << 30, args)
    clock = timeline.current()
    clock.add("import", start=0.0)
    began = clock.now()
    backend = fl.backend("XLA", artifact_dir=os.environ[_ARTIFACTS])
    backend.device.config.lazy_initialization = side.startswith("lazy")
    torch.manual_seed(0)
    if side == "eager":
        with clock.span("construct"):
            model = models.llama(**fields)
    else:
        with backend.device:
            model = models.llama(**fields)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = models.training_step(model, optimizer, backend)
    loss = step(batch).item()
    seconds = clock.now() - began
    phases = {row.name: row.seconds for row in clock.table() if row.name != "import"}
    next(model.parameters())[0, 0].item()  # waits for the rest of the first step
    whole = clock.now() - began
    return {"seconds": seconds, "whole": whole, "loss": loss, "phases": phases}


def run(side, args, artifacts):
    os.environ[_ARTIFACTS] = os.path.join(artifacts, side.split("-again")[0])
    if side == "lazy":
        for name in os.listdir(artifacts):
            if name.startswith("lazy"):
                _remove(os.path.join(artifacts, name))
    if side in ("eager", "at-once"):
        _remove(os.environ[_ARTIFACTS])
    return harness.in_child("first_loss_ways", side, args)


def _remove(folder):
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def measure(args):
    with tempfile.TemporaryDirectory() as artifacts:
        runs = harness.interleaved(tuple(WAYS), args.rounds, lambda side: run(side, args, artifacts))
    less = {
        side: 1 - 1 / harness.ratio(runs["eager"], runs[side], "seconds") for side in ("at-once", "lazy", "lazy-again")
    }
    rows = []
    for side, words in WAYS.items():
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in runs[side][-1]["phases"].items())
        rows.append((words, f"{harness.middle(runs[side], 'seconds'):.2f} s ({phases})"))
        rows.append(("  the whole first step done", f"{harness.middle(runs[side], 'whole'):.2f} s"))
    rows += [(f"less: {WAYS[side]}", f"{100 * part:.0f}%") for side, part in less.items()]
    losses = {run["loss"] for side in WAYS for run in runs[side]}
    difference = (max(losses) - min(losses)) / max(losses)
    rows.append(("relative difference of the first losses", f"{difference:.1e}"))
    met = less["lazy"] >= 0.6 and less["lazy-again"] >= 0.8 and difference < 1e-4
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs, "less": less})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
