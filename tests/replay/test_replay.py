"""`make replay` in its smallest form: it records everything, and detects changes."""

import subprocess
import sys

import pytest

from tests.replay import __main__ as replay
from tests.replay import record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("replay") / "now.json.gz"
    return out, replay.record(replay.ROOT / "src", out, ["--size", "tiny"])


def test_everything_is_recorded(recorded):
    texts = recorded[1]
    assert not [name for name in texts if name.endswith("/error")]
    for what in ("program", "recipes", "weights", "generator"):
        assert texts[f"constructor/odd-eager/{what}"]
    assert texts["constructor/odd-eager/weights"] != texts["constructor/odd-counter/weights"]
    for what in ("program", "losses", "stablehlo"):
        assert texts[f"step/mlp/{what}"]


def test_the_same_code_gives_the_same(recorded):
    path = recorded[0]
    process = subprocess.run(
        [sys.executable, "-m", "tests.replay", "--size", "tiny", "--against", str(path)],
        cwd=replay.ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout
    assert "0 of" in process.stdout.splitlines()[-1]


@pytest.mark.parametrize("what", ["program", "recipes", "weights", "generator"])
def test_a_change_is_found(recorded, what):
    old, name = recorded[1], f"constructor/odd-eager/{what}"
    new = {**old, name: "~" + old[name][1:]}
    (difference,) = replay.compare(old, new)
    assert difference.startswith(f"{name} differs") and "+~" in difference


def test_missing_and_new_texts_are_found():
    assert replay.compare({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ["a: only before", "c: only now"]


def test_names_and_lines_are_left_out():
    assert record.strip_sources("%1 = aten.zeros()  # /a/b.py:3\nreturn") == "%1 = aten.zeros()\nreturn"
    assert record.strip_names("@main calls @segment_3, @main") == "@0 calls @1, @0"
    assert record.strip_names("@main calls @segment_3") != record.strip_names("@main calls @main")
