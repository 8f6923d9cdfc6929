"""Traced steps on the "GPU" backend: run eagerly first, then replayed as a CUDA graph.

The first call of a step runs as it is written: that is the first loss, just as in eager PyTorch. At the second call the
step is traced, its Program is run once by the same kernels (`gpu/replay.py`), and the results are compared with the
eager step's; from the third call on it is a graph. Steps that cannot be traced or recorded run eagerly, with one
warning that says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...capture.autograd_boundary import returned
from ...errors import EagerStepWarning, TraceError
from ...gpu.replay import ReplayedStep, ReplayPlan
from ...interpreter import Undo
from ...program.graph import Value
from ...program.source import here, warn
from ..backend import Backend
from ..guards.reconstruct import CallFrame
from ..guards.snapshot import Snapshot
from ..pytrees import flatten
from .arguments import Arguments
from .bound_step import BoundStep, StepCall
from .cache import StepCache
from .owners import Shared
from .process_settings import modes
from .request import Request
from .traced_program import TracedProgram
from .tracing import TraceObserver

# The tolerance of half-precision results, replayed and eager: one unit in the last place of bfloat16.
_AGREE = 2.0**-7


class GraphedStep(BoundStep):
    """A step for one kind of call on real tensors: the counterpart of `CompiledStep` on the "GPU" backend."""

    is_for_one_call = False

    def __init__(self, traced: TracedProgram, executable: ReplayedStep) -> None:
        super().__init__(traced)
        self.executable = executable

    def outdated(self) -> bool:
        """Whether anything that the graph depends on has changed."""
        return self.traced.optimizers.first_step_only or self.traced.outdated()

    @property
    def how(self) -> str:
        """How the last call was run."""
        failed = self.executable.failed
        return self.executable.how if failed is None else f"replay, not recorded: {failed}"

    def rehearsed(self, arguments: Arguments) -> Callable[[Any], None]:
        """Run the step without its effects before it is run eagerly; returns a function that compares the results with
        the eager step's, and raises a TraceError if they differ. (The same kernels are called; they may differ in the
        order of atomic additions.)"""
        self.admit(arguments)
        self.begin()
        results = self.executable.rehearse(*self._inputs(arguments))
        complete = all(name in results for name in self.traced.outputs.out)

        def compare(result: Any) -> None:
            if not complete:
                return
            replayed = self.traced.result(self._env(results, arguments))
            with torch.no_grad():
                for a, b in zip(_tensors(replayed), _tensors(result), strict=False):
                    if a.shape != b.shape or not torch.allclose(a, b, rtol=_AGREE, atol=_AGREE, equal_nan=True):
                        raise TraceError(
                            f"when it is replayed, a result of shape {list(a.shape)} differs from eager PyTorch's"
                        )

        return compare

    def __call__(self, arguments: Arguments) -> Any:
        owners, leaves, call = self.traced.owners, arguments.leaves, StepCall(arguments)
        self.admit(arguments)
        with Undo() as undo, undo:
            self.begin()
            draws = self.traced.trace.numbers.draws
            if draws is not None:
                draws.commit(arguments.known)
            outputs = self.executable(*self._inputs(arguments))
            with torch.no_grad():
                for i, value in enumerate(owners.changed):
                    if value in owners.arguments:
                        leaves[owners.arguments[value]].copy_(outputs[f"new{i}"])
            self.leave(call, self._env(outputs, arguments))
        self.end(call, outputs)
        return self.returned(call)

    def _inputs(self, arguments: Arguments) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
        """The inputs of the replay: weights and other tensors, the batch, and numbers."""
        owners, numbers = self.traced.owners, self.traced.numbers
        tensors: dict[Value, torch.Tensor] = {}
        batch: dict[Value, torch.Tensor] = {}
        reads: dict[Value, Callable[[], float]] = {}
        for value, target in zip((*owners.changed, *owners.read), self.executable.inputs, strict=True):
            if value in owners.arguments:
                batch[target] = arguments.leaves[owners.arguments[value]].detach()
            elif value in numbers:
                reads[target] = functools.partial(numbers[value].read, arguments.leaves, arguments.known)
            else:
                tensors[target] = owners.inputs[value]  # real ones
        return tensors, batch, reads

    def _env(self, outputs: Mapping[str, torch.Tensor], arguments: Arguments) -> CallFrame:
        tensors: dict[int, torch.Tensor] = {}

        def fresh(number: int) -> torch.Tensor:
            if number not in tensors:
                output, geometry, _, _, computed = self.traced.outputs.outgoing[number]
                tensor = outputs[output]
                if geometry is not None:
                    size, stride, offset, _ = geometry
                    tensor = tensor.as_strided(size, stride, offset)
                if computed:
                    returned(tensor, self.traced.name)
                tensors[number] = tensor
            return tensors[number]

        current = self.traced.owners.current
        return CallFrame(fresh, arguments.leaves, arguments.containers, current, arguments.known)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]


class GraphRequest(Request):
    """A call of a step that is to be replayed."""

    def compiled(self, observer: TraceObserver, find: Callable[[TracedProgram], Any]) -> Any:
        try:
            return super().compiled(observer, find)
        except Exception as error:
            if not observer.restore_contents():
                raise CannotRunTwice(
                    f"{here()}: the step takes an item from an iterator, or changes something else that cannot be "
                    f"restored, and cannot be replayed at this call: {error}. Take the item before the step, and pass "
                    "it."
                ) from error
            raise

    def _bound(self, traced: TracedProgram, same: Any) -> Any:
        if traced.raised is not None:
            raise TraceError("it raised an error")
        if traced.trace.closures:
            raise TraceError("it calls step closures")
        if traced.optimizers.state.new:
            raise TraceError("its optimizer creates new state")
        return GraphedStep(traced, _planned(traced, self.backend) if same is None else same.executable)


def _planned(traced: TracedProgram, backend: Backend) -> ReplayedStep:
    inputs = (*traced.owners.changed, *traced.owners.read)
    plan = ReplayPlan(traced.program, inputs, traced.numbers, backend.torch_device)
    if plan.obstacles:
        raise TraceError("; ".join(plan.obstacles))
    state = {value: traced.program.outputs[f"new{i}"] for i, value in enumerate(traced.owners.changed)}
    return ReplayedStep(plan, inputs, state, backend.torch_device)


class CannotRunTwice(TraceError):
    """A step that cannot be replayed has changed what cannot be restored, so that it cannot run eagerly either."""


_IS_SHARED = "it edits an argument that it also reaches in another way"


class Trials:
    """The kinds of calls of a traced step: which are replayed, and which run eagerly, for the first time or always."""

    def __init__(self, name: str, cache: StepCache) -> None:
        self._name = name
        self._cache = cache
        self._calls: dict[Any, int] = {}
        self._eager: dict[Any, str] = {}
        self._last: tuple[Any, GraphedStep | None] = None, None  # the kind of the last call, and the step that ran it

    def call(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[Any, Any],
        admitted: tuple[Arguments, tuple[Any, ...]],
        on: Any,
    ) -> Any:
        """Call the step on `args` and `kwargs`, given also as Arguments with their kind, on a backend."""
        arguments, kind = admitted
        args, kwargs = arguments.as_given()
        key = id(on), arguments.spec, kind, modes()
        self._last = key, None
        count = self._calls[key] = self._calls.get(key, 0) + 1
        if key in self._eager:
            return step(*args, **kwargs)
        request = GraphRequest(step, arguments, on)
        if count == 1:  # an optimizer creates its state in a first step
            snapshot = Snapshot(request.roots())
            result = step(*args, **kwargs)
            consumed = snapshot.consumed()
            if consumed is not None:
                self._fall_back(key, f"it consumes or changes {consumed}")
            return result
        compare = None
        try:
            with Undo() as undo, undo:
                step_graph: Any = self._cache.find(request, kind, undo)
            why = self._cache.traced_each_time
            if why is not None:  # this call is that of the trace: its Python may do something else if it runs again
                self._fall_back(key, why)
            elif not step_graph.executable.tried:
                compare = step_graph.rehearsed(arguments)
        except Shared:
            self._fall_back(key, _IS_SHARED)
            return step(*args, **kwargs)
        except CannotRunTwice as error:
            self._fall_back(key, str(error.__cause__))
            raise
        except Exception as error:  # nothing has been changed: eager PyTorch raises errors itself
            self._fall_back(key, str(error) or type(error).__name__)
            return step(*args, **kwargs)
        if compare is None:
            self._last = key, step_graph
            try:
                return step_graph(arguments)
            except Shared:  # raised before anything is executed
                self._last = key, None
                self._fall_back(key, _IS_SHARED)
                return step(*args, **kwargs)
        result = step(*args, **kwargs)
        try:
            compare(result)
        except TraceError as error:
            self._fall_back(key, str(error))
        return result

    def _fall_back(self, kind: Any, why: str) -> None:
        """Run it eagerly from now on, and warn once."""
        self._eager[kind] = why
        text = f"{self._name} runs eagerly on this backend, not as a CUDA graph: {why}"
        warn(EagerStepWarning(text))

    def how(self) -> str:
        """How the last call was run."""
        kind, step = self._last
        if step is not None:
            return step.how
        return f"eager: {self._eager[kind]}" if kind in self._eager else "eager"
