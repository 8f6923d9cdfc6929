"""The functions of a step in segments: each distinct one is lowered in order, and compiled concurrently."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ... import malloc_settings, timeline
from ...interpreter import Uninterrupted, cores
from ...lower import aten
from ...lower.dtypes import to_jax
from ...lower.fused_updates import with_fused_updates
from ...lower.program import LoweredCall, Template, run_calls
from ...lower.segments import Segment, cut
from ...lower.threefry import fold_in
from ...program.graph import Value
from ...program.program import Program
from ..device.executable_calls import direct
from ..jax_support import compile_options, on_cpu, x64
from ..mesh.gathers import run_gathered
from ..mesh.mesh import Mesh
from ..mesh.peers import compile_for_others, peers_of
from ..mesh.same_run import SameRunEdges
from ..mesh.segment_shardings import Edges, PartitionedEdges
from . import executable_cache

_log = logging.getLogger("firstloss")
_OFTEN = 5  # how often a function computes each thing on the average, from which on it is repetitive
_ON_ONE_CORE = re.compile("scatter|index_put|index_add|index_copy|embedding|argmax|argmin|aten.max.dim|aten.min.dim")
_MUCH_ON_ONE_CORE = 1 << 20  # elements
_NOTICE_SECONDS = 10.0  # how long a compilation is waited for before that is said, and from then on how often


class Function(NamedTuple):
    """The function called by all segments with one number.

    Attributes:
        like: the first of these segments.
        argument_order: the indices of a segment's inputs in argument order, donated ones first.
        result_order: the indices of the segment's outputs in result order: first those in donated memory.
        reused: the number of donated arguments.
    """

    like: Segment
    argument_order: tuple[int, ...]
    result_order: tuple[int, ...]
    reused: int

    def arguments(self) -> list[Value | int]:
        """The first segment's inputs in argument order."""
        return [self.like.inputs[i] for i in self.argument_order]

    def results(self) -> list[Value]:
        """The first segment's outputs in result order."""
        return [self.like.outputs[i] for i in self.result_order]

    @property
    def older_emitters(self) -> bool:
        """Whether XLA's older emitters suit it. They compile equal loops each time, so it should not compute the same
        on other arrays too often; and they scatter, and find maxima with their places, on one core."""
        calls = self.like.calls
        kinds = {(call.kind, *((value.shape, value.dtype) for value in call.inputs)) for call in calls}
        return len(calls) <= _OFTEN * len(kinds) and not any(map(_is_much_on_one_core, calls))

    def order(self) -> tuple[Any, ...]:
        """With the segment's signature, all that its code depends on: the order of its arguments, which of the values
        that it computes are its results, and the number of donated arguments."""
        numbers = {value: i for i, value in enumerate(v for call in self.like.calls for v in call.outputs)}
        results = tuple(numbers[self.like.outputs[i]] for i in self.result_order)
        return self.argument_order, results, self.reused


def _is_much_on_one_core(call: LoweredCall) -> bool:
    return (
        any(value.numel >= _MUCH_ON_ONE_CORE for value in call.inputs)
        and isinstance(call.kind, Template)
        and _ON_ONE_CORE.search(str(call.kind.op)) is not None
    )


