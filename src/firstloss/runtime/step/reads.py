"""Reads of values by a step's Python: what has been recorded so far is computed, and the trace goes on with the values.

Numbers are mostly handed on or branched on: they are input numbers (`capture/input_numbers.py`), which a compiled step
returns. What it branches on, it computes first, before any state changes; if the outcome is another than in the trace,
another compiled step is run, or the step is traced again.

With other values a step may do anything, so what is traced with them is valid for one call only. That call is computed
by PyTorch's kernels, like the values; further calls run the step's Python without a trace, as eager PyTorch would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...capture.input_numbers import Expression, InputNumbers
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import Contents, StepTrace
from ...compat.torch_names import DisableAutocast, DisableTorchDispatch, InferenceMode
from ...engine.replay import materialize_whole
from ...program.graph import Value
from ..device.buffer import laid_out
from ..device.lazy_array import copied_later, to_device_later
from ..guards.equality import same
from .owners import Owner
from .step_replay import StepContents, StepReplay
from .traced_program import TracedProgram

_MOST_ASSUMED = 1 << 28  # bytes of an operation's operands, above which its result is taken to be 1


class READ:
    """Among the classes of a step's inputs (`tracing.trace_step`): numbers that it reads from tensors."""


class Reads(NamedTuple):
    """Which values a step may read while it is traced.

    Attributes:
        contents_of: makes what computes them.
        runs_eagerly: see `StepTrace`.
        known: the values of the first numbers that it reads, if they are known.
    """

    contents_of: Callable[[StepTrace], Contents]
    runs_eagerly: bool = True
    known: Sequence[Any] = ()


class OutcomeChanged(Exception):
    """What a compiled step has read decides otherwise than in its trace; raised before any state has changed.

    Attributes:
        values: the values read up to there, in order.
    """

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self.values = values


def check_outcomes(numbers: InputNumbers, known: dict[Expression, Any]) -> None:
    """Check that what a step branches on is what it was in its trace.

    Args:
        known: the numbers of this call, among them those read that are known.

    Raises:
        OutcomeChanged: if it is not.
    """
    for expression, expected in numbers.outcomes.items():
        if not all(read in known for read in expression.reads()):
            return  # the next read comes after them
        try:
            outcome = expression.value((), known)
        except Exception:  # a division by zero, for example
            outcome = None
        if outcome is not expected and not same(expected, outcome):
            reads = list(expression.reads())
            last = max(i for i, read in enumerate(numbers.reads) if read in reads)
            raise OutcomeChanged([known.get(read) for read in list(numbers.reads)[: last + 1]])


class TracedContents(StepContents):
    """The content of the Values of a trace."""

    only_numbers = False

    def __init__(self, trace: StepTrace, seed: Callable[[], np.ndarray]) -> None:
        """`seed` returns the two words from which the call's random numbers are derived."""
        super().__init__(trace.inputs, seed)
        self._trace = trace

    def keep_inputs(self) -> None:
        """After the trace, keep the inputs, among which its arguments are forgotten."""
        self._inputs = dict(self._inputs)

    def _input(self, value: Value) -> torch.Tensor:
        owner: Owner = self._inputs[value]
        if type(owner) is DeferredTensor:  # an argument
            content = owner._ref().view(self._content(owner._storage, owner._storage.value))
        elif isinstance(owner, DeferredStorage):
            before = self._trace.before(owner) if owner.resident is None else owner.value
            content = self._content(owner, before).reshape(value.shape)
        else:
            content = owner.detach().reshape(value.shape)
        return laid_out(content, value)

    @staticmethod
    def _content(storage: DeferredStorage, value: Value) -> torch.Tensor:
        if storage.resident is None:
            return materialize_whole(value)
        lazy = storage.resident.lazy_array()
        content = None if lazy is None else lazy.borrow()
        return storage.resident.read() if content is None else content


class ComputedStep:
    """In place of an executable: the outputs of one call, computed by PyTorch's kernels. Also its `StepRun`."""

    ran = False
    later = None

    def __init__(self, contents: TracedContents, traced: TracedProgram, sharding_of: Callable[[str], Any]) -> None:
        """`sharding_of` returns the sharding of an output by its name; None on one device."""
        self._contents: TracedContents | None = contents
        self._traced = traced
        self._sharding_of = sharding_of
        self._arrays: dict[str, Any] = {}

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> ComputedStep:
        """The execution; see `dispatch.execute`."""
        return self

    def prepare(self) -> None:
        """Compute all outputs."""
        contents, program = self._contents, self._traced.program
        assert contents is not None, "it computes one call only"
        names = [name for group in self._traced.groups.outputs for name in group]
        for name, content in zip(names, contents.take([program.outputs[name] for name in names]), strict=True):
            sharding = self._sharding_of(name)
            self._arrays[name] = copied_later(content) if sharding is None else to_device_later(content, sharding)

    def early(self) -> list[Any]:
        """The outputs that decide whether it is to be finished: as they did in the trace."""
        return [self._arrays[name] for name in self._traced.early]

    def finish(self) -> None:
        """Nothing is left to do."""
        self._contents = None

    def outputs(self) -> tuple[Any, ...]:
        """The outputs, in groups."""
        arrays, self._arrays = self._arrays, {}
        return tuple(tuple(arrays[name] for name in group) for group in self._traced.groups.outputs)


class AssumedNumbers:
    """The content of numbers in a trace that is only for a plan, for which nothing is computed.

    All arrays are taken to be full of ones, and what is made of them follows: a loss is finite, and nothing is NaN.
    """

    only_numbers = True

    def __init__(self, trace: StepTrace) -> None:
        self._replay = StepReplay()

    def keep_inputs(self) -> None:
        """It needs none."""

    def of(self, value: Value) -> torch.Tensor:
        """As in `Contents`."""
        buffers, nodes, todo = self._replay.buffers, {}, [value]
        with DisableTorchDispatch(), DisableAutocast(), InferenceMode(False), torch.no_grad():
            while todo:
                needed = todo.pop()
                node = needed.node
                if needed in buffers:
                    continue
                if needed.known:
                    buffers[needed] = materialize_whole(needed)
                elif node is None or not _is_decision(needed):
                    buffers[needed] = needed.empty().fill_(1)
                elif node.index not in nodes:
                    nodes[node.index] = node
                    todo += node.reads()
            for _, node in sorted(nodes.items()):
                try:
                    self._replay.run([node])
                except (RuntimeError, IndexError, NotImplementedError):  # ones are no valid indices, for example
                    buffers.update((output, output.empty().fill_(1)) for output in node.outputs)
        return buffers[value]


def _is_decision(value: Value) -> bool:
    """Whether a value is a number, or says something of each element of an array, which is not too large."""
    node = value.node
    assert node is not None
    is_small = sum(read.nbytes for read in node.reads()) <= _MOST_ASSUMED
    return is_small and not node.writes and (not value.shape or value.dtype is torch.bool)
