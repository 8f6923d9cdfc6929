"""Several processes that train one model: one run folder, written by process 0, and a common end."""

import csv
import json
import os
import signal
import socket
from subprocess import PIPE

import pytest
import torch

from firstloss.trainer import Callback
from tests import forked

from .small import adamw, decay, loader, trainer


def run(folder, steps):
    """The output and exit status of both processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = ["-m", "tests.trainer.ranks", str(folder), str(port)]
    ranks = [forked.start([*command, str(rank), str(steps)], stdout=PIPE, stderr=PIPE) for rank in range(2)]
    outs = [process.communicate(timeout=280) for process in ranks]
    for out, err in outs:
        assert out.strip(), err[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outs], [process.returncode for process in ranks], outs


def alone(folder, steps):
    """The losses of the same training in eager PyTorch."""

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            linear = torch.nn.Linear
            self.layers = torch.nn.Sequential(linear(8, 128), torch.nn.ReLU(), linear(128, 128), linear(128, 4))

        def forward(self, x, y):
            return torch.nn.functional.cross_entropy(self.layers(x), y)

    class Losses(Callback):
        values: list = []

        def on_metrics(self, trainer, metrics, step):
            self.values.append(metrics["loss"])

    run = trainer(folder, model=Wide, optimizer=adamw, schedulers=decay, max_steps=steps, clip_grad_norm=1.0,
                   callbacks=[Losses()])  # fmt: skip
    run.logging.log_steps = 1
    run.fit(loader())
    return Losses.values


@pytest.mark.timeout(600)
def test_two_processes_write_one_run_and_end_together(tmp_path):
    results, status, outs = run(tmp_path, 4)
    assert status == [0, 0], outs[0][1][-4000:]
    assert results[0] == results[1] and results[0]["saved"] == [2, 4]  # both take part in saving, and load the same
    assert results[0]["losses"] == pytest.approx(alone(tmp_path / "alone", 4), rel=1e-4)  # sums in another order
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    with open(folder / "metrics.csv", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 2, 3, 4, 4]
    assert len(os.listdir(folder / "tensorboard")) == 1
    assert outs[0][1].count("first loss") == 1 and outs[1][1].count("first loss") == 0
    best = json.loads((folder / "checkpoints" / "best.json").read_text())
    assert best["value"] == min(line["val_loss"] for line in lines if "val_loss" in line)
    # One of them gets a signal: both resume from step 4, and save and end at the next logged step.
    results, status, outs = run(tmp_path, 1000)
    assert status == [-signal.SIGTERM] * 2, outs[1][1][-4000:]
    assert results == [{"stopped": 10, "saved": [10]}] * 2
    assert "SIGTERM" in outs[1][1] and "resumed at step 4" in outs[0][1]
    assert (folder / "checkpoints" / "step_10").is_dir()
