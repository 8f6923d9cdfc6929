"""A step in segments, called in order at every step: each distinct one is a function, compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ...lower.dtypes import constant
from ...lower.segments import Cut, Segment
from ...program.graph import Value
from ..device.executable_calls import in_flight, probe_memory
from ..device.lazy_array import BackgroundWork, LazyArray, ready
from ..device.placement import start_waiting_materializations
from ..jax_support import on_cpu, x64
from ..mesh.segment_shardings import Edges
from . import lowering_markers
from .functions import CompiledFunctions, Function, functions_of


class _SegmentCall(NamedTuple):
    """A call of a segment's function in a step: its number, and the slots that it reads, fills and frees.

    It fills one range, so that its results are stored by one instruction: a step has a thousand of them.
    """

    function: int
    reads: tuple[int, ...]
    fills: slice
    frees: tuple[int, ...]


def _filled(call: _SegmentCall) -> range:
    return range(call.fills.start, call.fills.stop)


class SegmentedStep:
    """Called like a whole step's executable: with the state that the step changes, the other inputs, and the seed.

    Segments run as soon as they are compiled, so the first loss may be available while the backward pass still
    compiles; segments that change the state wait until everything is compiled. A state's old array is donated to the
    call that uses it last, if the new one is computed there.

    Args:
        state: the Values of the state, in argument order; its new content is `outputs[0]`.
        outputs: names of the Program's outputs, in the groups that a call returns.
        edges: on a mesh, the shardings of arrays that pass from one segment to another.
        compiles: whether to compile; otherwise it is only lowered.
        behind: its first results come from elsewhere, so nothing runs before all of it is compiled.
        early: names of outputs that are computed before any state changes.
    """

    def __init__(
        self,
        name: str,
        cut: Cut,
        state: Sequence[Value],
        rest: Sequence[Value],
        outputs: Sequence[Sequence[str]],
        edges: Edges | None = None,
        compiles: bool = True,
        behind: bool = False,
        early: Sequence[str] = (),
    ) -> None:
        self._put = jax.device_put if edges is None else edges.put
        self._numbers: dict[int, tuple[Any, Any]] = {}  # by slot, the number put on the mesh last
        self._on_mesh = edges is not None
        self._slots: dict[Value | int, int] = {value: slot for slot, value in enumerate((*state, *rest))}
        self._input_count = len(self._slots)
        self._computed = {value for segment in cut.segments for value in segment.outputs}
        self._constants: dict[int, Any] = {}
        results = {cut.outputs[n] for group in outputs for n in group}
        renewed = dict(zip(state, (cut.outputs[n] for n in outputs[0]), strict=True))
        functions = functions_of(cut.segments, renewed, results, edges, cut.early)
        self._calls = self._plan(cut.segments, functions, results)
        self._results = tuple(tuple(self._slot(cut.outputs[n]) for n in group) for group in outputs)
        self._early_results = tuple(self._slot(cut.outputs[name]) for name in early)
        self._early = self._calls[: cut.early]
        with x64():
            self._constants = {slot: self._put(array) for slot, array in self._constants.items()}
        reuse = {n for n, function in functions.items() if function.reused}
        self._first = self._calls_to(self._results[-1], reuse)
        self._functions = functions
        self._compiled = CompiledFunctions(name, functions, edges, compiles)
        if behind:
            self._first = 0
        else:
            if not self._first:  # everything must be compiled before anything runs
                start_waiting_materializations()
            self._lower_first()
        self.ran = False
        self.when_run: Callable[[], None] | None = None  # called once, after the first run has been dispatched

    def _lower_first(self) -> None:
        """Lower the functions that the loss needs."""
        first = {call.function for call in self._calls[: self._first]}
        while self._compiled.lower_next(first or self._functions):
            pass

    def lower(self) -> None:
        """Lower the remaining functions, and start compiling them."""
        while self._compiled.lower_next():
            pass
        self._compiled.release()

    @property
    def executables(self) -> list[Any]:
        """The compiled functions, in the order of their first calls; waits for pending compilations."""
        return self._compiled.all()

    def compile_all(self) -> None:
        """Compile the functions that no step has needed yet; or only lower them, without `compiles`."""
        self.lower()
        self._compiled.all()

    # -- assignment of slots --

    def _plan(
        self, segments: Sequence[Segment], functions: Mapping[int, Function], results: set[Value]
    ) -> list[_SegmentCall]:
        calls = []
        for segment in segments:
            function = functions[segment.function]
            reads = tuple(self._slot(segment.inputs[i]) for i in function.argument_order)
            begin = len(self._slots)
            for i in function.result_order:
                self._slot(segment.outputs[i])
            assert len(self._slots) - begin == len(function.result_order), "a result of a segment already has a slot"
            calls.append(_SegmentCall(segment.function, reads, slice(begin, len(self._slots)), ()))
        seen = {self._slot(value) for value in results} | set(self._constants)
        for n in reversed(range(len(calls))):
            frees = {slot for slot in (*calls[n].reads, *_filled(calls[n])) if slot not in seen}
            seen |= frees
            calls[n] = calls[n]._replace(frees=tuple(frees))
        return calls

    def _slot(self, value: Value | int) -> int:
        slot = self._slots.get(value)
        if slot is None:
            slot = self._slots[value] = len(self._slots)
            if isinstance(value, int):
                self._constants[slot] = np.uint32(value)
            elif value not in self._computed:
                never_written = torch.zeros(value.shape, dtype=value.dtype)
                self._constants[slot] = constant(never_written if value.real is None else value.real)
        return slot

    def _calls_to(self, results: Sequence[int], reuse: set[int]) -> int:
        """The number of calls that compute all `results`; 0 if the old state is overwritten before."""
        missing = set(results) - set(range(self._input_count)) - set(self._constants)
        for n, call in enumerate(self._calls):
            if not missing:
                return n
            if call.function in reuse:
                break
            missing.difference_update(_filled(call))
        return 0

    # -- a step --

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> SegmentedRun:
        """An execution; see `dispatch.execute`.

        The first time, `state` and `rest` may contain lazy arrays, which are waited for when a segment needs them: the
        forward pass starts while the optimizer's state is still being created. It returns as soon as the last group of
        outputs is available, with lazy arrays in the others: the first loss does not wait for the backward pass to
        compile.
        """
        if not isinstance(seed, jax.Array) and (self._on_mesh or len(self._calls) > 1):
            seed = self._put(seed)
        # One more slot than needed, where a last segment without results begins.
        slots: list[Any] = [*state, *rest, *[_NOT_YET] * (len(self._slots) - self._input_count + 1)]
        if self._on_mesh:
            self._put_numbers(slots)
        for slot, array in self._constants.items():
            slots[slot] = array
        return SegmentedRun(self, slots, seed)

    def _put_numbers(self, slots: list[Any]) -> None:
        """Transfer numbers such as the learning rate to all devices once, not for each segment that reads them."""
        for slot in range(self._input_count):
            number = slots[slot]
            if isinstance(number, np.generic):
                before = self._numbers.get(slot)
                if before is None or before[0] != number:
                    before = self._numbers[slot] = number, self._put(np.asarray(number))
                slots[slot] = before[1]

    def __call__(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> tuple[Any, ...]:
        """The Program's outputs, in the groups of `outputs`."""
        run = self.begin(state, rest, seed)
        run.prepare()
        run.finish()
        return run.outputs()


