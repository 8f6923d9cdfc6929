"""The command as a process: exit status, one-line errors, imports."""

import json
import os
import subprocess
import sys

import pytest

import firstloss
from firstloss.cli import main
from tests import forked

SOURCE = os.path.dirname(os.path.dirname(firstloss.__file__))


def command(*arguments, cwd=None, **environment):
    """Run `firstloss` with the given arguments."""
    return subprocess.run(
        [sys.executable, "-m", "firstloss", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
    )


@pytest.mark.parametrize("arguments", [(), ("demo",), ("inspect",), ("init",), ("verify",)])
def test_help_has_an_example(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "example:" in text and f"firstloss {' '.join(arguments)}" in text


def test_help_imports_neither_torch_nor_jax():
    code = (
        "import sys\n"
        "from firstloss.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'jax', 'numpy', 'rich', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["demo", "--steps", "0"], "'0' is not a positive number"),
        (["verify"], "required: TARGET"),
    ],
)
def test_wrong_arguments_are_a_one_line_error(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == ""
    assert says in captured.err and captured.err.count("\n") == 1 and "--help" in captured.err


@pytest.mark.parametrize("name", ["inspect", "init", "verify"])
def test_a_wrong_target_is_a_one_line_error_with_status_1(name, capsys):
    assert main([name, "torchh:Linear", *(["-o", "nowhere"] if name == "init" else [])]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"firstloss {name}: TARGET 'torchh:Linear': there is no module 'torchh'")


def test_python_m_firstloss_is_the_command():
    done = command("verify", "torchh:Linear", "--json")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1


def test_debug_shows_the_traceback():
    done = command("verify", "torchh:Linear", FIRSTLOSS_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_missing_library_names_its_extra(monkeypatch, capsys):
    def missing(args):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr("firstloss.cli.demo.run", missing)
    assert main(["demo"]) == 1
    output = capsys.readouterr().err
    assert "rich is not installed: pip install " in output and "[cli]" in output


def test_an_interrupt_exits_with_status_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("firstloss.cli.demo.run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "firstloss demo: interrupted\n"


def test_a_full_disk_names_the_file(monkeypatch, capsys):
    def full(args):
        raise OSError(28, "No space left on device", "demo/timeline.png")

    monkeypatch.setattr("firstloss.cli.demo.run", full)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "firstloss demo: demo/timeline.png: No space left on device\n"


def test_verify_reports_identical_models(capsys):
    assert main(["verify", "torch.nn:Linear", "--arg", "in_features=5", "--arg", "out_features=7", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] and result["tensors"] == 2 and result["bytes"] == 4 * (35 + 7)
    assert main(["verify", "torch.nn:Linear", "--arg", "in_features=5", "--arg", "out_features=7"]) == 0
    assert "2 tensors, 168 B, and the random generator are bit-identical" in capsys.readouterr().out


def test_inspect_reports_the_weights(capsys):
    target = ["inspect", "torch.nn:Linear", "--arg", "in_features=5", "--arg", "out_features=7"]
    assert main([*target, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["weights"]
    assert [(row["weight"], row["shape"], row["position"]) for row in rows] == [
        ("weight", [7, 5], 0),
        ("bias", [7], 35),
    ]
    assert main(target) == 0
    output = capsys.readouterr().out
    assert "uniform(-0.4472" in output and "2 weights, 42 parameters" in output


BLOCKED = """
import contextlib, io, json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
assert not {blocked} & set(sys.modules)
sys.meta_path.insert(0, Blocked())
from firstloss.cli import main
outcomes = {{}}
for name, arguments in json.load(open(sys.argv[1])).items():
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        outcomes[name] = main(arguments), output.getvalue()
print(json.dumps(outcomes))
"""
OF_EXTRA = {"cli": ("rich", "matplotlib", "jsonargparse"), "xla": ("jax", "jaxlib"), "demo": ("transformers",)}
LINEAR = ["torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=4"]
COMMANDS = {
    "inspect": ["inspect", *LINEAR],
    "verify": ["verify", *LINEAR],
    "init": ["init", *LINEAR, "-o", "{folder}/weights"],
    "stablehlo": ["stablehlo", *LINEAR, "-o", "{folder}/module.mlir"],
    "plan": ["plan", *LINEAR, "--mesh", "fsdp=2", "--batch", "4x3"],
    "demo": ["demo", "--out", "{folder}/demo"],
    "fit": ["fit", "examples/byte_lm.yaml", "--trainer.model_dir={folder}/run"],
}


@pytest.mark.parametrize("without", OF_EXTRA)
def test_without_an_extra_a_command_runs_or_names_it(tmp_path, without):
    script = BLOCKED.format(blocked=set(OF_EXTRA[without]))
    # `fit` does not need the demo's extra, and would train.
    commands = {name: commands for name, commands in COMMANDS.items() if (name, without) != ("fit", "demo")}
    commands = {
        name: [argument.format(folder=tmp_path) for argument in arguments] for name, arguments in commands.items()
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "told.json").write_text(json.dumps(commands))
    command = ["-c", script, str(tmp_path / "told.json")]
    done = forked.run(command, capture_output=True, timeout=250, env=environment, jax=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes.keys() == commands.keys() and any(status for status, _ in outcomes.values())
    for name, (status, output) in outcomes.items():
        if status:
            assert f"[{without}]" in output and "pip install" in output, (name, output)
            assert len(output.splitlines()) == 1, (name, output)


@pytest.mark.parametrize(
    "came, command",
    [
        ({"url": "file://{folder}", "dir_info": {"editable": True}}, "pip install '{folder}[xla]'"),
        ({"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         "pip install 'firstloss[xla] @ git+https://example.org/x.git@abc'"),
        (None, "pip install 'firstloss[xla]'"),
    ],
)  # fmt: skip
def test_hints_are_commands_that_work(tmp_path, monkeypatch, came, command):
    import importlib.metadata
    import json
    from types import SimpleNamespace

    from firstloss import dependencies

    text = None if came is None else json.dumps(came).replace("{folder}", str(tmp_path))
    distribution = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    assert dependencies.install("xla") == command.replace("{folder}", str(tmp_path))
