"""Process count, index and coordinator from launchers' environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import BackendError
from ...program.source import here

# SLURM provides no port: choose one by the job's number, in the dynamic range.
_PORTS = range(61440, 65536)
# torchrun's own store is at MASTER_PORT.
_PORT_OFFSET = 1


class LaunchedProcess(NamedTuple):
    """This process as its launcher describes it.

    Attributes:
        launcher: the launcher's name.
        coordinator: "host:port", where process 0 listens.
        processes: the number of processes.
        number: the index of this process.
    """

    launcher: str
    coordinator: str
    processes: int
    number: int


def launch_of(environ: Mapping[str, str]) -> LaunchedProcess | None:
    """Read the launcher's variables; None without a launcher, or if it started only this process.

    Raises:
        BackendError: if a variable is missing or not a number.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ and "JOB_COMPLETION_INDEX" in environ:
        launch = _of_torchrun(environ)
    elif "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        launch = _of_slurm(environ)
    else:
        return None
    if not 0 <= launch.number < launch.processes:
        raise BackendError(
            f"{here()}: {launch.launcher} says that this is process {launch.number} of {launch.processes}, counted "
            "from 0. Restart all processes, or pass the numbers to fl.distributed.initialize."
        )
    return launch if launch.processes > 1 else None


def _of_torchrun(environ: Mapping[str, str]) -> LaunchedProcess:
    """torchrun's variables, which Kubeflow sets as well. An indexed Kubernetes Job has another name for RANK, and gets
    MASTER_ADDR, MASTER_PORT and WORLD_SIZE from the Job's author."""
    index = "RANK" if "RANK" in environ else "JOB_COMPLETION_INDEX"
    launcher = "torchrun" if index == "RANK" else "the Kubernetes Job"
    port = _number(environ, "MASTER_PORT", launcher) + (_PORT_OFFSET if "TORCHELASTIC_RUN_ID" in environ else 0)
    host = _variable(environ, "MASTER_ADDR", launcher)
    return LaunchedProcess(
        launcher, f"{host}:{port}", _number(environ, "WORLD_SIZE", launcher), _number(environ, index, launcher)
    )


def _of_slurm(environ: Mapping[str, str]) -> LaunchedProcess:
    nodes = environ.get("SLURM_STEP_NODELIST") or _variable(environ, "SLURM_JOB_NODELIST", "SLURM")
    job = _number(environ, "SLURM_JOB_ID", "SLURM")
    port = _PORTS[job % len(_PORTS)]
    count, index = (_number(environ, name, "SLURM") for name in ("SLURM_NTASKS", "SLURM_PROCID"))
    return LaunchedProcess("SLURM", f"{first_node(nodes)}:{port}", count, index)


def first_node(nodes: str) -> str:
    """The first host of a list in SLURM's abbreviation: "gpu1" of "gpu[1-3,7],cpu0"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if match is None:
        raise BackendError(f"SLURM_STEP_NODELIST={nodes!r} is not a list of hosts.")
    return "".join(part or "" for part in match.groups())


def _variable(environ: Mapping[str, str], name: str, launcher: str) -> str:
    if not environ.get(name):
        raise BackendError(
            f"{here()}: {launcher} has started this process, but {name} is not in its environment. Set it, or pass "
            "the coordinator, the number of processes and this one's index to fl.distributed.initialize."
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = _variable(environ, name, launcher)
    if not text.isdecimal():
        raise BackendError(f"{here()}: {launcher} has set {name}={text!r}, which is not a number.")
    return int(text)
