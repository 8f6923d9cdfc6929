"""Signals in this process: when they are deferred, and their effect. `test_resume.py` ends real processes."""

import gc
import multiprocessing
import os
import signal
import sys
import time

import pytest

from firstloss.runtime.mesh.processes import processes
from firstloss.trainer import Callback, ValidationLoop
from firstloss.trainer.interrupts import Interrupts
from firstloss.trainer.loggers import ProgressLogger
from firstloss.utils.data import DataExecutor, DataLoader

from .small import loader, trainer, with_workers


@pytest.fixture(autouse=True)
def handlers():
    """Let Ctrl-C raise KeyboardInterrupt, even if it is ignored where the tests run; restored afterwards."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


class Raises(Callback):
    """Sends a signal to this process in the given hook."""

    def __init__(self, number, hook):
        self.number = number
        setattr(self, hook, self._send)

    def on_step_end(self, trainer): ...

    def on_fit_end(self, trainer): ...

    def on_validation_batch_end(self, trainer, batch, outputs): ...

    def _send(self, *args):
        signal.raise_signal(self.number)


def fit(folder, number, hook, **options):
    run = trainer(folder, callbacks=[Raises(number, hook)], **options)
    run.fit(loader())
    return run


def test_an_ignored_signal_stays_ignored(tmp_path):
    """As for a process that a script has started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert fit(tmp_path, signal.SIGINT, "on_step_end", max_steps=2).state.step == 2
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("number, end", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_the_run_ends_after_a_recording_handler(number, end, tmp_path):
    seen = []

    def note(number, frame):
        seen.append(number)

    signal.signal(number, note)
    with pytest.raises(end) as ended:
        fit(tmp_path, number, "on_step_end")
    assert seen == [number] and os.listdir(tmp_path / "checkpoints") == ["step_1"]
    assert end is KeyboardInterrupt or ended.value.code == 128 + number
    assert signal.getsignal(number) is note


def test_a_signal_after_the_last_step_ends_the_run(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt) as ended:
        fit(tmp_path, signal.SIGINT, "on_fit_end", max_steps=2)
    assert ended.value.__suppress_context__  # an interrupt is not an error
    assert capfd.readouterr().err == "\nSIGINT: saving after this step (again: stop at once)\n"


def test_validation_ends_after_its_batch(tmp_path, capfd):
    run = trainer(tmp_path, callbacks=[Raises(signal.SIGINT, "on_validation_batch_end")], loop=ValidationLoop())
    with pytest.raises(KeyboardInterrupt):
        run.validate(loader(), ckpt_path=None)
    assert "SIGINT: ending after this batch" in capfd.readouterr().err and not os.path.exists(run.folder.path)


def test_the_second_signal_stops_at_once():
    with pytest.raises(KeyboardInterrupt), Interrupts("saving", processes(), lambda: 3) as held:
        signal.raise_signal(signal.SIGINT)
        assert held.received is signal.SIGINT
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second signal was held back too")


def test_a_closed_stderr_is_not_an_error(tmp_path, monkeypatch):
    """`python train.py 2>&1 | tee log`: Ctrl-C ends the tee first."""
    read, write = os.pipe()
    os.close(read)
    former = os.dup(2)
    os.dup2(write, 2)
    try:
        with open(write, "w") as nobody, monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sys, "stderr", nobody)
            fit(tmp_path, signal.SIGINT, "on_step_end", loggers=[ProgressLogger()])
    except BrokenPipeError:  # when the file is closed
        pass
    finally:
        os.dup2(former, 2)
        os.close(former)
    assert os.listdir(tmp_path / "checkpoints") == ["step_1"]


def test_a_forked_child_can_be_terminated():
    """Process pools of multiprocessing end their workers with SIGTERM, and then wait for them."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def work():
        ready.set()
        while True:
            time.sleep(0.01)

    with Interrupts("saving", processes(), lambda: 3):
        child = fork.Process(target=work)
        child.start()
        ready.wait()  # Python loses a signal that arrives while it forks
        child.terminate()
        child.join(timeout=60)
    try:
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()


def test_no_worker_remains_after_a_loop(tmp_path):
    """After training that stops within an epoch, validation of some batches, or a loop left early.

    An iterator with workers that awaits collection raises "can only test a child process" if it is collected in a
    process forked later.
    """
    gc.disable()
    try:
        loop = {"eval_every_steps": 1, "max_steps": 2, "validation": ValidationLoop(max_batches=1)}
        run = trainer(tmp_path, **loop)
        run.fit(with_workers(), with_workers())
        executor = DataExecutor(DataLoader(with_workers))
        for _ in executor:
            break
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
    assert executor.loader.state_dict()["batch"] == 1 and not executor.is_last_step
