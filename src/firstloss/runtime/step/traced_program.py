"""A traced step: what its Python does for one kind of batch, as a Program, with what goes in and what comes out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...capture.recorder import DeferredStorage
from ...capture.step import StepTrace
from ...program.compare import parting
from ...program.graph import Value
from ...program.program import Program
from ..guards.effects import Effects
from ..guards.reconstruct import Make
from .gradients import Gradients
from .optimizers import Optimizers
from .outputs import Outputs
from .owners import Owners, differ
from .process_settings import ModesLeft


class Groups(NamedTuple):
    """What a step's execution is given and makes.

    Attributes:
        state: the inputs that the step changes.
        read: the others.
        outputs: names, in groups: what the state becomes, what the step leaves, results.
    """

    state: list[Value]
    read: list[Value]
    outputs: tuple[Sequence[str], Sequence[str], Sequence[str]]


@dataclass(eq=False)
class TracedProgram:
    """What `trace_step` makes of a step.

    Attributes:
        name: the step's.
        program: what it computes.
        owners: what goes in.
        outputs: what comes out for Python.
        result: makes what the step returns, at each call.
        effects: what it leaves in Python, likewise.
        modes, optimizers, gradients: what of these it reads and leaves.
        for_closures: the names of outputs that step closures are given.
        handed_out: of weights that the step gives other memory, who is to live in that which they leave.
        raised: by the step's Python; it is raised again at each call.
        trace: what recorded it.
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
    handed_out: Sequence[tuple[DeferredStorage, Make]]
    raised: Exception | None
    trace: StepTrace

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return bool(self.trace.draws)

    @property
    def results(self) -> list[str]:
        """The names of the outputs that a call returns, or gives to closures."""
        return [*self.outputs.out, *self.for_closures]

    @functools.cached_property
    def groups(self) -> Groups:
        """What its execution is given and makes."""
        changed = list(self.owners.changed)
        new = [f"new{i}" for i in range(len(changed))]
        return Groups(changed, self.owners.read, (new, self.outputs.made, self.results))

    @property
    def retrace_reason(self) -> str | None:
        """Why it has to be traced at each call, if so."""
        return (
            self.trace.retrace_reason
            or self.optimizers.state.counts
            or self.outputs.retrace_reason
            or self.effects.retrace_reason
        )

    def does_the_same(self, other: TracedProgram) -> bool:
        """Whether two compute the same from the same: the compiled step of one will do for the other."""
        return self._signature() == other._signature() and parting(self.program, other.program) is None

    def _signature(self) -> tuple:
        """What goes in and comes out, beside the Program."""
        return (*self.owners.order(), self.outputs.out, self.outputs.made, self.for_closures)

    def reads_other_tensors(self, other: TracedProgram) -> bool:
        """Whether `other`, which does the same, reads other tensors from off the backend: it was given another batch by
        something that is no argument."""
        pairs = zip(self._external_inputs(), other._external_inputs(), strict=True)
        return any(differ(a, b) for a, b in pairs if a is not None and b is not None)

    def _external_inputs(self) -> list[DeferredStorage | torch.Tensor | None]:
        return self.owners.external_inputs({*self.optimizers.groups.inputs, *self.gradients.read})

    def reads(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of `tensors` goes in, or its gradient."""
        return self.owners.reads(tensors)

    def outdated(self) -> bool:
        """Whether a number baked in, a weight's memory or the value of a tensor that its Python has read has been
        changed since."""
        trace = self.trace
        if any(read.outdated() for read in trace.read.values()) or trace.has_changed_layout():
            return True
        if trace.new_memory.outdated():
            return True
        return self.optimizers.outdated() or not self.gradients.fit(self.owners.inputs)
