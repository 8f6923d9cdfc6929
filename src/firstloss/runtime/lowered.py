"""`TracedStep.lower`: a step as one Program and one StableHLO module, to read, to plan, and to run without PyTorch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ..dependencies import require_extra
from ..errors import BackendError, LoweringError, SaveError
from ..files import replacing
from ..lower import aten
from ..lower.dtypes import to_jax
from ..lower.program import lower
from ..program.graph import Value
from ..program.program import Program
from .backend import Backend
from .checkpoint.file import TensorPart, write
from .exported_step import FORMAT, MODULE
from .jax_support import to_host, x64
from .step.arguments import Arguments
from .step.functions import step_key
from .step.inputs import Inputs
from .step.intermediates import Intermediate, intermediates
from .step.plan import StepPlan
from .step.planning import names_of, plan_step, traced_only
from .step.traced_program import TracedProgram

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Array(NamedTuple):
    """An argument or a result of a lowered step.

    Attributes:
        name: that of a weight, or of an entry of the optimizer's state; else made up.
        argument: for an argument of the call, which of its leaves it is; else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None = None


class LoweredStep:
    """A step, lowered for one kind of batch. Nothing has been computed, and nothing is compiled.

    The module is a function of (state, inputs, seed) that returns (new state, results). `state` are the arrays that the
    step changes, `inputs` all others, weights that it only reads and the batch included; `seed`, two uint32, is for
    random operations, with the step's number in its second word.

    Attributes:
        program: the step's ATen operations, which print with the lines that they come from.
        state, inputs, results: the module's arguments and results, in order.
    """

    def __init__(self, name: str, step: Callable[..., Any], arguments: Arguments, backend: Backend) -> None:
        if not backend.is_xla:
            raise BackendError(f'backend "{backend.name}" compiles nothing, so a step is not lowered. Use "XLA".')
        self._name = name
        self._step = step
        self._arguments = arguments
        self._backend = backend
        with self._traced() as traced:
            self.program: Program = traced.program
            groups, names = traced.groups, names_of(traced, backend)
            number = traced.owners.arguments
            self.state: list[Array] = [_array(value, names, number) for value in groups.state]
            self.inputs: list[Array] = [_array(value, names, number) for value in groups.read]
            results = [(name, traced.program.outputs[name]) for name in (*groups.outputs[2], *groups.outputs[1])]
            self.results: list[Array] = [Array(name, tuple(ref.size), ref.dtype) for name, ref in results]

    def __repr__(self) -> str:
        return (
            f"<LoweredStep {self._name}: {len(self.state)} arrays of state, {len(self.inputs)} inputs, "
            f"{len(self.results)} results, {len(self.program.nodes):,} operations>"
        )

    def _traced(self) -> AbstractContextManager[TracedProgram]:
        return traced_only(self._step, self._arguments, self._backend)

    def plan(self) -> StepPlan:
        """As `TracedStep.plan`: memory, traffic and floating-point operations of each device."""
        return plan_step(self._step, self._arguments, self._backend)

    def as_text(self) -> str:
        """The module as text in StableHLO's syntax; on a mesh, with the shardings of its arguments."""
        with self._traced() as traced, x64(), aten.within(False):
            return _jitted(traced, self._shardings(traced)).lower(*_shapes(traced)).as_text()

    def compile(self) -> jax.stages.Compiled:
        """The module, compiled as a whole for the backend's devices, for XLA's own analysis or to run in JAX.

        Returns:
            JAX's object for it: `compiled(state, inputs, seed)` returns (new state, results), where `arrays` has the
            first state and inputs; `memory_analysis()`, `cost_analysis()` and `as_text()` are the compiler's. With
            NumPy's arrays of 64 bits, call it in `jax.enable_x64(True)`.
        """
        with self._traced() as traced, x64(), aten.within(False):
            return _jitted(traced, self._shardings(traced)).lower(*_shapes(traced)).compile()

    def arrays(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Copies of the current values of `state` and `inputs`, those of the call's arguments included."""
        with self._traced() as traced, x64():
            inputs = Inputs(self._backend, traced.owners, traced.numbers)
            groups = traced.groups
            state, read = (
                [jax.numpy.array(inputs.array(value, self._arguments)) for value in values]
                for values in (groups.state, groups.read)
            )
            return state, read

    def intermediates(self) -> list[Intermediate]:
        """Compute the step once, with the current weights and random numbers, as it is computed on the backend but in
        one function, and change nothing. All results are kept: for small models, to find where two runs part.

        Returns:
            What each operation computes, in order: its name in ATen (`operation`), the line of the user's code that
            called it (`line`), and the tensor (`value`).

        Raises:
            BackendError: in one of several processes.
        """
        with self._traced() as traced:
            return intermediates(traced, self._arguments, self._backend)

    def save(self, path: str | os.PathLike[str], platforms: tuple[str, ...] = ("cpu", "cuda", "tpu")) -> None:
        """Write a module for each platform and the current values of its arrays to one safetensors file, which
        `fl.load_step` loads without PyTorch, and ten lines of JAX without Firstloss ([how](../export.md)).

        Args:
            path: of the file, which is replaced as a whole.
            platforms: those for which it is lowered.

        Raises:
            BackendError: on a mesh.
            LoweringError: if an operation cannot be lowered for one of the platforms.
            SaveError: if the file cannot be written.
        """
        if self._backend.mesh is not None:
            raise BackendError("a step for a mesh is not saved. Lower it on one device, and shard it where it runs.")
        unknown = [platform for platform in platforms if platform not in PLATFORMS]
        if unknown or not platforms:
            raise BackendError(f"platforms={platforms!r}: write some of {', '.join(PLATFORMS)}.")
        with self._traced() as traced:
            require_extra("xla", "LoweredStep.save", "flatbuffers")
            with x64(), aten.within(False):
                step, shapes = _jitted(traced), _shapes(traced)
                try:  # one each: a module for several platforms has other roundings
                    modules = {
                        each: jax.export.export(step, platforms=[each])(*shapes).serialize() for each in platforms
                    }
                except NotImplementedError as error:
                    raise LoweringError(
                        f"{self._name} cannot be lowered for {', '.join(platforms)}: {error}"
                    ) from error
            inputs = Inputs(self._backend, traced.owners, traced.numbers)
            pairs = zip((*traced.groups.state, *traced.groups.read), (*self.state, *self.inputs), strict=True)
            with x64():
                parts = [
                    _part(MODULE + name, torch.frombuffer(text, dtype=torch.uint8)) for name, text in modules.items()
                ]
                for value, array in pairs:
                    if array.argument is None:
                        content = jax.numpy.asarray(inputs.array(value, self._arguments))
                        parts.append(_part(array.name, to_host(content)))
            digests = {name: hashlib.sha256(text).hexdigest() for name, text in modules.items()}
            about: dict[str, Any] = {"name": self._name, "sha256": digests}
            about |= {kind: [_described(a) for a in getattr(self, kind)] for kind in ("state", "inputs", "results")}
            try:
                with replacing(path) as temporary:
                    write(temporary, parts, {FORMAT: json.dumps(about)})
            except OSError as error:
                raise SaveError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error

    def _shardings(self, traced: TracedProgram) -> Any:
        if self._backend.mesh is None:
            return None
        if self._backend.same_run is not None:
            raise BackendError(
                f"{self._name} cannot be lowered as one module for a backend with same_run, whose steps are computed "
                "by logical shards. Lower it on a backend without same_run."
            )
        from .mesh.mesh import named

        where = Inputs(self._backend, traced.owners, traced.numbers).where
        groups = traced.groups
        state, read = ([named(where[value]) for value in values] for values in (groups.state, groups.read))
        return state, read, named(self._backend.mesh.whole)


def _array(value: Value, names: dict[Value, str], arguments: dict[Value, int]) -> Array:
    number = arguments.get(value)
    name = names.get(value) or (f"argument {number}" if number is not None else value.label or "input")
    return Array(name, tuple(value.shape), value.dtype, number)


def _described(array: Array) -> dict[str, Any]:
    return {
        "name": array.name,
        "shape": list(array.shape),
        "dtype": np.dtype(to_jax(array.dtype)).name,
        "argument": array.argument,
    }


def _jitted(traced: TracedProgram, shardings: Any = None) -> Any:
    groups = traced.groups

    def step(state: list[Any], inputs: list[Any], seed: Any) -> tuple[list[Any], list[Any]]:
        arrays = dict(zip((*groups.state, *groups.read), (*state, *inputs), strict=True))
        out = lower(traced.program, arrays, step_key(seed))
        return [out[name] for name in groups.outputs[0]], [
            out[name] for name in (*groups.outputs[2], *groups.outputs[1])
        ]

    return jax.jit(step) if shardings is None else jax.jit(step, in_shardings=shardings)


def _shapes(traced: TracedProgram) -> tuple[list[Any], list[Any], Any]:
    def shape(value: Value) -> Any:
        return jax.ShapeDtypeStruct(tuple(value.shape), to_jax(value.dtype))

    groups = traced.groups
    return [*map(shape, groups.state)], [*map(shape, groups.read)], jax.ShapeDtypeStruct((2,), np.uint32)


def _part(name: str, tensor: torch.Tensor) -> TensorPart:
    shape = tuple(tensor.shape)
    return TensorPart(name, tensor.dtype, shape, (0,) * len(shape), shape, lambda: tensor)
