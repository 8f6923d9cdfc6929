"""A step in segments: each distinct one compiled once, side by side, and called in order at every step."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from ... import timeline
from ...lower import aten
from ...lower.dtypes import to_jax
from ...lower.program import Template, constant, run_calls
from ...lower.segments import Cut, Segment
from ...program.graph import Value
from ..device.executable_calls import Shield, begun, called, calling, direct, flat, probe_memory
from ..device.lazy_array import LazyArray, ready
from ..device.placement import start_waiting_materializations
from ..jax_support import compile_options, on_cpu, x64
from ..mesh.gathers import run_gathered
from ..mesh.peers import peers_of
from ..mesh.segment_shardings import Edges
from . import executable_cache, lowering_markers
from .background_work import BackgroundWork


class Function(NamedTuple):
    """What all segments of one number call.

    Attributes:
        like: the first of these segments.
        argument_order: which of a segment's inputs are its arguments: first those whose memory it may reuse.
        result_order: which of the segment's outputs are its results: first what takes the place of those.
        reused: how many these are.
    """

    like: Segment
    argument_order: tuple[int, ...]
    result_order: tuple[int, ...]
    reused: int


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
        self._compiled = _Compiling(name, functions, edges, compiles)
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
        few = self._step._on_mesh and on_cpu()
        calling(self)
        for call in calls:
            fills = call.fills
            if slots[fills.start] is _NOT_YET:
                if few:
                    begun.wait()
                # The results are in their slots when the instruction is through.
                slots[fills] = flat(called(compiled[call.function], ((seed, *[slots[i] for i in call.reads]),)))
                if few:
                    begun.add(slots[fills.stop - 1])
            for slot in call.frees:
                slots[slot] = None
        calling(None)

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


class _Compiling:
    """The distinct functions of a step, on their way to executables: lowered in turn, compiled side by side."""

    def __init__(self, name: str, functions: Mapping[int, Function], edges: Edges | None, compiles: bool) -> None:
        self._name = name
        self._edges = edges
        self._compiles = compiles
        self.digest = _digest(functions.values())
        self._functions = functions
        self._todo = dict(functions)
        self._held: dict[int, Any] = {}
        self._entries: dict[int, executable_cache.Entry] = {}
        self._futures: dict[int, Future[Any]] = {}
        self._executables: dict[int, Any] = {}
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="firstloss-compile")
        self._peers = peers_of(edges.whole.mesh) if edges is not None and compiles else None
        if self._peers is not None:
            self._peers.agree(name, self.digest)

    def lower_next(self, among: Container[int] | None = None, hold: bool = False) -> bool:
        """Lower the next function, and begin to compile it; False if none is left (`among` these).

        Args:
            hold: begin to compile it at `release` only. Where the compiler runs on the cores on which the forward pass
                does, the loss comes first.
        """
        number = next((n for n in self._todo if among is None or n in among), None)
        if number is None:
            return False
        with timeline.span("lower"):
            entry = self._entry(number)
            self._held[number] = entry if entry is not None and entry.found else self._lower(number)
        del self._todo[number]
        if not hold:
            self.release()
        return True

    def _lower(self, number: int) -> Any:
        return _lower(f"{self._name}_{number}", self._functions[number], self._edges)

    def _entry(self, number: int) -> executable_cache.Entry | None:
        """Where a function is kept from one start to the next; None if it is not."""
        edges = self._edges
        if not self._compiles or edges is not None and jax.process_count() > 1:  # these share what they compile
            return None
        function = self._functions[number]
        made = {value: i for i, value in enumerate(v for call in function.like.calls for v in call.outputs)}
        results = tuple(made[function.like.outputs[i]] for i in function.result_order)
        order = (function.argument_order, results, function.reused)
        where = () if edges is None else (edges.whole.mesh, edges.described(function.like))
        entry = executable_cache.entry_of(f"{self._name}_{number}", function.like.signature, order, *where)
        if entry is not None:
            self._entries[number] = entry
        return entry

    def release(self) -> None:
        """Compile what is lowered."""
        if not self._compiles:
            self._held.clear()
        while self._held:
            number = next(iter(self._held))
            self._futures[number] = self._pool.submit(self._compile, number, self._held[number])
            del self._held[number]  # an interrupt before has it compiled twice
        if not self._todo:
            self._pool.shutdown(wait=False)

    def _compile(self, number: int, lowered: Any) -> Any:
        with timeline.span("compile"), x64():
            entry = self._entries.get(number)
            options = compile_options(on_mesh=self._edges is not None)
            if entry is not None:
                if isinstance(lowered, executable_cache.Entry):
                    compiled = entry.load()
                    if compiled is not None:
                        return compiled
                    lowered = self._lower(number)
                return entry.compile(lowered, options)
            if self._peers is None or self._edges is None:
                return lowered.compile(options)
            devices = self._edges.whole.mesh.devices
            return self._peers.compile(number, self._name, lowered, options, devices)

    def reuses(self, number: int) -> bool:
        """Whether a function overwrites old state."""
        return self._functions[number].reused > 0

    def done(self, number: int) -> bool:
        """Whether a function has been compiled, or has failed to."""
        return number in self._futures and self._futures[number].done()

    def __getitem__(self, number: int) -> Any:
        executable = self._executables.get(number)
        if executable is None:
            executable = self._executables[number] = direct(self._futures[number].result())
        return executable

    def all(self) -> list[Any]:
        """The executables; waits for those under way."""
        return [future.result() for future in self._futures.values()]


def _digest(functions: Iterable[Function]) -> str:
    """The same for steps of the same operations on the same shapes: good for a note, not to take one for the other."""
    found = hashlib.sha256(f"{jax.__version__} {torch.__version__}".encode())
    for function in functions:
        for call in function.like.calls:
            shapes = [(value.shape, value.dtype) for value in call.outputs]
            found.update(f"{call.node and call.node.op} {shapes}".encode())
            if isinstance(call.kind, Template):
                found.update(repr([*_plain((call.kind.args, call.kind.kwargs))]).encode())
    return found.hexdigest()


def _plain(args: Any) -> Iterator[Any]:
    """The numbers and words among a call's arguments."""
    if isinstance(args, (tuple, list)):
        for arg in args:
            yield from _plain(arg)
    elif isinstance(args, (int, float, complex, str)):
        yield args


