"""A run that is killed at random moments (kill -9) and restarted, against an uninterrupted one: the same bits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time

from benchmarks import harness

NAME = "resumption after kill -9 at random moments: import, compile, step or save, whatever was under way"
GOAL = "the same final weights, optimizer state and loss, bit for bit, each time"

KILLS, KILLS_A_RUN, STEPS = 20, 4, 300


def child(side, args):
    """One process of a run: trains to the end from the state in the folder `side`; returns a fingerprint."""
    import hashlib

    import torch
    from torch import nn

    import firstloss as fl
    from examples.byte_lm import ByteLM, batches
    from firstloss.trainer import Callback, Checkpoint, Trainer, TrainingLoop

    class Model(nn.Module):
        """With dropout, whose masks must be the same too."""

        def __init__(self):
            super().__init__()
            self.model = ByteLM(width=32, layers=1, length=32)
            self.model.head = nn.Sequential(nn.Dropout(0.1), self.model.head)

        def forward(self, text):
            return self.model(text)

    class Last(Callback):
        """The last loss; saved with the run, which may have been killed after its last step."""

        loss = None

        def on_metrics(self, trainer, metrics, step):
            Last.loss = metrics.get("loss", Last.loss)

        def state_dict(self):
            return {"loss": Last.loss}

        def load_state_dict(self, state):
            Last.loss = state["loss"]

    trainer = Trainer(
        backend=fl.backend("XLA", artifact_dir=os.path.join(os.path.dirname(side), "artifacts")),
        model_dir=side,
        model=Model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.7),
        loop=TrainingLoop(max_steps=20 if args.tiny else STEPS),
        checkpoint=Checkpoint(steps=5),
        callbacks=[Last()],
        loggers=[],
        seed=0,
    )
    trainer.fit(batches(length=32, batch_size=2))
    digest = hashlib.sha256()
    tensors = [*trainer.model.state_dict().values()]
    tensors += [value for entry in trainer.optimizer.state_dict()["state"].values() for value in entry.values()]
    for tensor in tensors:
        digest.update(torch.as_tensor(tensor).detach().clone().numpy().tobytes())
    return {"bits": digest.hexdigest(), "loss": Last.loss}


def killed(folder, seconds, args):
    """Start the run and kill it after so many seconds; returns whether it was still running."""
    command = [sys.executable, "-m", "benchmarks.trainer_resume", "--child", folder, *(["--tiny"] if args.tiny else [])]
    path = os.pathsep.join([os.path.join(harness.ROOT, "src"), harness.ROOT])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **quiet)
    try:
        process.wait(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def measure(args):
    kills, a_run = (2, 2) if args.tiny else (KILLS, KILLS_A_RUN)
    draws = random.Random(0)
    with tempfile.TemporaryDirectory() as root:
        expected = harness.in_child("trainer_resume", os.path.join(root, "whole"), args)
        began = time.perf_counter()  # in a second run, whose step is already compiled, as for those to be killed
        assert harness.in_child("trainer_resume", os.path.join(root, "again"), args) == expected
        whole = time.perf_counter() - began
        done, moments, ends = 0, [], []
        while done < kills:
            folder = os.path.join(root, f"run{len(ends)}")
            for _ in range(a_run):
                moment = draws.uniform(0.1, 0.9) * whole
                print(f"  kill {done + 1}/{kills} after {moment:.1f} s", file=sys.stderr, flush=True)
                if killed(folder, moment, args):
                    done += 1
                    moments.append(moment)
            ends.append(harness.in_child("trainer_resume", folder, args))
    same = sum(end == expected for end in ends)
    rows = [
        ("an uninterrupted run", f"{whole:.1f} s"),
        ("kills", f"{done} in {len(ends)} runs, after {min(moments):.1f} to {max(moments):.1f} s each"),
        ("final loss", f"{expected['loss']!r}"),
        ("runs that end with the same bits", f"{same} of {len(ends)}"),
    ]
    data = {"expected": expected, "ends": ends, "moments": moments}
    return harness.Figure(NAME, GOAL, rows, same == len(ends), data)


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
