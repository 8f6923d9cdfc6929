"""Time and memory for capturing the constructor of Llama-3.1-405B."""

from __future__ import annotations

import sys
import time

from benchmarks import harness, models

NAME = "capture Llama-3.1-405B's constructor"
GOAL = "under 1.5 s and 200 MB of additional resident memory"


def child(side, args):
    import torch

    import firstloss as fl

    models.import_llama()
    torch.manual_seed(0)
    before = harness.resident()
    began = time.perf_counter()
    model = fl.deferred_init(models.llama, **(models.LLAMA_TINY if args.tiny else models.LLAMA_405B))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "resident": harness.resident() - before,
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
    }


def measure(args):
    runs = harness.interleaved(
        ("capture",), args.rounds, lambda side: harness.in_child("capture_llama_405b", side, args)
    )["capture"]
    seconds, resident = harness.middle(runs, "seconds"), harness.middle(runs, "resident")
    rows = [
        ("parameters", f"{runs[0]['parameters']:,}"),
        ("capture", f"{seconds:.2f} s"),
        ("additional resident memory", f"{resident / 1e6:.0f} MB"),
    ]
    return harness.Figure(NAME, GOAL, rows, seconds < 1.5 and resident < 200e6, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
