"""`make gpu`: parts that fail or hang do not stop the others; the table shows the results."""

import json
import sys

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import PARTS, Part
from benchmarks.gpu.table import rows, table


def found_of(tmp_path, monkeypatch, code, limit=20):
    """The recorded result of a part that runs `code`."""
    real = command.subprocess.Popen

    def popen(args, **kwargs):
        return real([sys.executable, "-c", code, args[args.index("--into") + 1]], **kwargs)

    monkeypatch.setattr(command.subprocess, "Popen", popen)
    return command.in_process(Part("one part", limit), True, tmp_path)


def test_a_part_that_fails_says_why(tmp_path, monkeypatch):
    record = found_of(tmp_path, monkeypatch, "raise SystemExit('no luck')")
    assert not record["ok"] and "no luck" in record["error"]


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    record = found_of(tmp_path, monkeypatch, code, limit=2)
    assert not record["ok"] and record["error"] == "ran past its limit" and record["took"] < 20


def test_results_of_a_part_are_kept(tmp_path, monkeypatch):
    code = "import sys, json; open(sys.argv[1], 'w').write(json.dumps({'ok': True, 'n': 7}))"
    record = found_of(tmp_path, monkeypatch, code)
    assert record["ok"] and record["n"] == 7


@pytest.mark.parametrize("half", [1, 2])
def test_each_half_fits_into_ten_minutes(half):
    """Limits are for failures; the expected time is at most half of each."""
    assert sum(part.limit for part in PARTS if part.half == half or part.name == "device") / 2 < 600


def test_the_table_shows_the_results():
    side = {"ok": True, "first loss": 10.0, "step": 0.1, "steady after": 12.0}
    parts = {f"first loss 8B {name}": dict(side) for name in ("eager", "graph", "xla", "compile whole")}
    parts["first loss 8B xla"].update({"first loss": 12.0, "step": 0.2})
    parts["cpu bits"] = {"ok": True, "seconds": 0.2, "first": 0.5, "capture": 0.1, "same bits": True}
    targets_met = {what: targets_met for what, _, _, targets_met in rows(parts)}
    assert targets_met["8B, graph: first loss"] and not targets_met["8B, xla: first loss"]
    assert targets_met["8B, graph: after that"] and not targets_met["8B, xla: after that"]
    assert targets_met["float32 with the CPU's bits, made on the GPU"] is False
    parts["one hash"] = {"ok": False, "error": "it | broke"}
    text = table({"parts": parts, "commit": "abc", "at": "now", "tiny": False})
    assert "* one hash: it / broke" in text and "not met" in text
    assert "not met" not in table({"parts": parts, "commit": "abc", "at": "now", "tiny": True})


def test_results_are_written_to_the_docs(tmp_path, monkeypatch):
    page = tmp_path / "docs" / "measurements.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    halves = []
    for n, parts in enumerate(
        ({"device": {"ok": True, "device": "H100"}}, {"tests": {"ok": True, "report": ["7 passed"]}})
    ):
        halves.append(tmp_path / f"{n}.json")
        halves[-1].write_text(json.dumps({"parts": parts, "commit": "abc", "at": "now", "tiny": False}))
    command.write_docs(halves)
    text = page.read_text()
    assert "H100" in text and "7 passed" in text and "old" not in text and text.endswith("after\n")
