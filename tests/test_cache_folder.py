"""Where compiled steps are cached: not in the working directory unasked, nowhere that others may write, and bounded."""

import os
import pickle
import stat
import subprocess
import sys
import time

import pytest
import torch

import firstloss as fl
from firstloss import cache_folder
from firstloss.errors import BackendError, CacheFolderWarning
from tests import forked

STEP = """
import sys, warnings
import torch, firstloss as fl
backend = fl.backend("XLA"{arguments})
print(fl.trace(lambda x: x * 2)(torch.ones(3)).tolist())
"""


def run(folder, arguments="", **environment):
    """The output of a step in a process of its own, in the working directory `folder`."""
    variables = {"PYTHONPATH": os.path.join(forked.ROOT, "src"), **environment}
    command = [sys.executable, "-c", STEP.format(arguments=arguments)]
    kept = {key: value for key, value in os.environ.items() if key != "FIRSTLOSS_CACHE"}
    done = subprocess.run(command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 2.0, 2.0]\n"
    return done.stderr


def test_it_is_in_the_platforms_folder_for_caches(tmp_path):
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    first = run(work, HOME=str(home), XDG_CACHE_HOME="")
    assert f"compiled steps are cached in {home}/.cache/firstloss/compiled; FIRSTLOSS_CACHE moves" in first
    assert list(work.iterdir()) == []
    assert "FIRSTLOSS_CACHE" not in run(work, HOME=str(home), XDG_CACHE_HOME="")
    assert stat.S_IMODE((home / ".cache/firstloss/compiled").stat().st_mode) == 0o700


def test_a_variable_moves_it(tmp_path):
    run(tmp_path, HOME=str(tmp_path / "home"), FIRSTLOSS_CACHE=str(tmp_path / "elsewhere"))
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a file system that even root cannot write to")
@pytest.mark.parametrize("arguments", ["", ", artifact_dir='/proc/artifacts'"])
def test_a_step_runs_where_nothing_can_be_written(arguments, tmp_path):
    text = run("/proc", arguments, HOME="/proc/home", FIRSTLOSS_CACHE="/proc/cache")
    assert "CacheFolderWarning: " in text and "compiled steps are not cached in /proc/" in text


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(mode, tmp_path):
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(CacheFolderWarning, match=f"not cached in {folder}: others may write to it"):
        fl.backend("XLA", artifact_dir=tmp_path)
    assert fl.trace(lambda x: x + 1)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert list(folder.iterdir()) == []


def test_compile_only_needs_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.warns(CacheFolderWarning),
        pytest.raises(BackendError, match=r"compile_only=True leaves .*Pass compile_dir"),
    ):
        fl.backend("XLA", compile_dir=tmp_path / "file", compile_only=True)


def test_a_renamed_executable_is_not_run(tmp_path):
    from firstloss.runtime.step.executable_cache import Entry

    class Compiled:
        pass

    entry = Entry(tmp_path, "a" * 64)
    content = pickle.dumps("not an executable")
    entry.path.write_bytes(entry._digest(content) + content)
    other = Entry(tmp_path, "b" * 64)
    os.rename(entry.path, other.path)
    other.found = True
    assert other.load() is None and not other.found


def test_the_least_recently_used_files_go_when_there_are_too_many(tmp_path):
    for i in range(10):
        path = tmp_path / "compiled" / str(i)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        used = time.time() - 1000 * (10 - i)
        os.utime(path, (used, used))
    cache_folder.bound(tmp_path, limit=1000)
    assert len(list((tmp_path / "compiled").iterdir())) == 10
    (tmp_path / ".size-checked").unlink()
    cache_folder.bound(tmp_path, limit=500)
    assert sorted(path.name for path in (tmp_path / "compiled").iterdir()) == ["6", "7", "8", "9"]
    cache_folder.bound(tmp_path, limit=100)  # looked at today already
    assert len(list((tmp_path / "compiled").iterdir())) == 4


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/firstloss"),
        ("linux", {"HOME": "/h"}, "/h/.cache/firstloss"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Caches/firstloss"),
        ("linux", {"FIRSTLOSS_CACHE": "/c/d", "XDG_CACHE_HOME": "/x"}, "/c/d"),
    ],
)
def test_the_platforms_folder(platform, variables, expected, monkeypatch):
    for name in ("FIRSTLOSS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert str(cache_folder.default()) == expected
