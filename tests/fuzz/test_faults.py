"""Some of the faults that `python -m tests.fuzz faults` makes happen in public calls."""

import pytest
import torch

from firstloss.init.disk import save
from firstloss.runtime.checkpoint import checkpoint

from . import faults
from .outcome import DIFFERS, FOREIGN, Outcome

# Not forks: this process has threads of JAX's and pytest's, whose locks a fork may find held.
IN_PROCESS = [seed for seed in range(100) if ", fork," not in faults.generate(seed)]


@pytest.mark.parametrize("part", range(4))
def test_faults_leave_weights_and_the_process_whole(part):
    for seed in IN_PROCESS[part::4]:
        outcome = faults.check(faults.generate(seed))
        assert not outcome.failed, (faults.generate(seed), outcome)


def test_every_call_meets_every_fault_that_it_can():
    made = {tuple(faults.generate(seed).split(": ")[1].split(", ")[:2]) for seed in range(3000)}
    assert made == {
        (call, fault) for fault, (_, can) in faults.FAULTS.items() for call in faults.CALLS if can(faults.CALLS[call])
    }


def checked(call, fault, times=40) -> list[Outcome]:
    text = "MODEL, CALL, FAULT, SEED = 'Plain', {!r}, {!r}, {}\n"
    return [faults.check(text.format(call, fault, seed)) for seed in range(times)]


def test_a_save_that_loses_the_checkpoint_is_found(monkeypatch):
    real = checkpoint._write_json

    def in_place(path, content):
        open(path, "w").close()
        faults.time.sleep(0.01)
        real(path, content)

    monkeypatch.setattr(checkpoint, "_write_json", in_place)
    monkeypatch.setattr(faults, "_duration", lambda *_: 0.05)
    assert any(outcome.failed for outcome in checked("Save", "kill"))


def test_a_grad_mode_that_is_left_is_found(monkeypatch):
    def leave(*_):
        torch.set_grad_enabled(False)
        raise faults.Raised

    monkeypatch.setattr(faults.Capture, "run", leave)
    monkeypatch.setattr(faults, "_duration", lambda *_: 0.01)
    try:
        outcomes = checked("Capture", "exception", 1)
    finally:
        torch.set_grad_enabled(True)
    assert outcomes[0].what.startswith("grad mode changed") and outcomes[0].kind == DIFFERS


def test_an_error_of_another_kind_is_found(monkeypatch):
    monkeypatch.setattr(save, "_explained", lambda *_: faults.contextlib.nullcontext())
    assert any(outcome.kind == FOREIGN for outcome in checked("SaveInitialized", "full disk"))