class _NotYet:
    """Marks the slot of an array that has not been computed yet."""


_NOT_YET: Any = _NotYet()


class SegmentedRun:
    """One execution of a SegmentedStep: a `StepRun` of `dispatch.py`."""

    def __init__(self, step: SegmentedStep, slots: list[Any], seed: Any) -> None:
        self._step = step
        self._slots = slots
        self._seed = seed
        self._results: list[Any] | None = None  # in a first run: those that are there before the rest is compiled
        self.later: BackgroundWork | None = None  # in a first run: computes what comes after the loss

    def take_early(self, before: Any, inputs: Sequence[Any], inputs_before: Sequence[Any]) -> None:
        """If another step has computed the same early segments at this call, take over their results. It does so up to
        a read that decides otherwise than in its trace: this is the step for the other decision.

        Args:
            inputs, inputs_before: what the inputs of this step and of the other are, in the order of the slots.
        """
        step, other = self._step, before._step
        if not isinstance(other, SegmentedStep) or step._on_mesh or len(step._early) != len(other._early):
            return
        same: dict[int, int] = {}  # the other step's slots, by this one's

        def is_same(slot: int, slot_before: int) -> bool:
            if slot in same:
                return same[slot] == slot_before
            if slot < len(inputs) and slot_before < len(inputs_before):
                return bool(inputs[slot] == inputs_before[slot_before])
            pair = step._constants.get(slot), other._constants.get(slot_before)
            return all(array is not None and array.size == 1 for array in pair) and np.array_equal(*pair)

        for call, call_before in zip(step._early, other._early, strict=True):
            function, function_before = step._functions[call.function], other._functions[call_before.function]
            if function.like.signature != function_before.like.signature or function.order() != function_before.order():
                return
            if not all(map(is_same, call.reads, call_before.reads)):
                return
            same.update(zip(_filled(call), _filled(call_before), strict=True))
        freed = {slot for call in step._early for slot in call.frees}
        if any(before._slots[same[slot]] is None for slot in same.keys() - freed):
            return
        for slot, slot_before in same.items():
            self._slots[slot] = before._slots[slot_before]

    def prepare(self) -> None:
        """Compile, and run what changes no state."""
        if not self._step.ran:
            self._prepare_first()
        self._run(self._step._early)

    def early(self) -> list[Any]:
        """The early outputs."""
        return [self._slots[slot] for slot in self._step._early_results]

    def finish(self) -> None:
        """Run the segments that have not run yet; after a first loss, in the background."""
        if self._results is None:
            self._run(self._step._calls)
            self._step.ran = True
            if (then := self._step.when_run) is not None:
                self._step.when_run = None
                then()
        else:
            self._run_rest_in_background(self._results)

    def outputs(self) -> tuple[Any, ...]:
        """The Program's outputs, in groups."""
        return tuple(tuple(map(self._output, group)) for group in self._step._results)

    def _output(self, slot: int) -> Any:
        array = self._slots[slot]
        if array is not _NOT_YET:
            return array
        assert self.later is not None
        return LazyArray(functools.partial(self.later.of, slot))

    def _run(self, calls: Sequence[_SegmentCall]) -> None:
        """Run those of `calls` that have not run yet."""
        slots, seed, compiled = self._slots, self._seed, self._step._compiled
        executables = compiled.called
        limited = self._step._on_mesh and on_cpu()
        for call in calls:
            fills = call.fills
            if slots[fills.start] is _NOT_YET:
                if limited:
                    in_flight.wait()
                function = executables.get(call.function) or compiled[call.function]
                slots[fills] = function(seed, *[slots[i] for i in call.reads])
                if limited:
                    in_flight.add(slots[fills.stop - 1])
            for slot in call.frees:
                slots[slot] = None

    def _prepare_first(self) -> None:
        step, slots = self._step, self._slots
        compiled = step._compiled
        postponed = step._first > 0 and on_cpu() and lowering_markers.is_marked(compiled.digest)
        for call in step._calls[: step._first]:
            while not (postponed or compiled.done(call.function)) and compiled.lower_next(hold=on_cpu()):
                pass
            for slot in call.reads:
                slots[slot] = ready(slots[slot])
            self._run([call])
        while not postponed and compiled.lower_next(hold=on_cpu()):
            pass
        if step._first in (0, len(step._calls)):
            self._prepare_rest()
            return
        results = {i: ready(slots[i]) for i in step._results[-1]}
        for slot, array in results.items():
            slots[slot] = array
        self._results = list(results.values())

    def _run_rest_in_background(self, results: list[Any]) -> None:
        """Run the rest of the step, whose results are available, in a background thread."""
        step, slots = self._step, self._slots
        rest = SegmentedRun(step, list(slots), self._seed)

        def finish() -> dict[int, Any]:
            try:
                jax.block_until_ready(results)
                rest._prepare_rest()
                rest.finish()
                computed = rest._slots
                arrays = jax.block_until_ready({i: computed[i] for group in step._results[:-1] for i in group})
                computed.clear()
                return arrays
            except BaseException:
                step._first = 0  # next time, it runs before the loss
                raise

        self.later = BackgroundWork(finish)
        self.later.begin()

    def all_at_once(self) -> tuple[Any, ...]:
        """Run the whole step, wait for it, and return the outputs."""
        self._prepare_rest()
        self.finish()
        outputs = jax.block_until_ready(self.outputs())
        self._slots.clear()
        return outputs

    def _prepare_rest(self) -> None:
        """Everything that may fail comes before the calls after the results, since they overwrite the old state."""
        step = self._step
        start_waiting_materializations()
        step.lower()
        self._slots[:] = map(ready, self._slots)  # while it compiles
        probe_memory(step._compiled.all())
        lowering_markers.mark(step._compiled.digest)
