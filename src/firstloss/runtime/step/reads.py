"""Reads of values by a step's Python: what has been recorded so far is computed, and the trace goes on with the values.

Numbers are mostly handed on or branched on: they are input numbers (`capture/input_numbers.py`), which a compiled step
returns. What it branches on, it computes first, before any state changes; if the outcome is another than in the trace,
another compiled step is run, or the step is traced again.

With other values a step may do anything, so what is traced with them is valid for one call only. That call is computed
by PyTorch's kernels, like the values; further calls run the step's Python without a trace, as eager PyTorch would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...capture.input_numbers import Expression, InputNumbers
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import Contents, StepTrace
from ...compat.torch_names import DisableAutocast, DisableTorchDispatch, InferenceMode
from ...engine.replay import last_reads, materialize_whole
from ...program.graph import Node, Ref, Value, slice_for
from ..device.buffer import laid_out
from ..device.lazy_array import copied_later, to_device_later
from ..guards.equality import same
from .owners import Owner
from .step_replay import StepReplay
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


class TracedContents(StepReplay):
    """The content of the Values of a trace, each computed once.

    While the step is traced, nothing is overwritten, since it may still read any Value; see `finish` for afterwards.
    """

    only_numbers = False

    def __init__(self, trace: StepTrace, seed: Callable[[], np.ndarray]) -> None:
        """`seed` returns the two words from which the call's random numbers are derived."""
        super().__init__()
        self._trace = trace
        self._inputs: Mapping[Value, Owner] = trace.inputs
        self._seed = seed
        # After the trace: for each node's index, the Values that nothing reads after it; and those whose memory no
        # other Value has, as the result of a kernel that returns its operand.
        self._last: dict[int, list[Value]] = {}
        self._own: set[Value] = set()

    def keep_inputs(self) -> None:
        """After the trace, keep the inputs, among which its arguments are forgotten."""
        self._inputs = dict(self._inputs)

    def of(self, value: Value) -> torch.Tensor:
        """The content of `value`; it must not be modified.

        Raises:
            NotImplementedError: if only a compiler supports an operation.
        """
        nodes = self._missing([value])
        with DisableTorchDispatch(), DisableAutocast(), InferenceMode(False):
            self.run(nodes)
            self._read(value)
            return self.buffer(value)

    def finish(self, refs: Sequence[Ref]) -> list[torch.Tensor]:
        """The contents of a trace's outputs, in memory of their own, once it has ended. What is not needed any more is
        overwritten or freed, as in eager PyTorch."""
        kept = Counter(ref.value for ref in refs)
        nodes = self._missing(kept)
        needed = {*kept, *(value for node in nodes for value in node.reads())}
        for value in self.buffers.keys() - needed:
            del self.buffers[value]
        self._last = last_reads(nodes, kept)
        contents = []
        with DisableTorchDispatch(), DisableAutocast(), InferenceMode(False), torch.no_grad():
            self.run(nodes)
            for ref in refs:
                self._read(ref.value)
                content = ref.view(self.buffer(ref.value))
                is_own = ref.value in self._own and kept[ref.value] == 1 and ref.whole and content.is_contiguous()
                contents.append(content if is_own else content.clone(memory_format=torch.contiguous_format))
                kept[ref.value] -= 1
                if not kept[ref.value]:
                    del self.buffers[ref.value]
        return contents

    def _missing(self, values: Iterable[Value]) -> list[Node]:
        """The nodes that compute `values` from what is there."""
        nodes = slice_for(values, stop={*self._inputs, *self.buffers})
        if self._draws is None and any(node.draw is not None for node in nodes):
            from .kernel_draws import Draws  # imported late, because it imports JAX

            self._draws = Draws(self._seed())
        return nodes

    def _read(self, value: Value) -> None:
        """If it is an input, get its content."""
        if value in self._inputs and value not in self.buffers:
            self.buffers[value] = laid_out(self._input(value), value)

    def _input(self, value: Value) -> torch.Tensor:
        owner = self._inputs[value]
        if type(owner) is DeferredTensor:  # an argument
            return owner._ref().view(self._content(owner._storage, owner._storage.value))
        if not isinstance(owner, DeferredStorage):
            return owner.detach().reshape(value.shape)
        before = self._trace.before(owner) if owner.resident is None else owner.value
        return laid_out(self._content(owner, before).reshape(value.shape), value)

    @staticmethod
    def _content(storage: DeferredStorage, value: Value) -> torch.Tensor:
        if storage.resident is None:
            return materialize_whole(value)
        lazy = storage.resident.lazy_array()
        content = None if lazy is None else lazy.borrow()
        return storage.resident.read() if content is None else content

    def _run_one(self, node: Node) -> None:
        """Run a node; what it writes to is copied before, if something else may need the old content."""
        written = {ref.value for ref in node.writes}
        for value in {*node.reads(), *written}:
            self._read(value)
        last = self._last.get(node.index, ())
        old = {value: self.buffers.get(value) for value in written.difference(self._own.intersection(last))}
        for value in old:
            self.buffers[value] = self.allocate(value) if node.overwrites else self.buffer(value).clone()
        super()._run_one(node)
        self._own.update(node.outputs[: len(node.writes)])
        if self._last:
            self._note_new_memory(node)
        for value, buffer in old.items():
            if buffer is None:
                del self.buffers[value]
            else:
                self.buffers[value] = buffer
        for value in last:
            self.buffers.pop(value, None)

    def _note_new_memory(self, node: Node) -> None:
        """Note which results of a node are in memory of their own, and which operands are no longer."""
        holders: dict[int | None, list[Value]] = {}
        for value in node.reads():
            holders.setdefault(_memory(self.buffers[value]), []).append(value)
        for value in node.outputs[len(node.writes) :]:
            memory = _memory(self.buffers[value])
            others = holders.setdefault(memory, [])
            self._own.difference_update(others)
            if memory is not None and not others:
                self._own.add(value)
            others.append(value)


def _memory(tensor: Any) -> int | None:
    """What identifies the memory of a tensor; None for an unexpected result, and for PyTorch's efficient zeros."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


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
        for name, content in zip(names, contents.finish([program.outputs[name] for name in names]), strict=True):
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
