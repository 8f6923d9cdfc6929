"""Random training programs: traced, they match eager PyTorch or are refused at the line that the error names."""

import collections

import pytest

from tests.fuzz.pool import check_all

EACH = 20
# Few programs may be refused (a value read in the step). Of 1,000 programs 1 to 2% are; samples this small scatter.
REFUSED = 0.1


def outcomes(seeds):
    checked = list(check_all("steps", seeds, 1))
    assert not [f"seed {seed}: {outcome.what}" for seed, _, outcome in checked if outcome.failed]
    assert not [seed for seed, _, outcome in checked if outcome.kind == "refused" and not outcome.where]
    return checked


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.sweep] * (first >= 200)) for first in range(0, 1000, EACH)],
)
@pytest.mark.timeout(600)
def test_generated_steps_match_eager(first):
    checked = outcomes(range(first, first + EACH))
    counts = collections.Counter(outcome.kind for _, _, outcome in checked)
    assert counts["refused"] <= REFUSED * len(checked)
    assert counts["same"] >= 0.8 * len(checked), "or the programs have nothing to compare"


@pytest.mark.timeout(600)
def test_generated_steps_match_eager_when_compiled(monkeypatch):
    """As users run them; the other programs run with PyTorch's kernels (`interpret.py`) in a tenth of the time."""
    monkeypatch.setenv("FIRSTLOSS_FUZZ_COMPILE", "1")
    outcomes(range(1000, 1006))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, 100])
def test_generated_steps_match_eager_when_replayed(first, monkeypatch):
    """As on the "GPU" backend, but for the CUDA graph."""
    monkeypatch.setenv("FIRSTLOSS_FUZZ_BACKEND", "GPU")
    outcomes(range(first, first + EACH))
