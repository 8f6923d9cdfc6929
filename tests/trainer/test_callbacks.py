"""Callbacks and loggers: when they are called, and what they write."""

import csv
import json

import pytest
import torch

import firstloss as fl
from firstloss.trainer import Callback, Checkpoint, Logging, TrainingLoop
from firstloss.trainer.callback import Callbacks
from firstloss.trainer.loggers import CSVLogger, JSONLogger, ProgressLogger, TensorBoardLogger

from .small import loader, trainer


class Diary(Callback):
    """Records each hook that is called."""

    def __init__(self):
        self.lines = []


# Hooks that Model Zoo names differently, and those within a step, have a test of their own.
OURS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") and not name.startswith(("on_train_", "on_before_", "on_after_", "on_values"))
]
for name in OURS:
    setattr(Diary, name, lambda self, trainer, *args, _name=name: self.lines.append(_name[3:]))


def test_hooks_are_called_in_order(backend, tmp_path):
    diary = Diary()
    run = trainer(tmp_path, backend, max_steps=2, callbacks=[diary], checkpoint=Checkpoint(steps=1))
    run.fit(loader(), loader(count=8))
    step = ["batch_start", "step_start", "batch_end", "step_end"]
    first = [*step[:2], "compile_start", "compile_end", *step[2:]]
    batch = ["validation_batch_start", "compile_start", "compile_end", "validation_batch_end"]
    validation = ["validation_start", *batch, "validation_end"]
    assert diary.lines == (
        ["fit_start", "epoch_start", *first, "first_loss", "metrics", "save_start", "save_end"]
        + [*step, "save_start", "save_end", *validation, "metrics", "fit_end"]
    )


def test_the_first_loss_is_announced_when_it_is_there(backend, tmp_path):
    diary = Diary()
    trainer(tmp_path, backend, max_steps=4, callbacks=[diary]).fit(loader())
    hooks = [line for line in diary.lines if line in ("batch_start", "first_loss", "metrics")]
    assert hooks[:4] == ["batch_start", "first_loss", "metrics", "batch_start"]


def test_hooks_are_called_per_batch_and_step(tmp_path):
    diary = Diary()
    trainer(tmp_path, max_steps=1, grad_accum_steps=2, callbacks=[diary]).fit(loader())
    assert [line for line in diary.lines if "batch" in line or "step" in line] == [
        "batch_start", "batch_end", "batch_start", "step_start", "batch_end", "step_end"
    ]  # fmt: skip


def test_hooks_see_errors(tmp_path):
    class Fails(Callback):
        def on_step_end(self, trainer):
            raise ValueError("mine")

    diary = Diary()
    with pytest.raises(ValueError, match="mine"):
        trainer(tmp_path, callbacks=[Fails(), diary]).fit(loader())
    assert diary.lines[-1] == "exception" and "fit_end" not in diary.lines


def test_a_misspelled_hook_is_refused():
    class Typo(Callback):
        def on_step_ends(self, trainer):
            pass

    with pytest.raises(fl.errors.TrainerError, match=r"Typo.on_step_ends is not a hook.* Did you mean 'on_step_end'\?"):
        Callbacks([Typo()])


def test_additions_to_a_checkpoint_are_restored(tmp_path):
    class Notes(Callback):
        back = None

        def on_save_start(self, trainer, state):
            state["notes"] = {"mine": torch.arange(3)}

        def on_load_end(self, trainer, path, state):
            self.back = state["notes"]["mine"]

    trainer(tmp_path, callbacks=[Notes()], max_steps=1).fit(loader())
    notes = Notes()
    trainer(tmp_path, callbacks=[notes], max_steps=2).fit(loader())
    assert notes.back.tolist() == [0, 1, 2]


class Stops(Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == 5:
            raise OSError("gone")


@pytest.mark.parametrize("killed", [False, True])
def test_files_have_each_step_once(killed, tmp_path):
    """Also if the run was interrupted between two checkpoints."""
    loggers = lambda: [JSONLogger(), CSVLogger()]  # noqa: E731
    options = {"max_steps": 6, "checkpoint": Checkpoint(steps=3)}
    if killed:
        cut = trainer(tmp_path, callbacks=[Stops()], loggers=loggers(), **options)
        cut.logging.log_steps = 1
        with pytest.raises(OSError):
            cut.fit(loader())
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 5, "lo')
    run = trainer(tmp_path, loggers=loggers(), **options)
    run.logging.log_steps = 1
    run.fit(loader(), loader(count=8))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    assert "loss" in lines[0] and "val_loss" in lines[-1] and "lr" in lines[0]
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6, 6]
    assert float(rows[-1]["val_loss"]) == lines[-1]["val_loss"] and rows[0]["val_loss"] == ""


def test_tensorboard_gets_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path, loggers=[TensorBoardLogger()], max_steps=3)
    run.logging.log_steps = 1
    run.fit(loader())
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


def test_progress_without_a_terminal_is_lines(tmp_path, capsys):
    run = trainer(tmp_path, loggers=[ProgressLogger()], max_steps=3, logging=Logging(log_steps=3))
    run.fit(loader(), loader(count=8))
    first, one, three, val, done = capsys.readouterr().err.splitlines()
    assert first.startswith("first loss 1.") and one.startswith("step 1  loss 1.") and "val_loss" in val
    assert "steps/s" in three and "samples/s" in three
    assert "steps/s" not in one  # there is no rate for steps that were compiled


def test_a_finished_run_says_so(tmp_path, capsys):
    for _ in range(2):
        trainer(tmp_path, loggers=[ProgressLogger()], max_steps=1).fit(loader())
    first, again = capsys.readouterr().err.split("resumed at step 1, from ")
    assert "done at step 1; saved " in first and "nothing left to do" in again and "another model_dir" in again


def test_progress_on_a_terminal_is_a_bar(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    trainer(tmp_path / "steps", loggers=[ProgressLogger()], max_steps=2).fit(loader())
    output = capsys.readouterr().err
    assert "2/2" in output and "first loss 1." in output and " after " in output
    by_epochs = TrainingLoop(max_epochs=2, grad_accum_steps=2)
    trainer(tmp_path / "epochs", loggers=[ProgressLogger()], loop=by_epochs, model=Tokens).fit(
        [{"input_ids": torch.ones(2, 5, dtype=torch.long)}] * 4
    )
    output = capsys.readouterr().err
    assert "4/4" in output
    run = trainer(tmp_path / "rates", loggers=[ProgressLogger()], max_steps=4, model=Tokens)
    run.logging.log_steps = 4
    run.fit([{"input_ids": torch.ones(2, 5, dtype=torch.long)}] * 4)
    output = " ".join(capsys.readouterr().err.split())
    assert "tokens/s" in output and "samples/s" in output and "steps/s" in output and "lr 1.000e-02" in output


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)

    def forward(self, input_ids):
        return {"loss": self.embed(input_ids).square().mean()}


def test_the_run_folder_describes_the_run(tmp_path, monkeypatch):
    with fl.timeline.record():
        trainer(tmp_path, max_steps=1, loggers=[]).fit(loader())
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["torch"] and versions["seed"] == 0
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["model"] == "Net" and settings["optimizer"] == "adamw" and settings["backend"] == "CPU"
    assert settings["loop"]["max_steps"] == 1 and settings["checkpoint"]["keep_last"] == 3
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
