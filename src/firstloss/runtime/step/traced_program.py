"""`TracedProgram`: the result of tracing a step, with its outputs.

Its outputs are the tensors that the step returns or leaves in Python: outputs of its Program, and new tensors at each
call.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...capture.autograd_boundary import returned
from ...capture.input_numbers import NumberInput
from ...capture.step import StepTrace, is_traced
from ...capture.tensor import DeferredStorage, DeferredTensor
from ...program.compare import first_difference
from ...program.graph import Geometry, Ref, Value, geometry_of
from ...program.program import Program
from ..guards.effects import Effects
from ..guards.reconstruct import Make, Reconstructor
from .optimizers import Optimizers
from .owners import Gradients, Owners, differ
from .process_settings import ModesLeft

if TYPE_CHECKING:
    from ..mesh.mesh import Mesh


class Outgoing(NamedTuple):
    """A traced tensor that the step returns or leaves: the output that holds it, and its view of that output."""

    output: str
    geometry: Geometry | None  # None: the whole output
    shape: tuple[int, ...]
    dtype: torch.dtype
    computed: bool  # whether it requires a gradient and is not a leaf


class _Part(NamedTuple):
    """A traced tensor that the step returns or leaves, which may have been freed."""

    storage: int  # the id of its storage
    ref: Ref
    geometry: Geometry
    computed: bool
    sharding: Any  # on a mesh

    @staticmethod
    def of(tensor: DeferredTensor, mesh: Mesh | None) -> _Part:
        return _Part(
            storage=id(tensor._storage),
            ref=tensor._ref(),
            geometry=geometry_of(tensor),
            computed=tensor.requires_grad and not tensor.is_leaf,
            sharding=None if mesh is None else mesh.storage_sharding(tensor._storage),
        )

    def outgoing(self, output: str, whole: bool) -> Outgoing:
        size, _, _, dtype = self.geometry
        return Outgoing(output, self.geometry if whole else None, size, dtype, self.computed)


class Outputs:
    """The outputs for Python, apart from the state that the step changes.

    Attributes:
        refs: the outputs by name, in the order of the executable: results, then tensors left in Python.
        out: names of the results, one of which may be the first loss.
        made: names of tensors left in Python, which no caller waits for.
        where: on a mesh, the shardings of `made`.
        outgoing: the tensors, by the number with which `CallFrame.fresh` requests them.
        held: by name, storages of tensors that are referenced by an unknown object.
        retrace_reason: why the step must be traced at each call, if it must.
    """

    def __init__(
        self,
        reconstructor: Reconstructor,
        returned: int,
        tracing: StepTrace,
        mesh: Mesh | None,
        kept: set[int],
        reachable: Iterable[torch.Tensor],
    ) -> None:
        """
        Args:
            reconstructor: holds the tensors; it is released.
            returned: the number of tensors that the step returns, which come first.
            kept: the ids of storages that keep a weight's old memory.
            reachable: the tensors that outlive a step; iterated after `reconstructor` is released.
        """
        self._tracing = tracing
        self.out: list[str] = []
        self.made: list[str] = []
        self.where: dict[str, Any] = {}
        self.held: dict[str, DeferredStorage] = {}
        self._unseen: dict[str, DeferredStorage] = {}  # storages in `held` that have other tensors in `outgoing`
        outputs: dict[str, Ref] = {}
        parts = [_Part.of(tensor, mesh) for tensor in reconstructor.tensors]
        self.retrace_reason = reconstructor.retrace_reason and cannot_be_rebuilt(reconstructor.retrace_reason)
        reconstructor.release()
        expected = {id(t._storage) for t in reachable if is_traced(t, tracing)}
        survivors = {id(storage): storage for storage in self._survivors(expected, kept)}
        unseen = {key: storage for key, storage in survivors.items() if key not in expected}
        self.outgoing: list[Outgoing] = self._views(parts, returned, outputs, mesh, unseen)
        for storage in survivors.values():
            if storage not in self._unseen.values():
                name = f"made{len(self.made)}"
                self.made.append(name)
                if mesh is not None:
                    self.where[name] = mesh.storage_sharding(storage)
                outputs[name] = Ref.of(storage.value)
                self.held[name] = storage
        self.held |= self._unseen
        self.refs: dict[str, Ref] = {name: outputs[name] for name in (*self.out, *self.made)}

    def same_shardings(self, other: Outputs) -> bool:
        """On a mesh: whether an equivalent step's outputs have the same shardings."""
        from ..mesh.mesh import named

        own, others = ({name: named(at) for name, at in outputs.where.items()} for outputs in (self, other))
        return own == others

    def _views(
        self,
        parts: list[_Part],
        returned: int,
        outputs: dict[str, Ref],
        mesh: Mesh | None,
        unseen: dict[int, DeferredStorage],
    ) -> list[Outgoing]:
        """Make outputs for tensors: those with the same storage are views of one output."""
        sharing: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            sharing.setdefault(part.storage, []).append(number)
        outgoing: dict[int, Outgoing] = {}
        for key, numbers in sharing.items():
            names, kind = (self.out, "out") if numbers[0] < returned else (self.made, "made")
            name = f"{kind}{len(names)}"
            names.append(name)
            first = parts[numbers[0]]
            # Tensors that are left keep their strides (a gradient may be a transposed product), unless they share an
            # output.
            whole = len(numbers) > 1 or kind == "made" and first.ref.covers or key in unseen
            if key in unseen:
                self._unseen[name] = unseen[key]
            if mesh is not None and kind == "made":
                self.where[name] = first.sharding if whole else mesh.whole
            outputs[name] = Ref.of(first.ref.value) if whole else first.ref
            for number in numbers:
                outgoing[number] = parts[number].outgoing(name, whole)
        return [outgoing[number] for number in range(len(parts))]

    def _survivors(self, expected: set[int], kept: set[int]) -> list[DeferredStorage]:
        """Storages made by the step whose tensors are still referenced from places that were not searched."""
        tracing = self._tracing
        placeholders = {id(owner._storage) for owner in tracing.inputs.values() if type(owner) is DeferredTensor} | kept

        def alive() -> list[DeferredStorage]:
            storages = [storage for created in tracing.result_storages if (storage := created()) is not None]
            created = [s for s in storages if s.trace is tracing and id(s) not in placeholders]
            return [storage for storage in created if storage.alive()]

        survivors = alive()
        if any(id(storage) not in expected for storage in survivors):
            gc.collect(0)  # collection is off while a step is traced
            survivors = alive()
        held = _held([storage for storage in survivors if id(storage) not in expected])
        survivors = [storage for storage in survivors if id(storage) in expected or id(storage) in held]
        if self.retrace_reason is None and any(id(storage) not in expected for storage in survivors):
            self.retrace_reason = cannot_be_rebuilt("a tensor in a place that cannot be seen")
        return survivors

    def fresh(self, arrays: Mapping[str, Any], refs: Mapping[str, Ref], step: str) -> Callable[[int], torch.Tensor]:
        """A function that returns the new tensors of a call by their numbers, each once.

        Args:
            arrays: the call's results, by output name.
            refs: the Program's outputs.
            step: the step's name.
        """
        from ..device.buffer import deferred_storage_of, resident
        from ..device.lazy_array import LazyArray  # imported late, because they import JAX

        tensors: dict[int, torch.Tensor] = {}
        storages = dict(self._unseen)

        def fresh(number: int) -> torch.Tensor:
            tensor = tensors.get(number)
            if tensor is None:
                output, geometry, shape, dtype, computed = self.outgoing[number]
                if geometry is None:
                    array = arrays[output]
                    if self._tracing.cbfloat16 and type(array) is not LazyArray:
                        tensor = resident(array)  # it may have another dtype than was traced
                    else:
                        tensor = resident(array, shape, dtype)
                else:
                    if output not in storages:
                        storages[output] = deferred_storage_of(arrays[output], refs[output].value)
                    tensor = DeferredTensor.wrap(storages[output], *geometry)
                if computed:
                    returned(tensor, step)
                tensors[number] = tensor
            return tensor

        return fresh


