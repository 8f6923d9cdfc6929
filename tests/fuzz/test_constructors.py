"""Some of the constructors that `python -m tests.fuzz constructors` generates."""

import pytest

from firstloss.rng import words_drawn

from . import constructors
from .outcome import DIFFERS, DISCARDED, FOREIGN, REFUSED
from .shrink import shrink


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_generated_constructors_match_eager(first):
    discarded = 0
    for seed in range(first, first + 25):
        source = constructors.generate(seed)
        outcome = constructors.check(source)
        if outcome.failed or outcome.kind == REFUSED:
            small = shrink(source, lambda text, like=outcome: constructors.check(text).like(like), most=60)
            pytest.fail(f"seed {seed}: {outcome}\n{small}")
        discarded += outcome.kind == DISCARDED
    assert discarded < 12


def test_the_same_seed_gives_the_same_program():
    assert constructors.generate(7) == constructors.generate(7) != constructors.generate(8)


PROGRAM = """import torch
SEED = 1
HOW = "whole"
def build():
    v0 = torch.ones(3)
    v1 = torch.randn(20)
    {}
    return Holder(locals())
def after(model, deferred):
    return model
"""


def test_the_fuzzer_finds_planted_faults(monkeypatch):
    real = words_drawn.draw
    assert not constructors.check(PROGRAM.format("pass")).failed
    monkeypatch.setattr(words_drawn, "draw", lambda *a, **k: real(*a, **k)._replace(words=19))
    outcome = constructors.check(PROGRAM.format("v1.mul_(2)"))
    assert outcome.kind == DIFFERS and "generator" in outcome.what
    small = shrink(PROGRAM.format("v1.mul_(2)"), lambda text: constructors.check(text).like(outcome), most=60)
    assert "torch.randn" in small and "mul_" not in small and "torch.ones" not in small


def test_foreign_errors_are_reported():
    outcome = constructors.check(PROGRAM.format("1 / 0"))
    assert outcome.kind == DISCARDED
    outcome = constructors.check(PROGRAM.format("import firstloss as fl; 1 / (1 - fl.is_deferred(v0))"))
    assert outcome.kind == FOREIGN and outcome.where.startswith("line 7: ")
