"""Run traced operations one by one with PyTorch's own kernels instead of compiling them.

A generated program is run once, and compiling its steps with XLA takes nine tenths of its time. The faults that these
programs find, in guards, effects, arguments and state, are the same either way, and the results are bit-identical to
PyTorch's, so no tolerance is needed. The lowering rules have tests of their own (`tests/lower`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from firstloss.runtime.backend import Backend
from firstloss.runtime.device.lazy_array import ready
from firstloss.runtime.jax_support import share_memory, to_host
from firstloss.runtime.step import compiling
from firstloss.runtime.step.inputs import Inputs
from firstloss.runtime.step.step_replay import StepReplay
from firstloss.runtime.step.traced_program import TracedProgram

WHOLE = "FIRSTLOSS_FUZZ_COMPILE"  # set in the environment: compile steps as users do
_compile = compiling.compile_step


class _Run:
    """One execution: same arguments as a compiled step, and donates the state likewise."""

    later = None

    def __init__(self, step: Interpreted, state: Sequence[Any], rest: Sequence[Any]) -> None:
        self._step = step
        self._given = state, rest
        self._results: dict[str, Any] = {}

    def take_early(self, before: Any, inputs: Sequence[Any], inputs_before: Sequence[Any]) -> None:
        """Takes over nothing, but inputs that are described alike must be alike."""
        if not isinstance(before, _Run):
            return
        arrays, others = ([jax.numpy.asarray(ready(a)) for g in run._given for a in g] for run in (self, before))
        for array, described in zip(arrays, inputs, strict=True):
            for other, described_before in zip(others, inputs_before, strict=True):
                assert described != described_before or np.array_equal(array, other, equal_nan=True), described

    def prepare(self) -> None:
        self._results = self._step.execute(*self._given)

    def early(self) -> list[Any]:
        return [self._results[name] for name in self._step.early]

    def finish(self) -> None:
        for array in self._given[0]:
            if isinstance(array, jax.Array):
                array.delete()
        self._step.ran = True

    def outputs(self) -> tuple:
        return tuple(tuple(self._results[name] for name in names) for names in self._step.groups)


class Interpreted:
    """Replaces the executable of a step: runs its Program, operation by operation."""

    ran = False

    def __init__(self, traced: TracedProgram) -> None:
        self._program = traced.program
        self._inputs = [*traced.owners.changed, *traced.owners.read]
        self.groups = traced.groups.outputs
        self.early = traced.early

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> _Run:
        return _Run(self, state, rest)

    def execute(self, state: Sequence[Any], rest: Sequence[Any]) -> dict[str, Any]:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            replay = StepReplay()
            for value, array in zip(self._inputs, [*state, *rest], strict=True):
                logical = to_host(jax.numpy.asarray(ready(array)))
                replay.buffers[value] = value.empty().copy_(logical.reshape(value.shape))
            replay.run(self._program.nodes)
            return {
                name: jax.numpy.array(share_memory(ref.view(replay.buffer(ref.value)).contiguous()), copy=True)
                for name, ref in self._program.outputs.items()
            }


def instead_of_compiling() -> None:
    """Interpret steps from now on in this process, except those that draw random numbers."""
    if not os.environ.get(WHOLE):
        compiling.compile_step = interpreted


def interpreted(traced: TracedProgram, inputs: Inputs, backend: Backend, once: bool = False) -> Any:
    if traced.draws or backend.mesh is not None:
        return _compile(traced, inputs, backend, once)
    return Interpreted(traced)
