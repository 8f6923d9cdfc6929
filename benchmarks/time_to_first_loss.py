"""Time to first loss of a Llama of 1.1B parameters with SGD, against eager construction; and the demo's own ratio."""

from __future__ import annotations

import json
import sys
import tempfile

from benchmarks import harness, models

NAME = "time to first loss, Llama of 1.1B parameters, SGD, batch 1 x 128, import left out"
GOAL = "at most half the time of eager construction (construct, move, trace, compile, step)"


def child(side, args):
    import jax  # noqa: F401  (the import is left out, on both sides)
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
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts)
        backend.device.config.lazy_initialization = side == "firstloss"
        torch.manual_seed(0)
        with backend.device:
            model = models.llama(**fields)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = models.training_step(model, optimizer, backend)
        loss = step(batch).item()
        seconds = clock.now() - began
        phases = {row.name: row.seconds for row in clock.table()}
        next(model.parameters())[0, 0].item()  # waits for the backward pass and the update
        whole = clock.now() - began
    return {"seconds": seconds, "whole": whole, "loss": loss, "phases": phases}


def demo_ratio(args):
    """The demo's own ratios, from one step of the demo."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "firstloss", "demo", "--steps", "1", "--out", out, "--json"]
        return json.loads(harness.output_of(command + (["--size", "tiny"] if args.tiny else [])))


def measure(args):
    runs = harness.interleaved(
        ("eager", "firstloss"),
        args.rounds,
        lambda side: harness.in_child("time_to_first_loss", side, args),
    )
    eager, ours = runs["eager"], runs["firstloss"]
    shorter = harness.ratio(eager, ours, "seconds")
    difference = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(eager, ours, strict=True))
    demo = demo_ratio(args)
    rows = [
        ("memory", "as the system hands it out" if args.fresh else "written before"),
        ("eager way", f"{harness.middle(eager, 'seconds'):.2f} s"),
        ("Firstloss", f"{harness.middle(ours, 'seconds'):.2f} s"),
        *(
            (f"  of which {name}", f"{seconds:.2f} s")
            for name, seconds in ours[-1]["phases"].items()
            if name != "import"
        ),
        ("shorter", f"{shorter:.2f} times"),
        ("the whole first step done, eager way", f"{harness.middle(eager, 'whole'):.2f} s"),
        ("the whole first step done, Firstloss", f"{harness.middle(ours, 'whole'):.2f} s"),
        ("  shorter", f"{harness.ratio(eager, ours, 'whole'):.2f} times"),
        ("relative difference of the first losses", f"{difference:.1e}"),
        ("the demo (500M parameters): shorter", f"{demo['ratio_without_import']:.2f} times"),
        ("the demo, import counted on both sides", f"{demo['ratio']:.2f} times"),
    ]
    data = {"runs": runs, "ratio": shorter, "demo": demo}
    return harness.Figure(NAME, GOAL, rows, shorter >= 2 and difference <= 1e-4, data)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
