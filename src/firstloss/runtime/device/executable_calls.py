"""Calls of executables: without Python code in between, of which few enough are in flight, and with enough memory."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ...compat.jax_names import executable_of, make_cpp_call
from ...errors import StepMemoryError
from ..jax_support import on_cpu

# XLA's CPU client runs up to 32 executions per device, and launches the 33rd in a thread that the others need to
# finish: several devices in one process would deadlock.
_MAX_IN_FLIGHT = 16


class _InFlight:
    """The executions in flight on a mesh of CPU devices, limited in number."""

    def __init__(self) -> None:
        self._arrays: collections.deque[jax.Array] = collections.deque()

    def wait(self) -> None:
        """Wait until another execution may start."""
        while len(self._arrays) >= _MAX_IN_FLIGHT:
            array = self._arrays.popleft()
            if array.is_deleted():  # donated to a later execution
                continue
            with contextlib.suppress(Exception):  # errors are raised where the result is used
                array.block_until_ready()

    def add(self, array: jax.Array) -> None:
        """Register an execution that produces `array`."""
        self._arrays.append(array)


in_flight = _InFlight()


def direct(compiled: Any) -> Callable[..., Any]:
    """A function that calls `compiled` without Python code in between, from the second call on."""
    call: Callable[..., Any] | None = make_cpp_call(compiled, executable_of(compiled))
    return compiled if call is None else call


def probe_memory(executables: Iterable[Any]) -> None:
    """Check that there is memory for the executables' temporaries, before state is donated to them.

    Raises:
        StepMemoryError: if there is not. If a device ran out of memory within a step, the state would be lost.
    """
    if not on_cpu():
        return
    for executable in executables:
        analysis = executable.memory_analysis()
        if analysis is None:
            continue
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        try:
            np.empty(max(needed, 0), np.uint8)
        except (MemoryError, ValueError):
            raise StepMemoryError(
                f"the step needs {needed / 2**30:.1f} GiB of memory for temporaries, which the device "
                "does not have. Nothing has been changed: call the step with a smaller batch."
            ) from None
