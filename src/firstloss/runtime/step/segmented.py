"""A step in segments, called in order at every step: each distinct one is a function, compiled once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ...lower.dtypes import constant
from ...lower.segments import Cut, Segment
from ...program.graph import Value
from ..device.executable_calls import Shield, begun, called, flat, probe_memory, this_thread
from ..device.lazy_array import BackgroundWork, LazyArray, ready
from ..device.placement import start_waiting_materializations
from ..jax_support import on_cpu, x64
from ..mesh.segment_shardings import Edges
from . import lowering_markers
from .functions import CompiledFunctions, Function, functions_of


class _SegmentCall(NamedTuple):
    """A call of a segment's function in a step: which, and the numbered slots that it reads, fills and frees.

    What it fills is one range, so that its results are put there in one go: a step has some thousand of them.
    """

    function: int
    reads: tuple[int, ...]
    fills: slice
    frees: tuple[int, ...]


def _filled(call: _SegmentCall) -> range:
    return range(call.fills.start, call.fills.stop)


class SegmentedStep:
    """Called as a whole step's executable is: with the state that the step changes, the rest, and the seed.

    Segments run as soon as they are compiled, so the first loss may be there while the backward pass still compiles;
    what changes the state waits until everything is compiled. A state's old array is donated where it is used last,
    if the new one is made there.

    Args:
        state: the Values of the state, in the order in which it will be given; its new content is `outputs[0]`.
        outputs: names of the Program's outputs, in groups as the call shall return them.
        edges: on a mesh, the shardings of what goes from one segment to another.
        compiles: whether it is for more than to see that all can be lowered.
        behind: its first results are available, or will be: nothing is run before all of it is compiled.
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
    ) -> None:
        self._put = jax.device_put if edges is None else edges.put
        self._numbers: dict[int, tuple[Any, Any]] = {}  # by slots, what was put on the mesh last
        self._on_mesh = edges is not None
        self._slots: dict[Value | int, int] = {value: slot for slot, value in enumerate((*state, *rest))}
        self._given = len(self._slots)
        self._made = {value for segment in cut.segments for value in segment.outputs}
        self._constants: dict[int, Any] = {}
        kept = {cut.outputs[n] for group in outputs for n in group}
        renewed = dict(zip(state, (cut.outputs[n] for n in outputs[0]), strict=True))
        functions = functions_of(cut.segments, renewed, kept, edges)
        self._calls = self._plan(cut.segments, functions, kept)
        self._results = tuple(tuple(self._slot(cut.outputs[n]) for n in group) for group in outputs)
        with x64():
            self._constants = {slot: self._put(array) for slot, array in self._constants.items()}
        reuse = {n for n, function in functions.items() if function.reused}
        self._first = self._calls_to(self._results[-1], reuse)
        self._functions = functions
        self._compiled = CompiledFunctions(name, functions, edges, compiles)
        if behind:
            self._first = 0
        else:
            if not self._first:  # all of it has to be there before anything is run
                start_waiting_materializations()
            self._lower_first()
        self.ran = False

    def _lower_first(self) -> None:
        """Lower what the loss needs."""
        first = {call.function for call in self._calls[: self._first]}
        while self._compiled.lower_next(first or self._functions):
            pass

    def lower(self) -> None:
        """Lower what has not been, and begin to compile it."""
        while self._compiled.lower_next():
            pass
        self._compiled.release()

    @property
    def executables(self) -> list[Any]:
        """The compiled functions, in the order in which they are first called; waits for those under way."""
        return self._compiled.all()

    def compile_all(self) -> None:
        """Compile what no step has asked for yet; or only lower it, where that is all that is wanted."""
        self.lower()
        self._compiled.all()

    # -- which slot holds what --

    def _plan(
        self, segments: Sequence[Segment], functions: Mapping[int, Function], kept: set[Value]
    ) -> list[_SegmentCall]:
        calls = []
        for segment in segments:
            function = functions[segment.function]
            reads = tuple(self._slot(segment.inputs[i]) for i in function.argument_order)
            begin = len(self._slots)
            for i in function.result_order:
                self._slot(segment.outputs[i])
            assert len(self._slots) - begin == len(function.result_order), "a segment gives what has a slot already"
            calls.append(_SegmentCall(segment.function, reads, slice(begin, len(self._slots)), ()))
        seen = {self._slot(value) for value in kept} | set(self._constants)
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
            elif value not in self._made:
                never_written = torch.zeros(value.shape, dtype=value.dtype)
                self._constants[slot] = constant(never_written if value.real is None else value.real)
        return slot

    def _calls_to(self, results: Sequence[int], reuse: set[int]) -> int:
        """How many calls it takes until all `results` are there; none, if the old state is overwritten before."""
        wanted = set(results) - set(range(self._given)) - set(self._constants)
        for n, call in enumerate(self._calls):
            if not wanted:
                return n
            if call.function in reuse:
                break
            wanted.difference_update(_filled(call))
        return 0

    # -- a step --

    def begin(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> SegmentedRun:
        """An execution, to be begun by its `advance`.

        The first time, `state` and `rest` may hold lazy arrays, which are waited for when the first segment needs them.
        So the forward pass begins while the optimizer's state is still being made. And it returns as soon as the last
        group is there: those in the others are lazy. So the first loss does not wait until the backward pass is
        compiled.
        """
        if not isinstance(seed, jax.Array) and (self._on_mesh or len(self._calls) > 1):
            seed = self._put(seed)
        # One more than there are: where the last segment gives nothing, it begins there.
        slots: list[Any] = [*state, *rest, *[_NOT_YET] * (len(self._slots) - self._given + 1)]
        if self._on_mesh:
            self._put_numbers(slots)
        for slot, array in self._constants.items():
            slots[slot] = array
        return SegmentedRun(self, slots, seed)

    def _put_numbers(self, slots: list[Any]) -> None:
        """Numbers, such as the learning rate, go to all devices once, and not with each segment that reads them."""
        for slot in range(self._given):
            number = slots[slot]
            if isinstance(number, np.generic):
                before = self._numbers.get(slot)
                if before is None or before[0] != number:
                    before = self._numbers[slot] = number, self._put(np.asarray(number))
                slots[slot] = before[1]

    def __call__(self, state: Sequence[Any], rest: Sequence[Any], seed: Any) -> tuple:
        """The Program's outputs, in the groups of `outputs`."""
        run = self.begin(state, rest, seed)
        run.advance()
        return run.outputs()


class _NotYet:
    """What is in the slot of an array that no segment has made yet."""


_NOT_YET: Any = _NotYet()


class SegmentedRun:
    """One execution of a SegmentedStep: a `Run`, as `dispatch.py` has it."""

    def __init__(self, step: SegmentedStep, slots: list[Any], seed: Any) -> None:
        self._step = step
        self._slots = slots
        self._seed = seed
        self.later: BackgroundWork | None = None  # of a first run: what the calls after the loss will make
        self.shield: Shield | None = None

    def advance(self) -> None:
        """Run the segments that have not been run yet."""
        step = self._step
        if self.later is not None:
            return
        if step.ran:
            self._run(step._calls)
        else:
            self._first_run()

    def outputs(self) -> tuple:
        """The Program's outputs, in groups."""
        return tuple(tuple(map(self._output, group)) for group in self._step._results)

    def _output(self, slot: int) -> Any:
        array = self._slots[slot]
        if array is not _NOT_YET:
            return array
        assert self.later is not None
        return LazyArray(functools.partial(self.later.of, slot))

    def next_call(self) -> int:
        """The number of the call that comes next."""
        calls = self._step._calls
        return next((n for n, call in enumerate(calls) if self._slots[call.fills.start] is _NOT_YET), len(calls))

    def begun(self) -> bool:
        """After an interrupt: whether state has been handed over; else it will not be."""
        if self.later is not None:
            if not self.later.cancel():
                return True
            self.later = None
            return False
        shield, calls = self.shield, self._step._calls
        if shield is not None and shield.number == self.next_call():
            results = shield.rescued()
            if results is not None:
                self._slots[calls[shield.number].fills] = results
        compiled = self._step._compiled
        return any(compiled.reuses(call.function) for call in calls[: self.next_call()])

    def _run(self, calls: Sequence[_SegmentCall]) -> None:
        """Run those of `calls` that have not been run: it may go on where it was interrupted."""
        slots, seed, compiled = self._slots, self._seed, self._step._compiled
        known = compiled.called
        few = self._step._on_mesh and on_cpu()
        this_thread.run = self
        for call in calls:
            fills = call.fills
            if slots[fills.start] is _NOT_YET:
                if few:
                    begun.wait()
                # The results are in their slots when the instruction is through.
                function = known.get(call.function) or compiled[call.function]
                slots[fills] = flat(called(function, ((seed, *[slots[i] for i in call.reads]),)))
                if few:
                    begun.add(slots[fills.stop - 1])
            for slot in call.frees:
                slots[slot] = None
        this_thread.run = None

    def _first_run(self) -> None:
        step, slots = self._step, self._slots
        compiled = step._compiled
        put_off = step._first > 0 and on_cpu() and lowering_markers.is_marked(compiled.digest)
        for call in step._calls[: step._first]:
            while not (put_off or compiled.done(call.function)) and compiled.lower_next(hold=on_cpu()):
                pass
            for slot in call.reads:
                slots[slot] = ready(slots[slot])
            self._run([call])
        while not put_off and compiled.lower_next(hold=on_cpu()):
            pass
        if step._first in (0, len(step._calls)):
            self._finish()
            return
        results = {i: ready(slots[i]) for i in step._results[-1]}
        for slot, array in results.items():
            slots[slot] = array
        self._run_rest_in_background(list(results.values()))

    def _run_rest_in_background(self, results: list[Any]) -> None:
        """The results are available; the rest of the step follows in a thread of its own."""
        step, slots = self._step, self._slots
        rest = SegmentedRun(step, list(slots), self._seed)

        def finish() -> dict[int, Any]:
            try:
                jax.block_until_ready(results)
                rest._finish()
                mine = rest._slots
                arrays = jax.block_until_ready({i: mine[i] for group in step._results[:-1] for i in group})
                mine.clear()
                return arrays
            except BaseException:
                step._first = 0  # another time, it comes before the loss
                raise

        self.later = BackgroundWork(finish)
        self.later.begin()

    def all_at_once(self) -> tuple:
        """Run all of it, and wait for it: the outputs."""
        self._finish()
        outputs = jax.block_until_ready(self.outputs())
        self._slots.clear()
        return outputs

    def _finish(self) -> None:
        """The calls that the results do not need. What could fail, fails before: they overwrite the old state."""
        step = self._step
        start_waiting_materializations()
        step.lower()
        self._slots[:] = map(ready, self._slots)  # while it compiles
        probe_memory(step._compiled.all())
        lowering_markers.mark(step._compiled.digest)
        self._run(step._calls)
        step.ran = True
