"""The cost of checking the guards at each call of a compiled step."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "guards of the step of a 24-layer Llama (hidden 64) with AdamW, a call"
GOAL = "at most 0.3 ms"
CALLS = 60


def child(side, args):
    """Between the checks the step itself runs, which evicts their data from the caches."""
    import torch

    import firstloss as fl
    from firstloss.runtime.guards.guards import TableGuard
    from firstloss.runtime.step import cache_entries

    torch.manual_seed(0)
    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_24_LAYERS
    batch = torch.randint(256, (2, 32))
    models.import_llama()
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts)
        with backend.device:
            model = models.llama(**fields)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = models.training_step(model, optimizer, backend)
        asked, counts, ask = [], {}, cache_entries.CacheEntry.fits

        def timed(entry, *given):
            began = time.perf_counter()
            found = ask(entry, *given)
            asked.append(time.perf_counter() - began)
            tables = [guard for guard in entry.guards._guards if isinstance(guard, TableGuard)]
            counts.update(dicts=len(tables), names=sum(len(table.expected) for table in tables))
            return found

        cache_entries.CacheEntry.fits = timed
        for _ in range(4):
            step(batch).item()
        asked.clear()
        calls = []
        for _ in range(CALLS):
            began = time.perf_counter()
            step(batch).item()
            calls.append(time.perf_counter() - began)
    return {"seconds": statistics.median(asked), "call": statistics.median(calls), **counts}


def measure(args):
    runs = [harness.in_child("guards", "firstloss", args) for _ in range(args.rounds)]
    seconds = harness.middle(runs, "seconds")
    rows = [
        ("guards", f"{seconds * 1e3:.3f} ms"),
        ("whole call", f"{harness.middle(runs, 'call') * 1e3:.1f} ms"),
        ("dicts, and names in them", f"{runs[0]['dicts']:,}, {runs[0]['names']:,}"),
    ]
    return harness.Figure(NAME, GOAL, rows, seconds <= 0.3e-3, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