def step_key(seed: Any) -> Any:
    """The key of a step's random numbers, from the two words that it is called with."""
    return jax.random.fold_in(jax.random.key(seed[0]), seed[1])


def _lower(name: str, function: Function, edges: Edges | None) -> Any:
    segment = function.like
    inputs = [segment.inputs[i] for i in function.argument_order]
    outputs = [segment.outputs[i] for i in function.result_order]

    def run(seed: Any, *given: Any) -> tuple:
        arrays: dict[Any, Any] = dict(zip(inputs, given, strict=True))
        step: list[Any] = []

        def key_of(draw: int) -> Any:
            if not step:
                step.append(step_key(seed))
            return jax.random.fold_in(step[0], arrays[draw])

        if gathers is None or edges is None:
            run_calls(segment.calls, arrays, key_of)
        else:
            run_gathered(gathers, arrays, key_of, edges.whole.mesh)
        return tuple(arrays[value] for value in outputs)

    gathers = None if edges is None else edges.gathers(segment)
    run.__name__ = name
    with x64(), aten.within(edges is None and on_cpu()):
        options: dict[str, Any] = {} if edges is None else {"out_shardings": tuple(map(edges.of, outputs))}
        jitted = jax.jit(run, donate_argnums=tuple(range(1, 1 + function.reused)), **options)
        seed = jax.ShapeDtypeStruct((2,), np.uint32, sharding=None if edges is None else edges.whole)
        return jitted.lower(seed, *(_shape(value, edges) for value in inputs))


def functions_of(
    segments: Sequence[Segment], renewed: Mapping[Value, Value], kept: set[Value], edges: Edges | None
) -> dict[int, Function]:
    """The distinct functions, in the order of their first call."""
    last = {value: n for n, segment in enumerate(segments) for value in segment.inputs}
    reusable: dict[int, set[tuple[int, int]]] = {}
    for n, segment in enumerate(segments):
        places = {value: i for i, value in enumerate(segment.outputs)}
        pairs = set()
        for i, value in enumerate(segment.inputs):
            new = renewed.get(value) if isinstance(value, Value) else None
            if (
                new is not None
                and new in places
                and last[value] == n
                and value not in kept
                and _shape(value, edges) == _shape(new, edges)
            ):
                pairs.add((i, places[new]))
        reusable[segment.function] = reusable.get(segment.function, pairs) & pairs
    functions: dict[int, Function] = {}
    for segment in segments:
        if segment.function not in functions:
            taken = dict(sorted(reusable[segment.function]))
            given = set(taken.values())
            arguments = (*taken, *(i for i in range(len(segment.inputs)) if i not in taken))
            # XLA on a CPU schedules for the first result first: what is made last goes there, since all that leads to
            # it is then done in order. In the order of making, a checkpointed step takes 1.4 times the memory.
            others = (i for i in reversed(range(len(segment.outputs))) if i not in given)
            results = (*taken.values(), *others)
            functions[segment.function] = Function(segment, arguments, results, len(taken))
    return functions


def _shape(value: Value | int, edges: Edges | None) -> jax.ShapeDtypeStruct:
    where = None if edges is None else edges.of(value)
    if isinstance(value, int):
        return jax.ShapeDtypeStruct((), np.uint32, sharding=where)
    return jax.ShapeDtypeStruct(value.shape, to_jax(value.dtype), sharding=where)
