"""Some of the checkpoints that `python -m tests.fuzz checkpoints` generates and damages."""

import collections

import pytest

from firstloss.runtime.checkpoint import file as checkpoint_file

from . import checkpoints
from .outcome import DIFFERS, REFUSED, SAME


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_loaded_checkpoints_are_correct_or_an_error(first):
    kinds = collections.Counter()
    for seed in range(first, first + 30):
        source = checkpoints.generate(seed)
        outcome = checkpoints.check(source)
        assert not outcome.failed, f"seed {seed}: {outcome}\n{source}"
        kinds[outcome.kind] += 1
    assert kinds[SAME] > 5 and kinds[REFUSED] > 3


PROGRAM = """import torch
SEED, NAME, KILLS = 1, "it", {kills}
HARMS = {harms}
def before():
    return {{"a": torch.randn(3000)}}
def now():
    return {{"a": torch.randn(3000), "b": [1, 2]}}
"""


def test_the_fuzzer_finds_planted_faults(monkeypatch):
    flipped = PROGRAM.format(kills=[], harms=[("flip", 0.99, 0.9)])
    assert checkpoints.check(flipped).kind == REFUSED
    monkeypatch.setattr(checkpoint_file.zlib, "crc32", lambda data, *start: 0)
    assert checkpoints.check(flipped).kind == DIFFERS


def test_the_fuzzer_finds_a_save_that_loses_the_previous_checkpoint(monkeypatch):
    kills = [k / 40 for k in range(40)]
    assert checkpoints.check(PROGRAM.format(kills=kills, harms=[])).kind == SAME
    from firstloss.runtime.checkpoint import checkpoint

    real = checkpoint._write_json

    def in_place(path, content):
        with open(path, "w") as file:
            file.write("{")
            file.flush()
            checkpoint.os.fsync(file.fileno())
        real(path, content)

    monkeypatch.setattr(checkpoint, "_write_json", in_place)
    assert checkpoints.check(PROGRAM.format(kills=kills, harms=[])).kind == DIFFERS
