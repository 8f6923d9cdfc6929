"""Run what was traced by PyTorch's own kernels, operation by operation, instead of compiling it.

A generated program is run once, and compiling its steps by XLA takes nine tenths of its time. What these programs are
to find, guards, effects, arguments and state, is the same either way, and the results are PyTorch's, bit for bit, so
that nothing has to be tolerated. The rules of the lowering have tests of their own (`tests/lower`).
"""

from __future__ import annotations

import os
from typing import Any

import jax
import torch

from firstloss.runtime.device.lazy import ready
from firstloss.runtime.jaxlib import given, to_host
from firstloss.runtime.step.executable import Executable
from firstloss.runtime.step.first_loss import Kernels

WHOLE = "FIRSTLOSS_FUZZ_COMPILE"  # set in the environment: compile steps, as users do
_compile = Executable._compile


class Interpreted:
    """Stands for the compiled step of an executable: takes what that takes, and like it takes the state away."""

    def __init__(self, executable: Executable) -> None:
        self._program = executable.program
        self._inputs = [*executable._changed, *executable._read]
        self._new = [f"new{i}" for i in range(len(executable._changed))]
        self._made = list(executable._made)
        self._names = [*executable._out, *executable._arguments]

    def _call(self, state: tuple, rest: tuple, seed: Any) -> tuple:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            replay = Kernels()
            for value, array in zip(self._inputs, [*state, *rest], strict=True):
                logical = to_host(jax.numpy.asarray(ready(array)))
                replay.buffers[value] = value.empty().copy_(logical.reshape(value.shape))
            replay.run(self._program.nodes)
            found = {
                name: jax.numpy.array(given(ref.view(replay.buffer(ref.value)).contiguous()), copy=True)
                for name, ref in self._program.outputs.items()
            }
        for array in state:
            if isinstance(array, jax.Array):
                array.delete()
        return tuple(tuple(found[name] for name in names) for names in (self._new, self._made, self._names))


def instead_of_compiling() -> None:
    """From here on, in this process; but for steps that draw random numbers."""
    if not os.environ.get(WHOLE):
        Executable._compile = interpreted  # type: ignore[method-assign]


def interpreted(self: Executable) -> Any:
    if self._tracing.draws or self._backend.mesh is not None:
        return _compile(self)
    self.inputs.lie((*self._changed, *self._read))
    return Interpreted(self)