class CompiledFunctions:
    """The distinct functions of a step, as they become executables: lowered in order, compiled concurrently.

    Attributes:
        called: the functions that have been called, by number.
    """

    def __init__(self, name: str, functions: Mapping[int, Function], edges: Edges | None, compiles: bool) -> None:
        self._name = name
        self._edges = edges
        self._compiles = compiles
        self._signatures = {n: executable_cache.describe(f.like.signature) for n, f in functions.items()}
        self.digest: str = executable_cache.digest_of(self._signatures.values())
        self._functions = functions
        if edges is not None and edges.same_run and len(functions) > 1:  # how one is cut depends on those before
            with x64(), aten.within(False):
                for function in functions.values():
                    computation(function, edges)
        self._todo = dict(functions)
        self._held: dict[int, Any] = {}
        self._entries: dict[int, executable_cache.Entry] = {}
        self._futures: dict[int, Future[Any]] = {}
        self.called: dict[int, Any] = {}
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="firstloss-compile")
        self._peers = peers_of(edges.whole.mesh) if edges is not None and compiles else None
        if self._peers is not None:
            self._peers.agree(name, self.digest)

    def lower_next(self, among: Container[int] | None = None, hold: bool = False) -> bool:
        """Lower the next function, and start compiling it; False if none is left (`among` these).

        Args:
            hold: start compiling it only at `release`: the loss comes first if the compiler shares its cores with the
                forward pass.
        """
        number = next((n for n in self._todo if among is None or n in among), None)
        if number is None:
            return False
        with timeline.span("lower"):
            entry = self._entry(number)
            self._held[number] = entry if entry is not None and entry.found else self._lower(number)
        del self._todo[number], self._signatures[number]
        if not hold:
            self.release()
        return True

    def _lower(self, number: int) -> Any:
        return lower_function(f"{self._name}_{number}", self._functions[number], self._edges)

    def _entry(self, number: int) -> executable_cache.Entry | None:
        """The cache entry of a function, or None if it is not cached."""
        edges = self._edges
        if not self._compiles or edges is not None and jax.process_count() > 1:  # processes share compiled functions
            return None
        function = self._functions[number]
        partitioning = () if edges is None else (edges.whole.mesh, edges.described(function.like))
        entry = executable_cache.entry_of(
            f"{self._name}_{number}", self._signatures[number], function.order(), *partitioning
        )
        if entry is not None:
            self._entries[number] = entry
        return entry

    def release(self) -> None:
        """Start compiling the lowered functions."""
        if not self._compiles:
            self._held.clear()
        while self._held:
            number = next(iter(self._held))
            with Uninterrupted():  # an interrupted lock of the pool would stay locked
                self._futures[number] = self._pool.submit(self._compile, number, self._held[number])
            del self._held[number]  # after an interrupt before, it is compiled twice
        if not self._todo:
            self._pool.shutdown(wait=False)

    def _compile(self, number: int, lowered: Any) -> Any:
        executable = self._executable(number, lowered)
        if self._edges is not None and self._edges.same_run:  # a long function, for which the compiler takes gigabytes
            malloc_settings.release_freed()
        return executable

    def _executable(self, number: int, lowered: Any) -> Any:
        with timeline.span("compile"), x64():
            entry, edges = self._entries.get(number), self._edges
            if isinstance(lowered, executable_cache.Entry):
                compiled = lowered.load()
                if compiled is not None:
                    return compiled
                lowered = self._lower(number)
            if edges is None:
                options = compile_options(older_emitters=self._functions[number].older_emitters)
            else:
                options = compile_options(on_mesh=True, same_run=edges.same_run)
            if entry is not None:
                return entry.compile(lowered, options)
            if self._peers is None or edges is None:
                return lowered.compile(options)
            return self._peers.compile(number, self._name, lowered, options, edges.whole.mesh.devices)

    def done(self, number: int) -> bool:
        """Whether a function has been compiled, or has failed to compile."""
        return number in self._futures and self._futures[number].done()

    def __getitem__(self, number: int) -> Any:
        executable = self.called.get(number)
        if executable is None:
            executable = self.called[number] = direct(self._awaited(self._futures[number]))
        return executable

    def all(self) -> list[Any]:
        """The executables; waits for pending compilations."""
        return list(map(self._awaited, self._futures.values()))

    def _awaited(self, future: Future[Any]) -> Any:
        """A function, once it is compiled. A long wait is logged; if INFO is not, it is printed on a terminal."""
        while True:
            try:
                return future.result(_NOTICE_SECONDS)
            except TimeoutError:
                if future.done():  # the compilation's own error
                    raise
            done = sum(map(Future.done, self._futures.values()))
            notice = f"compiling {self._name}: {done} of {len(self._futures)} functions"
            _log.info(notice)
            if not _log.isEnabledFor(logging.INFO) and sys.stderr.isatty():
                print(notice, file=sys.stderr)


def keep_compiled(name: str, functions: Mapping[int, Function], edges: Edges) -> None:
    """Compile a step's functions into the compilation cache folder, for the processes of another mesh."""
    options = compile_options(on_mesh=True, same_run=edges.same_run)
    for number, function in functions.items():
        with timeline.span("compile ahead"), x64():
            compile_for_others(lower_function(f"{name}_{number}", function, edges), options, edges.whole.mesh.devices)


def whole_function(
    program: Program,
    made: Sequence[Value] | None,
    mesh: Mesh | None,
    where: Mapping[Value, Any],
    batch: Container[Value],
    wanted: Mapping[str, Any],
) -> tuple[Function, Edges | None]:
    """All of a Program as one function, and how it is divided over a mesh, as steps are.

    Args:
        made: which values it returns; None: the Program's outputs.
        where: the shardings of the inputs.
        batch: the inputs that are the batch.
        wanted: by name, the shardings of outputs.
    """
    pieces = cut(program, separate=program.outputs, least_periods=sys.maxsize)
    (segment,) = pieces.segments
    if made is not None:
        segment = segment._replace(outputs=tuple(made))
    edges = None
    if mesh is not None:
        kind = PartitionedEdges if mesh.same_run is None else SameRunEdges
        shardings = {pieces.outputs[name]: sharding for name, sharding in wanted.items()}
        edges = kind(pieces._replace(segments=[segment]), mesh, where, batch, shardings)
        (segment,) = edges.cut.segments
    return Function(segment, tuple(range(len(segment.inputs))), tuple(range(len(segment.outputs))), 0), edges


