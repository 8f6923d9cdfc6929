"""Trace, lower and compile a step of 24 layers and one of 96: the cost of four times as many layers."""

from __future__ import annotations

import sys
import tempfile

from benchmarks import harness, models

NAME = "trace, lower and compile the step of a Llama (hidden 64) with AdamW: 96 layers against 24"
GOAL = "at most 2 times"
_WHOLE = "whole"


def child(side, args):
    import torch

    import firstloss as fl
    from firstloss import timeline
    from firstloss.lower import segments

    layers, _, whole = side.partition("-")
    if whole:  # as before steps were segmented, for comparison
        segments._SAVED = 1 << 62
    torch.manual_seed(0)
    batch = torch.randint(256, (2, 32))
    models.import_llama()
    fields = {**models.LLAMA_24_LAYERS, "num_hidden_layers": int(layers) // (12 if args.tiny else 1)}
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts, first_loss="compiled")  # compile before the first loss
        with backend.device:
            model = models.llama(**fields)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = models.training_step(model, optimizer, backend)
        losses = [step(batch).item()]
        clock = timeline.current()
        spans = [span for span in clock.spans if span.name in ("trace", "lower", "compile")]
        phases = {name: clock.seconds(name) for name in ("trace", "lower", "compile")}
        losses += [step(batch).item() for _ in range(2)]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return {"seconds": seconds, **phases, "losses": losses}


def measure(args):
    sides = ("24", "96", f"24-{_WHOLE}", f"96-{_WHOLE}")
    runs = harness.interleaved(sides, args.rounds, lambda side: harness.in_child("deep_layers", side, args))
    growth = harness.ratio(runs["96"], runs["24"], "seconds")
    difference = max(
        abs(a - b) / abs(b)
        for layers in ("24", "96")
        for ours, whole in zip(runs[layers], runs[f"{layers}-{_WHOLE}"], strict=True)
        for a, b in zip(ours["losses"], whole["losses"], strict=True)
    )
    rows = [
        (
            f"{layers} layers" + (", compiled whole" if whole else ""),
            f"{harness.middle(runs[side], 'seconds'):.2f} s (trace {harness.middle(runs[side], 'trace'):.2f}, "
            f"lower {harness.middle(runs[side], 'lower'):.2f}, compile {harness.middle(runs[side], 'compile'):.2f})",
        )
        for side in sides
        for layers, _, whole in [side.partition("-")]
    ]
    rows.append(("96 against 24", f"{growth:.2f} times"))
    rows.append(("the same, compiled whole", f"{harness.ratio(runs[sides[3]], runs[sides[2]], 'seconds'):.2f} times"))
    rows.append(("relative difference of the first three losses", f"{difference:.1e}"))
    return harness.Figure(NAME, GOAL, rows, growth <= 2 and difference <= 1e-5, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
