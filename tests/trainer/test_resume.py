"""A run that was stopped, killed or interrupted ends with the same bits as an uninterrupted one."""

import os
import signal
import time
from subprocess import PIPE

import pytest

import firstloss as fl
from firstloss.trainer import Callback, Checkpoint, EarlyStop, Precision, TrainingLoop
from tests import forked

from . import small
from .small import Net, bits, loader, trainer


def fresh(backend):
    return fl.backend(backend.name, artifact_dir=backend.artifact_dir)


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_resumed_training_is_bit_identical(stop, backend, tmp_path):
    """Shuffling, dropout, batch norm, schedule, optimizer: in the middle of an epoch (of 6 batches) and at its end."""
    whole = trainer(tmp_path / "whole", fresh(backend), max_steps=9)
    whole.fit(loader(), loader(count=8))
    trainer(tmp_path / "parts", fresh(backend), max_steps=stop).fit(loader(), loader(count=8))
    resumed = trainer(tmp_path / "parts", fresh(backend), max_steps=9)
    resumed.fit(loader(), loader(count=8))
    assert bits(resumed) == bits(whole)
    assert resumed.state == whole.state


def test_gradient_accumulation_and_objects_resume(tmp_path):
    options = {"grad_accum_steps": 2}
    whole = trainer(tmp_path / "whole", max_steps=5, **options)
    whole.fit(loader())
    trainer(tmp_path / "parts", max_steps=2, **options).fit(loader())
    import torch

    from .small import adamw, decay

    model = Net()
    optimizer = adamw(model)
    torch.randn(3)  # at any state of the generators
    resumed = trainer(
        tmp_path / "parts", model=model, optimizer=optimizer, schedulers=[decay(optimizer)], max_steps=5, **options
    )
    resumed.fit(loader())
    assert bits(resumed) == bits(whole)


class Until(Callback):
    """Raises after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.state.step == self.step:
            raise OSError("the disk has gone")


def test_callbacks_keep_their_state(tmp_path):
    early = EarlyStop(patience=3, min_delta=9.0)
    options = {"eval_every_steps": 1, "max_steps": 9}
    run = trainer(tmp_path, callbacks=[early, Until(3)], checkpoint=Checkpoint(steps=1), **options)
    with pytest.raises(OSError, match="disk has gone"):
        run.fit(loader(), loader(count=8))
    again = EarlyStop(patience=3, min_delta=9.0)
    resumed = trainer(tmp_path, callbacks=[again], **options)
    resumed.fit(loader(), loader(count=8))
    assert resumed.state.step == 4 and again.best == early.best


def test_the_newest_and_the_best_are_kept(tmp_path):
    class Worse(Callback):
        """The validation loss is the step's distance from 2."""

        def on_validation_end(self, trainer, metrics):
            metrics["val_far"] = abs(trainer.state.step - 2)

    checkpoint = Checkpoint(steps=1, keep_last=2, best="val_far")
    run = trainer(tmp_path, callbacks=[Worse()], eval_every_steps=1, max_steps=6, checkpoint=checkpoint)
    run.fit(loader(), loader(count=8))
    assert run.folder.steps() == [2, 5, 6]
    assert run.folder.best() == {"step": 2, "metric": "val_far", "value": 0}


def test_ckpt_path_chooses_the_start(backend, tmp_path):
    first = trainer(tmp_path / "first", backend, max_steps=4, checkpoint=Checkpoint(steps=2))
    first.fit(loader())
    # another run starts from the weights only
    other = trainer(tmp_path / "other", backend, loop=TrainingLoop(max_steps=4))
    metrics = other.validate(loader(count=16, shuffle=False), ckpt_path=tmp_path / "first" / "checkpoints" / "step_4")
    assert metrics == first.validate(loader(count=16, shuffle=False))
    assert other.state.step == 0
    # resumes exactly from a given checkpoint
    back = trainer(tmp_path / "first", fresh(backend), max_steps=4)
    back.fit(loader(), ckpt_path=tmp_path / "first" / "checkpoints" / "step_2")
    assert bits(back) == bits(first)
    # a Trainer that has not trained validates the folder's last checkpoint
    fl.save(first.model.state_dict(), tmp_path / "weights.safetensors")
    third = trainer(tmp_path / "first", fresh(backend))
    assert third.validate(loader(count=16, shuffle=False)) == third.validate(
        loader(count=16, shuffle=False), ckpt_path=tmp_path / "weights.safetensors"
    )
    # None starts from scratch
    anew = trainer(tmp_path / "first", fresh(backend), max_steps=1)
    anew.fit(loader(), ckpt_path=None)
    assert anew.state.step == 1
    # later checkpoints in that folder are moved away, so that the new run's are the newest
    assert anew.folder.steps() == [1] and (tmp_path / "first" / "checkpoints" / "aside_1" / "step_4").is_dir()


