"""Segmentation of a Program where it repeats, so that equal layers are lowered and compiled once.

The calls of a deep model's step repeat layer after layer, in the forward pass and again in the backward pass. They are
cut into segments at the layers' boundaries; segments with the same computation on different arrays share one function.
The compiled code is as long as one layer plus what surrounds the layers; running a step calls the functions in turn.

Whether segments are equal is determined from the calls and their dataflow, not from the model's modules: any Program
that repeats is cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..program.graph import Ref, Value
from ..program.program import Program
from . import loops
from .foreach_split import split_foreach_calls
from .program import LoweredCall, View, view_of
from .repeats import Repeats, find_runs

# A Program is cut if this fraction of its calls, and this many, then need no compilation. Shorter ones compile in a
# second.
_SHARE = 0.4
_SAVED = 400
# The maximal number of segments in a run: each costs the host some 20 us per step, and devices' queues are short.
_MOST_SEGMENTS = 48
# The minimal number of calls in a segment.
_LEAST_CALLS = 24
# Runs of at least this many periods, which each touch fewer bytes than this (about a millisecond of work), are cut at
# every second period: starting a segment takes the device some 40 us. Longer segments take longer to compile.
_LEAST_BYTES = 16 << 20
_MANY = 8
# On one CPU device, runs of fewer periods are compiled as one function. This takes no longer (Llamas with AdamW: 2.5 s
# instead of 2.8 for 4 layers, 5.2 instead of 4.9 for 12), and later steps are 10 to 12% faster: where a segment ends, a
# core has nothing to do.
LEAST_PERIODS_ON_CPU = 8


class Cut(NamedTuple):
    """A Program in segments, in an order in which they can run.

    Attributes:
        outputs: for each output of the Program, the Value that holds it after the segments have run.
        early: the number of segments that compute the early outputs, and come first.
    """

    segments: list[Segment]
    outputs: dict[str, Value]
    early: int = 0


class Segment(NamedTuple):
    """Consecutive calls.

    Attributes:
        function: the number of its function; equal for segments with the same computation.
        inputs: the Values read from outside, in the order of use; an int is the index of a random draw.
        outputs: the Values read by others.
        signature: a hashable description of the computation; equal for the same function, and only then.
    """

    function: int
    calls: tuple[LoweredCall, ...]
    inputs: tuple[Value | int, ...]
    outputs: tuple[Value, ...]
    signature: Hashable


def cut(
    program: Program,
    first: Iterable[str] = (),
    separate: Iterable[str] = (),
    early: Iterable[str] = (),
    least_periods: int = 2,
    on_mesh: bool = False,
) -> Cut:
    """Cut `program` where it repeats, if enough of it does.

    Args:
        first: names of outputs that are needed as early as possible: if it is cut, it is also cut after the call that
            makes the last of these. (A loss is available long before the backward pass has been compiled.)
        separate: names of outputs that get a Value of their own, which is neither an input nor another output.
        early: names of outputs that are needed before anything else: what they do not need is in other segments.
        least_periods: how often a run has to repeat.
        on_mesh: whether arrays may be sharded, so that the offsets of views have to be known.
    """
    calls = split_foreach_calls(program.nodes)
    views = _output_views(program, separate)
    for view in views.values():
        calls.insert(1 + max((i for i, call in enumerate(calls) if view.inputs[0] in call.outputs), default=-1), view)
    outputs = _outputs(program, views)
    calls, count = _in_front(calls, [outputs[name] for name in early])
    bounds = {0, count, len(calls)}
    runs = _runs(calls, least_periods)
    if not runs and not on_mesh and _may_repeat(calls, least_periods):
        steps = loops.as_operands(calls)
        runs = _runs(steps, least_periods)
        calls = steps if runs else calls
    if runs:
        last_use = {value: i for i, call in enumerate(calls) for value in call.inputs}
        last_use.update(dict.fromkeys(outputs.values(), len(calls)))
        results = {outputs[name] for name in first}
        bounds.add(1 + max((i for i, call in enumerate(calls) if not results.isdisjoint(call.outputs)), default=-1))
        for run in runs:
            bounds.update(_bounds(run, calls, last_use))
    order = sorted(bounds)
    pieces = [calls[a:b] for a, b in zip(order, order[1:], strict=False)]
    segments = _shared(pieces, set(program.inputs.values()), set(outputs.values()))
    return Cut(segments, outputs, order.index(count))


def _in_front(calls: list[LoweredCall], values: Sequence[Value]) -> tuple[list[LoweredCall], int]:
    """The calls in an order in which those that `values` need come first, as they were recorded, and how many these
    are. (Steps that go on differently have them in one order, and the same function for them.)"""
    maker = {value: i for i, call in enumerate(calls) for value in call.outputs}
    recorded: list[int] = []
    for call in calls:  # a view for an output is of no node, and comes after what it views
        viewed = maker.get(call.inputs[0]) if call.inputs else None
        recorded.append(call.node.index if call.node is not None else -1 if viewed is None else recorded[viewed])
    needed: set[int] = set()
    todo = [maker[value] for value in values if value in maker]
    while todo:
        if (i := todo.pop()) not in needed:
            needed.add(i)
            todo.extend(maker[value] for value in calls[i].inputs if value in maker)
    others = [call for i, call in enumerate(calls) if i not in needed]
    return [*(calls[i] for i in sorted(needed, key=lambda i: (recorded[i], i))), *others], len(needed)


def _may_repeat(calls: Sequence[LoweredCall], least_periods: int) -> bool:
    """Whether there are enough calls for a run."""
    return len(calls) >= max(_SAVED, least_periods)


def _runs(calls: Sequence[LoweredCall], least_periods: int) -> list[Repeats]:
    """Where the calls repeat at least so often; empty if too few do."""
    if not _may_repeat(calls, least_periods):
        return []
    kinds: dict[Hashable, int] = {}
    keys = [kinds.setdefault((call.kind, _avals(call)), len(kinds)) for call in calls]
    runs = find_runs(keys, least=_SAVED // 4)
    runs = [run for run in runs if run.stop - run.start >= least_periods * run.period]
    saved = sum(run.stop - run.start - run.period for run in runs)
    return runs if saved >= max(_SAVED, _SHARE * len(calls)) else []


def _output_views(program: Program, separate: Iterable[str]) -> dict[str, LoweredCall]:
    """Calls that make Values for outputs that are views, or are to have a Value of their own."""
    separate_names = set(separate)
    return {
        name: _view_call(ref)
        for name, ref in program.outputs.items()
        if view_of(ref) is not None or name in separate_names
    }


def _outputs(program: Program, views: Mapping[str, LoweredCall]) -> dict[str, Value]:
    return {n: views[n].outputs[0] if n in views else ref.value for n, ref in program.outputs.items()}


def _view_call(ref: Ref) -> LoweredCall:
    """A call that copies the view `ref` into a Value of its own."""
    value = ref.value
    view = View(value.shape, value.stride, value.dtype, ref.size, ref.stride, ref.offset, ref.dtype)
    return LoweredCall(view, (ref.value,), (Value(ref.size, ref.stride, ref.dtype, ref.value.device),), None, None)


def _avals(call: LoweredCall) -> tuple[Any, ...]:
    return tuple((value.shape, value.dtype) for value in call.inputs)


def _bounds(run: Repeats, calls: Sequence[LoweredCall], last_use: dict[Value, int]) -> list[int]:
    """Where to cut a run: every so many periods, at the position in the period with the fewest live bytes.

    A run can be cut anywhere in its period. Between one layer and the next there is least to pass on.
    """
    length = run.stop - run.start
    crossing = [0] * (run.period + 1)
    first = run.start + run.period // 2  # the second period, shifted by half a period
    for i in range(run.start, min(run.stop, first + run.period)):
        for value in calls[i].outputs:
            end = last_use.get(value, i)
            if end > i + run.period:  # kept for the backward pass: live at any cut
                continue
            low, high = max(i + 1, first), min(end, first + run.period)
            if low <= high:
                crossing[low - first] += value.nbytes
                if high - first + 1 < len(crossing):
                    crossing[high - first + 1] -= value.nbytes
    total, cost = 0, []
    for change in crossing[: run.period]:
        total += change
        cost.append(total)
    layer = calls[run.start : run.start + run.period]
    touched = sum(value.nbytes for call in layer for value in (*call.inputs, *call.outputs))

    def cuts(phase: int) -> range:
        repeats = (length - phase) // run.period
        short = repeats >= _MANY and touched < _LEAST_BYTES
        group = max(-(-repeats // _MOST_SEGMENTS), -(-_LEAST_CALLS // run.period), 2 if short else 1)
        step = group * run.period
        return range(run.start + phase, run.start + phase + repeats // group * step + 1, step)

    costs = {(run.period // 2 + offset) % run.period: cost[offset] for offset in range(run.period)}
    # Of equally good positions, the one that leaves the fewest calls outside, which are compiled separately.
    return list(cuts(min(costs, key=lambda phase: (costs[phase], length - cuts(phase)[-1] + cuts(phase)[0]))))


def _shared(pieces: Sequence[Sequence[LoweredCall]], inputs: set[Value], results: set[Value]) -> list[Segment]:
    """The pieces as segments; equal ones get the same function number and the same outputs."""
    maker = {value: n for n, piece in enumerate(pieces) for call in piece for value in call.outputs}
    arrays = {*inputs, *maker}
    used_outside: set[Value] = set(results)
    for n, piece in enumerate(pieces):
        for call in piece:
            used_outside.update(value for value in call.inputs if maker.get(value, n) != n)
    functions: dict[Hashable, int] = {}
    numbers: list[int] = []
    signatures: list[Hashable] = []
    arguments: list[tuple[Value | int, ...]] = []
    read_outside: dict[int, set[int]] = {}  # for each function, which outputs of its calls are read outside
    if len(pieces) > 1:  # else the Program is not cut
        arrays |= _varying_numbers(pieces, arrays)
    for piece in pieces:
        signature, outside = _signature(piece, arrays)
        number = functions.setdefault(signature, len(functions))
        numbers.append(number)
        signatures.append(signature)
        arguments.append(outside)
        computed = (value for call in piece for value in call.outputs)
        read_outside.setdefault(number, set()).update(i for i, value in enumerate(computed) if value in used_outside)
    segments = []
    for piece, number, outside, signature in zip(pieces, numbers, arguments, signatures, strict=True):
        computed_values = [value for call in piece for value in call.outputs]
        outputs = tuple(computed_values[i] for i in sorted(read_outside[number]))
        segments.append(Segment(number, tuple(piece), outside, outputs, signature))
    return segments


def _varying_numbers(pieces: Sequence[Sequence[LoweredCall]], arrays: set[Value]) -> set[Value]:
    """Constants in which pieces differ that are equal otherwise: if they are given to the pieces, these are one
    function."""
    alike: dict[Hashable, list[list[Value]]] = {}
    for piece in pieces:
        numbers: list[Value] = []
        signature, _ = _signature(piece, arrays, numbers)
        alike.setdefault(signature, []).append(numbers)
    varying: set[Value] = set()
    for group in alike.values():
        for values in zip(*group, strict=True):
            if len({_bytes(value) for value in values}) > 1:
                varying.update(value for value in values if value.real is not None)
    return varying


def _signature(
    piece: Sequence[LoweredCall], arrays: set[Value], numbers: list[Value] | None = None
) -> tuple[Hashable, tuple[Value | int, ...]]:
    """The piece's computation from the arrays given to it, and these arrays in the order of first use.

    Args:
        numbers: gets the numbers that are part of the code; the result is then the same for others.
    """
    names: dict[Any, tuple[Any, ...]] = {}
    outside: list[Value | int] = []
    signature: list[Any] = []
    count = 0
    for call in piece:
        wires = []
        for value in call.inputs:
            wire = names.get(value)
            if wire is None:
                if _baked(value, arrays):
                    wire = ("baked", value.shape, value.dtype, _bytes(value) if numbers is None else len(numbers))
                    if numbers is not None:
                        numbers.append(value)
                else:
                    wire = ("outside", len(outside), value.shape, value.dtype)
                    outside.append(value)
                names[value] = wire
            wires.append(wire)
        if call.draw is not None:
            if call.draw not in names:
                names[call.draw] = ("draw", len(outside))
                outside.append(call.draw)
            wires.append(names[call.draw])
        signature.append((call.kind, tuple(wires)))
        for value in call.outputs:
            names[value] = ("made", count)
            count += 1
    return tuple(signature), tuple(outside)


def _baked(value: Value, arrays: set[Value]) -> bool:
    """Whether a Value is part of the code: captured Python numbers, and uninitialized memory."""
    if value in arrays:
        return False
    return value.real is None or value.numel <= 1


def _bytes(value: Value) -> bytes | None:
    if value.real is None:
        return None
    flat = value.real.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
