"""Training scripts of other projects, run unchanged and with one line changed."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from tests import forked


def needs(*packages: str) -> None:
    """Skip the test if a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def checkout(name: str) -> str:
    """The checkout of a trainer that is not a package, in the folder FIRSTLOSS_TRAINERS; without it the test is
    skipped."""
    folder = os.path.join(os.environ.get("FIRSTLOSS_TRAINERS", ""), name)
    if not os.environ.get("FIRSTLOSS_TRAINERS") or not os.path.isdir(folder):
        pytest.skip(f"no checkout of {name}: name the folder that it is in by FIRSTLOSS_TRAINERS")
    return folder


def changed(source: str, old: str, new: str) -> str:
    """`source` with its line `old` replaced by `new`, with the same indentation, and Firstloss imported at the top."""
    lines = source.splitlines()
    matches = [number for number, line in enumerate(lines) if line.strip() == old]
    assert matches, f"there is no line {old!r} any more"
    number = matches[0]
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = indent + new
    return "import firstloss as fl\n" + "\n".join(lines) + "\n"


def run(command: list[str], cwd: str | os.PathLike | None = None, **environment: str) -> str:
    """The output of a Python program; shows its stderr if it fails."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_ranks(script: str, world: int, *arguments: str) -> None:
    """Run a script as `world` processes connected over loopback."""
    errors = _run_ranks(script, world, *arguments)
    if errors and "EADDRINUSE" in errors:  # another process has taken the free port meanwhile
        errors = _run_ranks(script, world, *arguments)
    assert not errors, errors


def _run_ranks(script: str, world: int, *arguments: str) -> str:
    """The output of the ranks if one of them failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        forked.start(
            ["-c", script, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    errors = [rank.communicate(timeout=280)[1] for rank in ranks]
    if all(rank.returncode == 0 for rank in ranks):
        return ""
    return "\n".join(error[-2500:] for error in errors) or "a rank failed"