def names_read(trace: StepTrace) -> list[str]:
    """The names of the outputs that are the numbers that the step's Python reads."""
    return [f"read{i}" for i in range(len(trace.numbers.reads))]


def cannot_be_rebuilt(description: str) -> str:
    """The reason for which a step must be traced at each call."""
    return f"it leaves {description}, which cannot be recreated at each call"


def _held(storages: list[DeferredStorage]) -> set[int]:
    """The ids of storages whose tensors are referenced by a Python object, rather than only by the autograd graph, of
    which a step's results keep nothing.

    They are found in one search of all Python objects.
    """
    if not storages:
        return set()
    tensors = [tensor for storage in storages for tensor in storage.alive()]
    owners = {id(tensor): id(tensor._storage) for tensor in tensors}
    held_ids: set[int] = set()
    for referrer in gc.get_referrers(*tensors):
        if referrer is not tensors:
            held_ids.update(owners[id(held)] for held in gc.get_referents(referrer) if id(held) in owners)
    return held_ids


class Groups(NamedTuple):
    """The inputs and outputs of a step's execution.

    Attributes:
        state: the inputs that the step changes.
        read: the other inputs.
        outputs: names, in groups: the new state, side effects, results.
    """

    state: list[Value]
    read: list[Value]
    outputs: tuple[Sequence[str], Sequence[str], Sequence[str]]