def test_given_weights_are_not_overridden_by_the_folder(tmp_path):
    run = trainer(tmp_path / "run", max_steps=2)
    run.fit(loader())
    before = run.folder.steps()
    fl.save(run.model.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(fl.errors.TrainerError) as error:
        trainer(tmp_path / "run", max_steps=4).fit(loader(), ckpt_path=tmp_path / "w.safetensors")
    said = str(error.value)
    assert str(tmp_path / "w.safetensors") in said and str(run.folder.last()) in said
    assert 'ckpt_path="last"' in said and "another model_dir" in said
    assert run.folder.steps() == before
    # where nothing is resumed by itself, they are what was asked for
    anew = trainer(tmp_path / "run", max_steps=1, checkpoint=Checkpoint(autoload_last=False))
    anew.fit(loader(), ckpt_path=tmp_path / "w.safetensors")
    assert anew.state.step == 1


def test_weights_that_do_not_fit_are_refused(tmp_path):
    weights = dict(Net().state_dict())
    weights["head.weight"] = weights.pop("layers.4.weight")
    fl.save(weights, tmp_path / "w.safetensors")
    with pytest.raises(fl.errors.TrainerError, match="this Net: layers.4.weight is missing; head.weight is unexpected"):
        trainer(tmp_path / "run").fit(loader(), ckpt_path=tmp_path / "w.safetensors")
    with pytest.raises(fl.errors.TrainerError, match="nowhere' does not exist. There is no checkpoint yet"):
        trainer(tmp_path / "run").fit(loader(), ckpt_path=tmp_path / "nowhere")


def test_checkpoints_of_another_model_are_refused(tmp_path):
    import torch

    trainer(tmp_path).fit(loader())
    with pytest.raises(fl.errors.TrainerError, match="are of another model than this Linear: .*another model_dir"):
        trainer(tmp_path, model=lambda: torch.nn.Linear(2, 2)).fit(loader())
    with pytest.raises(fl.errors.TrainerError, match="has 1 schedulers, and the run 0"):
        trainer(tmp_path, schedulers=None, max_steps=9).fit(loader())


def start(folder, backend="CPU", steps=400, every=3, data="loader", **options):
    """Start a run in a process of its own."""
    command = ["-m", "tests.trainer.process", str(folder), backend, str(steps), str(every), data]
    return forked.start(command, stdout=PIPE, stderr=PIPE, **options)


def uninterrupted(folder, steps, every=3, data="loader"):
    """The output of a process that is not killed, computed in this one."""
    run = trainer(folder, fl.backend("CPU"), max_steps=steps, checkpoint=Checkpoint(steps=every))
    run.fit(getattr(small, data)())
    return f"{bits(run)}\n"


def wait_for_checkpoint(folder, step, process):
    from firstloss.trainer.checkpoint import CheckpointFolder

    while (CheckpointFolder(str(folder / "checkpoints")).steps() or [0])[-1] < step:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


ENDS = {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}


@pytest.mark.parametrize(
    "number, data",
    [
        (signal.SIGTERM, "with_workers"),
        (signal.SIGINT, "loader"),
        pytest.param(signal.SIGTERM, "loader", marks=pytest.mark.sweep),
        pytest.param(signal.SIGINT, "with_workers", marks=pytest.mark.sweep),
    ],
)
def test_signals_save_and_end(number, data, tmp_path):
    """With workers these get the signal too, as from a terminal, `timeout` and Slurm: their end is not an error."""
    process = start(tmp_path, steps=10**6, every=5, data=data, start_new_session=True)
    wait_for_checkpoint(tmp_path, 5, process)
    os.killpg(process.pid, number)
    _, output = process.communicate(timeout=120)
    assert process.returncode == ENDS[number], output
    assert forked.without_leaks(output) == f"\n{number.name}: saving after this step (again: stop at once)\n"
    run = trainer(tmp_path, max_steps=10**6)
    assert fl.load(run.folder.last())["trainer"]["step"] == run.folder.steps()[-1]
    assert run.folder.steps()[-1] >= 5 and os.path.exists(tmp_path / "versions.json")


def test_killed_runs_end_with_the_same_bits(tmp_path):
    """`benchmarks/trainer_resume.py` does this twenty times at random moments; here twice, at two."""
    expected = uninterrupted(tmp_path / "whole", steps=40)
    for step in (6, 20):
        killed = start(tmp_path / "killed", steps=40)
        wait_for_checkpoint(tmp_path / "killed", step, killed)
        killed.kill()
        killed.communicate()
    last = start(tmp_path / "killed", steps=40)
    assert last.communicate(timeout=240)[0] == expected


def test_killed_runs_with_workers_end_with_the_same_bits(tmp_path):
    """The workers of the killed run end by themselves, a few seconds later."""
    expected = uninterrupted(tmp_path / "whole", steps=14, data="with_workers")
    killed = start(tmp_path / "killed", steps=10**6, data="with_workers")
    wait_for_checkpoint(tmp_path / "killed", 9, killed)  # in the second epoch
    killed.kill()
    killed.wait()
    steps = (tmp_path / "killed" / "checkpoints").glob("step_*")
    later = [path for path in steps if int(path.name.removeprefix("step_")) > 9]
    for path in later:  # it got further before it was killed
        path.rename(tmp_path / path.name)
    last = start(tmp_path / "killed", steps=14, data="with_workers")
    assert last.communicate(timeout=240)[0] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns_and_resumes(dtype, backend, tmp_path):
    options = {"max_steps": 6, "clip_grad_norm": 1.0}
    whole = trainer(tmp_path / "whole", fresh(backend), precision=Precision(dtype), **options)
    whole.fit(loader(shuffle=False))
    plain = trainer(tmp_path / "plain", fresh(backend), **options)
    plain.fit(loader(shuffle=False))
    assert bits(whole) != bits(plain)  # something was computed in half precision
    for actual, expected in zip(whole.model.parameters(), plain.model.parameters(), strict=True):
        assert (
            actual.dtype == expected.dtype and (actual.detach().clone() - expected.detach().clone()).abs().max() < 0.1
        )
    trainer(tmp_path / "parts", fresh(backend), precision=Precision(dtype), **{**options, "max_steps": 3}).fit(
        loader(shuffle=False)
    )
    resumed = trainer(tmp_path / "parts", fresh(backend), precision=Precision(dtype), **options)
    resumed.fit(loader(shuffle=False))
    assert bits(resumed) == bits(whole) and resumed.precision.state_dict() == whole.precision.state_dict()
