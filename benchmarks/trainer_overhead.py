"""Time of a step in the Trainer and in a bare traced loop, interleaved within one run."""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

from benchmarks import harness

NAME = "the Trainer's overhead per step against the bare traced loop"
GOAL = "under 1% of a step"

STEPS = 20  # in each turn


def child(side, args):
    """Trainer and bare loop alternate, `STEPS` steps at a time, in one process, each with its own model and backend."""
    import torch

    import firstloss as fl
    from examples.byte_lm import ByteLM
    from firstloss.trainer import Callback, Trainer, TrainingLoop
    from firstloss.trainer.loggers import JSONLogger

    turns = 4 if args.tiny else 16 if side == "least" else 6
    sizes = {"width": 32, "layers": 1} if args.tiny or side == "least" else {"width": 384, "layers": 6}
    batches = list(torch.randint(256, (STEPS, 4, 129), generator=torch.Generator().manual_seed(1)))

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    with tempfile.TemporaryDirectory() as folder:
        bare = _bare_loop(lambda: ByteLM(**sizes), adamw, batches, f"{folder}/artifacts")

        class Turns(Callback):
            seconds: dict = {"trainer": [], "bare": []}

            def on_epoch_start(self, trainer):
                self.began = clocks()

            def on_epoch_end(self, trainer):
                trainer._reporter.wait()
                ours = since(self.began)
                theirs = bare()
                fl.backend(trainer.backend)
                if trainer.state.epoch > 1:  # the first one compiled
                    self.seconds["trainer"].append(ours)
                    self.seconds["bare"].append(theirs)

        trainer = Trainer(
            backend=fl.backend("XLA", artifact_dir=f"{folder}/artifacts"),
            model_dir=f"{folder}/run",
            model=lambda: ByteLM(**sizes),
            optimizer=adamw,
            loop=TrainingLoop(max_epochs=1 + turns),
            callbacks=[Turns()],
            loggers=[JSONLogger()],
        )
        trainer.fit(batches)
    return Turns.seconds


def _bare_loop(model, optimizer, batches, artifacts):
    """A function that trains on `batches` in a handwritten loop, and returns its duration."""
    import torch

    import firstloss as fl

    backend = fl.backend("XLA", artifact_dir=artifacts)
    torch.manual_seed(0)
    with backend.device:
        made = model()
    its = optimizer(made)
    compiled = fl.compile(made, backend)

    @fl.trace
    def step(batch):
        loss = compiled(batch)["loss"]
        loss.backward()
        its.step()
        its.zero_grad()
        return loss

    def run():
        fl.backend(backend)
        began = clocks()
        for batch in fl.utils.data.DataExecutor(batches):
            loss = step(batch)
        loss.item()
        return since(began)

    return run


def clocks():
    """Wall time, and this thread's CPU time: the Trainer's own work runs in this thread, whatever else is running."""
    return time.perf_counter(), time.thread_time()


def since(began):
    """Seconds on both clocks."""
    return [now - then for now, then in zip(clocks(), began, strict=True)]


def measure(args):
    runs = {side: harness.in_child("trainer_overhead", side, args) for side in ("model", "least")}
    turns = {side: list(zip(runs[side]["trainer"], runs[side]["bare"], strict=True)) for side in runs}
    bare = median(theirs[0] for _, theirs in turns["model"]) / STEPS
    wall = median(ours[0] / theirs[0] for ours, theirs in turns["model"]) - 1
    added = median(ours[1] - theirs[1] for ours, theirs in turns["least"]) / STEPS
    rows = [
        ("a step of the bare loop, byte model of 11M parameters, batch 4 x 128", f"{bare * 1e3:.1f} ms"),
        ("a step in the Trainer, median of rounds", f"{wall:+.2%}"),
        ("CPU time that the Trainer adds to a step", f"{added * 1e6:.0f} µs"),
        ("relative to the step above", f"{added / bare:.2%}"),
    ]
    data = {"runs": runs, "wall": wall, "added_seconds": added, "share": added / bare}
    return harness.Figure(NAME, GOAL, rows, added / bare < 0.01, data)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
