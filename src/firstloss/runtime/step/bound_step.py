"""`BoundStep`: what a call of a traced step does in Python, around its execution, on every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...capture.storage_swap import rebind
from ...capture.tensor import DeferredTensor
from ...errors import TraceError
from ...program.graph import geometry_of
from ...program.source import here
from ..guards.effects import Bind
from ..guards.reconstruct import CallFrame
from .arguments import Arguments
from .owners import Shared
from .traced_program import TracedProgram


class StepCall:
    """A call of a step: its arguments, and what it returns and does after the step has run."""

    __slots__ = ("arguments", "frame", "result", "schedules")

    def __init__(self, arguments: Arguments) -> None:
        self.arguments: Arguments = arguments
        self.frame: CallFrame  # once it has run
        self.result: Any = None
        self.schedules: list[Bind] = []  # schedulers that depend on its results


class BoundStep:
    """A traced step that can be called: a base class, whose subclasses execute its Program.

    A call is `admit`, `begin`, the execution, `leave`, `end` and `returned`, in this order.

    Attributes:
        traced: the traced Program.
    """

    def __init__(self, traced: TracedProgram) -> None:
        self.traced = traced

    def admit(self, arguments: Arguments) -> None:
        """Read what the call depends on. Nothing is changed.

        Raises:
            Shared: if some arguments must be inputs themselves.
            TraceError: if it got a copy of an argument that it edits.
        """
        traced = self.traced
        shared = traced.owners.shared(arguments)
        if shared:
            raise Shared(shared)
        if not arguments.padded.isdisjoint(traced.owners.edited):
            raise TraceError(
                f"{here()}: {traced.name} edits its argument in place, but got a padded copy of it, so the caller's "
                "tensor would not change. Edit a clone of it, or return it."
            )
        traced.trace.numbers.read_all(arguments.leaves, arguments.known)

    def begin(self) -> None:
        """Find the gradients that the step reads."""
        owners = self.traced.owners
        if self.traced.gradients.follow(owners.inputs, owners.changed, owners.current):
            owners.moved()

    def leave(self, call: StepCall, env: CallFrame, others: Sequence[Bind] = ()) -> None:
        """Repeat what the step leaves in Python once it has run: results, side effects, modes.

        Args:
            others: further bindings.
        """
        traced = self.traced
        views = list(traced.trace.new_memory.views())  # before there are those that this call makes
        call.frame = env
        call.result = traced.result(env)
        bindings = [make(env) for make in traced.effects.bindings]
        bindings += [_showing(tensors, traced.old_memory[storage](env)) for storage, tensors in views if tensors]
        call.schedules = [make(env) for make in traced.optimizers.schedulers.afterwards]
        for bind in (*bindings, *others):
            bind()
        traced.modes.leave()

    def end(self, call: StepCall, results: Mapping[str, Any]) -> None:
        """Call closures and schedulers, which users may interrupt.

        Args:
            results: by the names of the outputs, what closures are called with.
        """
        for i, closure in enumerate(self.traced.trace.closures):
            arrays = [results[f"closure{i}.{j}"] for j in range(len(closure.refs))]
            closure.after_step(arrays, call.frame)
        for schedule in call.schedules:
            schedule()

    def returned(self, call: StepCall) -> Any:
        """The step's result; raises its error, if it ended with one."""
        if self.traced.raised is not None:
            raise self.traced.raised
        return call.result


def _showing(views: list[DeferredTensor], old_memory: DeferredTensor) -> Bind:
    """Rebind other views of a weight's memory, to which the step has assigned other memory, to its old content."""

    def bind() -> None:
        for view in views:
            rebind(view, old_memory._storage, geometry_of(view))

    return bind
