"""Time to first loss through the Trainer, callables against objects, for Llama-1.1B and the demo's 100M model."""

from __future__ import annotations

import sys
import tempfile

from benchmarks import harness, models

NAME = "time to first loss through the Trainer, SGD, batch 1 x 128, import left out: callables against objects"
GOAL = "60% less time for a Llama of 1.1B parameters"

SIZES = {"1.1B": models.LLAMA_1B, "100M": models.LLAMA_100M}


class FirstLoss(Exception):
    """Ends the run at the first loss: the measurement is complete, and nothing has to be saved."""


def child(side, args):
    import jax  # noqa: F401  (the import is left out, on both sides)
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import firstloss as fl
    from firstloss import timeline
    from firstloss.trainer import Callback, Trainer, TrainingLoop

    way, size = side.split(":")
    fields = models.LLAMA_TINY if args.tiny else SIZES[size]
    batch = torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(1))
    harness.warm_memory((9 << 30) if size == "1.1B" else (2 << 30), args)
    clock = timeline.current()
    found = {}

    class Stop(Callback):
        def on_first_loss(self, trainer, loss, seconds):
            found.update(seconds=clock.now() - began, loss=loss)
            raise FirstLoss

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    began = clock.now()
    with tempfile.TemporaryDirectory() as folder:
        backend = fl.backend("XLA", artifact_dir=f"{folder}/artifacts")
        torch.manual_seed(0)
        if way == "callables":
            model, optimizer = (lambda: models.llama(**fields)), sgd
        else:
            with timeline.span("construct"):
                model = models.llama(**fields)
                optimizer = sgd(model)
        loop = TrainingLoop(max_steps=5)
        options = {"callbacks": [Stop()], "loggers": [], "loop": loop, "model_dir": f"{folder}/run"}
        trainer = Trainer(backend=backend, model=model, optimizer=optimizer, **options)
        try:
            trainer.fit([{"input_ids": batch, "labels": batch}] * 5)
        except FirstLoss:
            pass
    return {**found, "phases": {row.name: row.seconds for row in clock.table()}}


def measure(args):
    rows, data, less = [], {}, {}
    for size in SIZES:
        sides = (f"objects:{size}", f"callables:{size}")
        run = lambda side: harness.in_child("trainer_first_loss", side, args)  # noqa: E731
        runs = harness.interleaved(sides, args.rounds, run)
        objects, callables = (runs[side] for side in sides)
        less[size] = 1 - 1 / harness.ratio(objects, callables, "seconds")
        differ = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(objects, callables, strict=True))
        rows += [
            (f"{size}: objects", f"{harness.middle(objects, 'seconds'):.2f} s"),
            (f"{size}: callables", f"{harness.middle(callables, 'seconds'):.2f} s"),
            (f"{size}: less", f"{less[size]:.0%}"),
            (f"{size}: relative difference of the losses", f"{differ:.1e}"),
        ]
        data[size] = {"runs": runs, "less": less[size]}
    return harness.Figure(NAME, GOAL, rows, less["1.1B"] >= 0.6, data)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
