"""docs/model-steps.jsonl: rerunning one model changes only its row."""

import json

import pytest

from . import model_page
from .model_page import PAGE, ROWS, keep, read_rows, write_page

OUTCOME = {"zoo": "transformers", "name": "bert", "verdict": "same", "why": "", "weights": 7, "tensors": 2}
COMPARED = {"loss": 1.0, "eager loss": 2.0, "worst": "w", "distance": 1.23e-7, "allowed": 1e-4, "seconds": {"trace": 3}}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setattr(model_page, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(model_page, "PAGE", tmp_path / "page.md")
    model_page.ROWS.write_bytes(ROWS.read_bytes())
    return model_page.ROWS


def test_an_outcome_replaces_only_its_own_row(rows):
    before = rows.read_text().splitlines()
    keep({**OUTCOME, **COMPARED})
    after = rows.read_text().splitlines()
    actual = [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert [json.loads(after[place])["name"] for place in actual] == ["bert"]
    assert read_rows()["transformers", "bert"]["distance"] == 1.2e-7
    assert read_rows()["transformers", "bert"]["loss"] == 0.5


def test_a_run_cut_short_replaces_no_outcome(rows):
    before = rows.read_text()
    keep({**OUTCOME, "verdict": "late", "why": "no outcome"})
    assert rows.read_text() == before
    keep({**OUTCOME, "name": "new", "verdict": "late", "why": "no outcome"})
    assert read_rows()["transformers", "new"]["verdict"] == "late"


def test_the_page_is_up_to_date(rows):
    write_page()
    assert model_page.PAGE.read_text() == PAGE.read_text()