@dataclass(eq=False)
class TracedProgram:
    """The result of `tracing.trace_step`.

    Attributes:
        name: the step's name.
        program: its Program.
        owners: its inputs' owners.
        outputs: its outputs for Python.
        result: makes the step's return value, at each call.
        effects: its side effects in Python, likewise.
        modes, optimizers, gradients: what it reads and changes of these.
        for_closures: the names of outputs passed to step closures.
        old_memory: for weights to which the step assigns other memory, what makes a tensor of the old memory's content,
            if others view it or it was exported.
        raised: an exception of the step's Python code, which is raised again at each call.
        trace: the recorder.
    """

    name: str
    program: Program
    owners: Owners
    outputs: Outputs
    result: Make
    effects: Effects
    modes: ModesLeft
    optimizers: Optimizers
    gradients: Gradients
    for_closures: Sequence[str]
    old_memory: Mapping[DeferredStorage, Make]
    raised: Exception | None
    trace: StepTrace

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return bool(self.trace.draws)

    @property
    def results(self) -> list[str]:
        """The names of the outputs that a call returns, passes to closures, or reads."""
        return [*self.outputs.out, *self.for_closures, *names_read(self.trace)]

    @functools.cached_property
    def outcomes(self) -> tuple[Any, ...]:
        """What its Python found of numbers that it has read, and has branched on."""
        return tuple(self.trace.numbers.outcomes.values())

    @functools.cached_property
    def early(self) -> list[str]:
        """The names of the outputs that must be known before its state may be changed, to check the outcomes."""
        numbers = self.trace.numbers
        needed = {read for expression in numbers.outcomes for read in expression.reads()}
        return [name for name, read in zip(names_read(self.trace), numbers.reads, strict=True) if read in needed]

    @property
    def is_for_one_call(self) -> bool:
        """Whether it is valid for one call only, since its Python uses values that it has read as they are, or is that
        of an optimizer's first step."""
        trace = self.trace
        if trace.reads or self.optimizers.schedulers.reads_now is not None:
            return True
        if trace.number_reads and not trace.numbers_are_inputs:
            return True
        if self.optimizers.first_step_only and trace.may_read():
            return True
        return not all(isinstance(outcome, (bool, np.bool_)) for outcome in self.outcomes)

    @functools.cached_property
    def groups(self) -> Groups:
        """The inputs and outputs of its execution."""
        changed = list(self.owners.changed)
        new = [f"new{i}" for i in range(len(changed))]
        return Groups(changed, self.owners.read, (new, self.outputs.made, self.results))

    @functools.cached_property
    def numbers(self) -> Mapping[Value, NumberInput]:
        """The inputs that are numbers."""
        return {t._storage.first: NumberInput(e) for (e, _), t in self.trace.numbers.inputs.items()}

    @property
    def constants(self) -> dict[Value, Any]:
        """The inputs that are constants, with their values; see `StepTrace.constants`."""
        inputs = self.trace.numbers.inputs.items()
        return {t._storage.first: e.example for (e, _), t in inputs if not e.is_read and not e.sources()}

    @property
    def retrace_reason(self) -> str | None:
        """Why it must be traced at each call, if it must."""
        return (
            self.trace.retrace_reason
            or self.optimizers.state.retrace_reason
            or self.outputs.retrace_reason
            or self.effects.retrace_reason
        )

    def does_the_same(self, other: TracedProgram) -> bool:
        """Whether both have the same computation and inputs, so that they can share an executable."""
        return self._signature() == other._signature() and first_difference(self.program, other.program) is None

    def _signature(self) -> tuple[Any, ...]:
        """A description of its inputs and outputs."""
        return (*self.owners.order(), self.outputs.out, self.outputs.made, self.for_closures, self.early)

    def reads_other_tensors(self, other: TracedProgram) -> bool:
        """Whether `other`, which is equivalent, reads other tensors outside the backend: it got another batch, but not
        as an argument."""
        pairs = zip(self._external_inputs(), other._external_inputs(), strict=True)
        return any(differ(a, b) for a, b in pairs if a is not None and b is not None)

    def _external_inputs(self) -> list[DeferredStorage | torch.Tensor | None]:
        return self.owners.external_inputs({*self.numbers, *self.gradients.read})

    def outdated(self) -> bool:
        """Whether a baked-in number, a weight's memory, or a tensor's value read by its Python code has changed."""
        trace = self.trace
        if any(read.outdated() for read in trace.read_outside.values()) or trace.outside and trace.has_changed_layout():
            return True
        if trace.new_memory.weights and trace.new_memory.outdated():
            return True
        if trace.outdated or self.owners.rebound():
            return True
        return self.optimizers.groups.outdated() or not self.gradients.fit(self.owners.inputs)