def step_key(seed: Any) -> Any:
    """The key of a step's random numbers, from the two words that are its argument."""
    return fold_in(jax.random.key(seed[0]), seed[1])


def computation(function: Function, edges: Edges | None) -> Callable[..., tuple[Any, ...]]:
    """What a function computes from a seed and its arguments, as it is divided over the devices."""
    segment = function.like
    inputs, outputs = function.arguments(), function.results()

    def run(seed: Any, *operands: Any) -> tuple[Any, ...]:
        arrays: dict[Any, Any] = dict(zip(inputs, operands, strict=True))
        step: list[Any] = []

        def key_of(draw: int) -> Any:
            if not step:
                step.append(step_key(seed))
            return fold_in(step[0], arrays[draw])

        if edges is None:
            run_calls(with_fused_updates(segment.calls, outputs), arrays, key_of)
        elif gathers is None:
            for number, call in enumerate(segment.calls):
                with jax.named_scope(str(number)):  # by which `SameRunEdges` finds its line
                    run_calls([call], arrays, key_of)
        else:
            run_gathered(gathers, arrays, key_of, edges.whole.mesh)
        return tuple(arrays[value] for value in outputs)

    gathers = None if edges is None else edges.gathers(segment)
    return run if edges is None else edges.divided(segment, run, inputs, outputs)


def lower_function(name: str, function: Function, edges: Edges | None) -> Any:
    """A function in StableHLO, ready to be compiled."""
    inputs, outputs = function.arguments(), function.results()
    with x64(), aten.within(edges is None and on_cpu()):
        step = computation(function, edges)
        options: dict[str, Any] = {} if edges is None else {"out_shardings": tuple(map(edges.of, outputs))}
        step.__name__ = name
        jitted = jax.jit(step, donate_argnums=tuple(range(1, 1 + function.reused)), **options)
        seed = jax.ShapeDtypeStruct((2,), np.uint32, sharding=None if edges is None else edges.whole)
        return jitted.lower(seed, *(_shape(value, edges) for value in inputs))


def functions_of(
    segments: Sequence[Segment],
    renewed: Mapping[Value, Value],
    results_of_step: set[Value],
    edges: Edges | None,
    early: int = 0,
) -> dict[int, Function]:
    """The distinct functions, in the order of their first call; the first `early` segments overwrite no state."""
    last = {value: n for n, segment in enumerate(segments) for value in segment.inputs}
    reusable: dict[int, set[tuple[int, int]]] = {}
    for n, segment in enumerate(segments):
        positions = {value: i for i, value in enumerate(segment.outputs)}
        pairs = set()
        for i, value in enumerate(segment.inputs):
            new = renewed.get(value) if isinstance(value, Value) else None
            if (
                new is not None
                and n >= early
                and new in positions
                and last[value] == n
                and value not in results_of_step
                and _shape(value, edges) == _shape(new, edges)
            ):
                pairs.add((i, positions[new]))
        reusable[segment.function] = reusable.get(segment.function, pairs) & pairs
    functions: dict[int, Function] = {}
    for segment in segments:
        if segment.function not in functions:
            donated = dict(sorted(reusable[segment.function]))
            renewed_outputs = set(donated.values())
            arguments = (*donated, *(i for i in range(len(segment.inputs)) if i not in donated))
            # XLA on a CPU schedules for the first result first: the result computed last goes there, so that everything
            # before it is computed in order. In the original order, a checkpointed step takes 1.4 times the memory.
            others = (i for i in reversed(range(len(segment.outputs))) if i not in renewed_outputs)
            results = (*donated.values(), *others)
            functions[segment.function] = Function(segment, arguments, results, len(donated))
    return functions


def _shape(value: Value | int, edges: Edges | None) -> jax.ShapeDtypeStruct:
    sharding = None if edges is None else edges.of(value)
    if isinstance(value, int):
        return jax.ShapeDtypeStruct((), np.uint32, sharding=sharding)
    return jax.ShapeDtypeStruct(value.shape, to_jax(value.dtype), sharding=sharding)
