import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import firstloss as fl
from firstloss import cli, errors
from firstloss.cli import doctor
from firstloss.compat.patches import PATCHES
from firstloss.runtime import lazy_jax

ROOT = Path(__file__).parents[2]


def report(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_says_what_is_installed_and_used(capsys):
    import jax
    import torch

    found = report(capsys)
    assert found["packages"]["firstloss"] == fl.__version__
    version = found["packages"]["torch"]  # with or without the build, by the wheel
    assert torch.__version__.partition("+")[0] == version.partition("+")[0]
    assert found["packages"]["jax"] == jax.__version__
    assert found["supported"]["torch"].startswith(">=") or not found["supported"]  # without an installed package
    assert found["devices"]["jax"] == jax.default_backend()
    assert found["processor"]["cores"] == len(os.sched_getaffinity(0)) and found["processor"]["memory"] > 1 << 28
    if sys.platform == "linux":
        assert re.fullmatch(r"\w+: [\d.]+ GB/s, and [\d.]+ GB/s in small pages", found["processor"]["huge pages"])
    assert {name for names in found["patches"].values() for name in names} == set(PATCHES)
    assert set(found["parts in C"]) == set(doctor.PARTS)


def test_the_table_has_the_same_sections(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for title in ("packages", "processor", "parts in C", "cache", "patches"):
        assert f"\n{title}" in f"\n{text}"


def test_every_part_in_c_is_examined():
    tree = ast.parse((ROOT / "setup.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {path.stem for path in (ROOT / "src").rglob("_*.c")}
    assert {name.rpartition("/")[2] for name in doctor.PARTS} == names
    assert all(any(name in text for text in texts) for name in names)


def test_what_was_not_built_is_a_problem(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    monkeypatch.setattr("firstloss.rng.native.available", lambda: False)
    found = report(capsys)
    assert found["parts in C"]["rng/_fill"] == "not built"
    assert any("rng/_fill" in problem and "compiler" in problem for problem in found["problems"])


def test_a_cache_that_cannot_be_written_is_a_problem(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FIRSTLOSS_CACHE", str(tmp_path / "cache"))
    assert not any("cached" in problem for problem in report(capsys)["problems"])
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert any("FIRSTLOSS_CACHE" in problem for problem in report(capsys)["problems"])


def test_it_needs_neither_jax_nor_rich(tmp_path):
    """What a bug report of a half-finished installation needs."""
    for name in ("jax", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    code = "import importlib.metadata as m, sys; old = m.version\n" + (
        "def version(name):\n"
        "    if name in ('jax', 'jaxlib'): raise m.PackageNotFoundError(name)\n"
        "    return old(name)\n"
        "m.version = version\n"
        "from firstloss.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    run = [sys.executable, "-c", code, "doctor"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*run, "--json"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packages"]["jax"] is None and any("JAX is not installed" in p for p in found["problems"])
    assert found["parts in C"]["lower/_aten"] == "not needed" and "jax" not in found["devices"]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "--json" in done.stderr


@pytest.mark.parametrize(("file", "extra"), [("/dev/nvidia0", "cuda"), ("/dev/accel0", "tpu")])
def test_an_accelerator_that_jax_was_installed_without_is_named(file, extra, monkeypatch, tmp_path):
    import fnmatch

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(lazy_jax, "is_cpu_only", lambda: True)
    monkeypatch.setattr(lazy_jax.glob, "glob", lambda pattern: [file] if fnmatch.fnmatch(file, pattern) else [])
    with pytest.warns(errors.UnusedAcceleratorWarning, match=rf"pip install .*\[{extra}\]"):
        fl.backend("XLA", artifact_dir=tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # meant
    assert lazy_jax.unused_accelerator() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(lazy_jax, "is_cpu_only", lambda: False)
    assert lazy_jax.unused_accelerator() is None
