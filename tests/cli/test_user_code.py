"""Side effects of the user's constructor: its output is kept out of the command's, and an exit is a failure."""

import json
import os
import sys
from pathlib import Path

import pytest

from firstloss import cli
from firstloss.cli import output
from tests import forked

HERE = Path(__file__).parent
COMMANDS = {
    "inspect": ["inspect"],
    "verify": ["verify"],
    "init": ["init", "-o", "weights"],
    "stablehlo": ["stablehlo", "-o", "module.mlir"],
}


def arguments(command, target, tmp_path):
    first, *rest = COMMANDS[command]
    return [first, target, *(str(tmp_path / a) if a in ("weights", "module.mlir") else a for a in rest)]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_prints_go_to_stderr(command, tmp_path):
    """Also output of C code, of other processes, and at exit."""
    ran = forked.run(
        ["-m", "firstloss", *arguments(command, "misbehaving_target:printing", tmp_path), "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(Path(cli.__file__).parents[2])])},
        capture_output=True,
        check=True,
    )
    assert isinstance(json.loads(ran.stdout), dict)
    for line in ("a line from the constructor", "and another", "past Python", "from a process", "from a thread"):
        assert line in ran.stderr
    assert "at the end" in ran.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_stdout_has_only_the_json_object(command, tmp_path, capsys):
    stdout = sys.stdout
    assert cli.main([*arguments(command, "misbehaving_target:printing", tmp_path), "--json"]) == 0
    assert sys.stdout is stdout
    captured = capsys.readouterr()
    assert isinstance(json.loads(captured.out), dict)
    assert "a line from the constructor" in captured.err


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("target", ["leaving", "leaving_without_a_word"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_constructor_that_exits_is_a_failure(command, target, as_json, tmp_path, capsys):
    options = ["--json"] if as_json else []
    assert cli.main([*arguments(command, f"misbehaving_target:{target}", tmp_path), *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "SystemExit" in captured.err and "misbehaving_target.py:" in captured.err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_nan_is_not_written_as_json(capsys):
    output.print_json({"loss": float("nan"), "best": [float("inf"), 1.0], "steps": 3})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "loss": None,
        "best": [None, 1.0],
        "steps": 3,
    }
