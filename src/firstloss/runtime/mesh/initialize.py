"""Joining of the processes of a run."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading

import jax
import torch

from ...compat.jax_names import distributed_client
from ...errors import BackendError
from .launchers import LaunchedProcess


def join(launch: LaunchedProcess, version: str, timeout: int, heartbeat: int) -> None:
    """Wait for all processes, and check that they run the same versions; `version` is Firstloss's.

    If they do not all join in time, this process is killed with a message. (JAX's client would do so without one.)

    Raises:
        BackendError: if they run different versions.
    """
    who = f"process {launch.number} of {launch.processes}"

    def late() -> None:
        sys.stderr.write(
            f"firstloss: {who} ({launch.launcher}) has waited {timeout} s for the others at {launch.coordinator}, and "
            "not all have joined. Check that each has been started and can reach that address; "
            "fl.distributed.initialize(timeout=...) waits longer.\n"
        )
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # there is no other way to end the main thread's wait

    timer = threading.Timer(timeout, late)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            launch.coordinator,
            num_processes=launch.processes,
            process_id=launch.number,
            initialization_timeout=timeout + 60,
            heartbeat_timeout_seconds=heartbeat,
        )
    finally:
        timer.cancel()
    client = distributed_client()
    if client is None:
        return
    client.key_value_set(f"firstloss/versions/{launch.number}", versions(version))
    keys = [f"firstloss/versions/{number}" for number in range(launch.processes)]
    first, *others = [client.blocking_key_value_get(key, timeout * 1000) for key in keys]
    differing = [(i, other) for i, other in enumerate(others, 1) if other != first]
    if differing:
        number, other = differing[0]
        raise BackendError(
            f"{who}: the processes run different versions: process 0 has {first}, but process {number} has {other}"
            + (f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else "")
            + ". Install the same versions for all of them."
        )


def versions(version: str) -> str:
    """The versions that this process runs."""
    parts = {"firstloss": version, "jax": jax.__version__, "torch": torch.__version__}
    return ", ".join(f"{name} {version}" for name, version in {**parts, "python": platform.python_version()}.items())
