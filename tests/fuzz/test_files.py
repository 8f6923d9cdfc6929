"""Some of the damaged files that `python -m tests.fuzz files` makes and reads."""

import contextlib

import pytest

from firstloss.cli import target
from firstloss.runtime.checkpoint import checkpoint, file, foreign

from . import files
from .outcome import DIFFERS, FOREIGN, HUNG

COUNTS = {"run_file": 60, "module": 150, "config": 200, "distributed": 150}


@pytest.mark.parametrize("name", files.READERS)
def test_damaged_files_are_read_or_are_an_error(name):
    for number in range(COUNTS.get(name, 400)):
        outcome = files.check_file(name, number)
        assert not outcome.failed, outcome


def test_files_of_all_readers_are_generated():
    programs = [files.generate(seed) for seed in range(len(files.READERS))]
    assert all(any(f"READER = {name!r}" in program for program in programs) for name in files.READERS)


@pytest.mark.parametrize("name", files.READERS)
def test_undamaged_files_are_read(name, tmp_path):
    if name == "executable":  # which another test reads, in its own folder
        return
    reader = files.READERS[name]
    for path, content in reader.seeds()[0].items():
        (tmp_path / path).write_bytes(content)
    reader.read(tmp_path)


def first_fault(name, count=300):
    outcomes = (files.check_file(name, number) for number in range(count))
    return next((outcome for outcome in outcomes if outcome.failed), None)


def test_the_fuzzer_finds_errors_of_other_kinds(monkeypatch):
    monkeypatch.setattr(file, "damage_as_errors", contextlib.nullcontext)
    assert first_fault("safetensors").kind == FOREIGN


def test_the_fuzzer_finds_code_that_runs(monkeypatch):
    def unsafe(path, lazily):
        try:
            return files.pickle.load(open(path, "rb"))
        except Exception as error:
            raise files.fl.errors.CheckpointError("damaged") from error

    monkeypatch.setattr(foreign, "load_torch", unsafe)
    assert first_fault("torch").kind == DIFFERS


def test_the_fuzzer_finds_endless_readers(monkeypatch):
    monkeypatch.setattr(files, "_SECONDS", 0.05)
    monkeypatch.setattr(checkpoint, "parse", lambda text: [None for _ in iter(int, 1)])
    assert first_fault("folder", 3).kind == HUNG


def test_the_fuzzer_finds_readers_that_take_memory(monkeypatch):
    monkeypatch.setattr(files, "_MORE_MEMORY", 1 << 24)
    monkeypatch.setattr(target, "load", lambda *_: b"\1" * (1 << 30))
    assert first_fault("config", 3).what.startswith("MemoryError")
