"""Read the process count, index and coordinator from the environment variables of launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import BackendError
from ...program.source import here

# SLURM gives no port: one by the job's number, among those that nobody registers.
_PORTS = range(61440, 65536)
# torchrun's own store is at MASTER_PORT.
_BESIDE = 1


class LaunchedProcess(NamedTuple):
    """One process of the run.

    Attributes:
        launcher: who has said so.
        coordinator: "host:port", where process 0 listens.
        processes: how many there are.
        number: which one this is.
    """

    launcher: str
    coordinator: str
    processes: int
    number: int


def launch_of(environ: Mapping[str, str]) -> LaunchedProcess | None:
    """What the launcher of this process says; None if none has started it, or it alone.

    Raises:
        BackendError: if a part of it is missing, or no number.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ and "JOB_COMPLETION_INDEX" in environ:
        found = _of_torchrun(environ)
    elif "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        found = _of_slurm(environ)
    else:
        return None
    if not 0 <= found.number < found.processes:
        raise BackendError(
            f"{here()}: {found.launcher} says that this is process {found.number} of {found.processes}, counted "
            "from 0. Restart all of them, or give fl.distributed.initialize the numbers."
        )
    return found if found.processes > 1 else None


def _of_torchrun(environ: Mapping[str, str]) -> LaunchedProcess:
    """torchrun's variables, which Kubeflow sets, too; a Kubernetes Job that is indexed has a name of its own for RANK,
    and MASTER_ADDR, MASTER_PORT and WORLD_SIZE from whoever wrote the Job."""
    index = "RANK" if "RANK" in environ else "JOB_COMPLETION_INDEX"
    launcher = "torchrun" if index == "RANK" else "the Kubernetes Job"
    port = _number(environ, "MASTER_PORT", launcher) + (_BESIDE if "TORCHELASTIC_RUN_ID" in environ else 0)
    host = _said(environ, "MASTER_ADDR", launcher)
    return LaunchedProcess(
        launcher, f"{host}:{port}", _number(environ, "WORLD_SIZE", launcher), _number(environ, index, launcher)
    )


def _of_slurm(environ: Mapping[str, str]) -> LaunchedProcess:
    nodes = environ.get("SLURM_STEP_NODELIST") or _said(environ, "SLURM_JOB_NODELIST", "SLURM")
    job = _number(environ, "SLURM_JOB_ID", "SLURM")
    port = _PORTS[job % len(_PORTS)]
    count, index = (_number(environ, name, "SLURM") for name in ("SLURM_NTASKS", "SLURM_PROCID"))
    return LaunchedProcess("SLURM", f"{first_node(nodes)}:{port}", count, index)


def first_node(nodes: str) -> str:
    """The first of a list of hosts as SLURM abbreviates it: "gpu1" of "gpu[1-3,7],cpu0"."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if found is None:
        raise BackendError(f"SLURM_STEP_NODELIST={nodes!r} is no list of hosts.")
    return "".join(part or "" for part in found.groups())


def _said(environ: Mapping[str, str], name: str, launcher: str) -> str:
    if not environ.get(name):
        raise BackendError(
            f"{here()}: {launcher} has started this process, and {name} is not in its environment. Set it, or give "
            "fl.distributed.initialize the coordinator, the number of processes and this one's."
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = _said(environ, name, launcher)
    if not text.isdecimal():
        raise BackendError(f"{here()}: {launcher} has set {name}={text!r}, which is no number.")
    return int(text)
