"""Cut a Program where it repeats, so that layers that are alike are lowered and compiled once.

The calls of a deep model's step repeat layer after layer, in the forward pass and again in the backward pass. They are
cut into segments at the layers' ends; segments that compute the same from other arrays share one function. What is
compiled is as long as one layer and what surrounds the layers; running a step calls the functions one after another.

Whether two segments are alike is read from the calls themselves and from how they are wired, not from the model's
modules: any Program that repeats is cut, whatever wrote it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..program.graph import Ref, Value
from ..program.program import Program
from .lists import calls_apart
from .program import Call, View, call_of, view_of
from .repeats import Repeats, find_runs

# A Program is cut if this share of its calls, and this many, need no compiling then. Shorter ones compile in a second.
_SHARE = 0.4
_SAVED = 400
# At most so many segments for a run: each costs the host some 20 microseconds a step, and devices queue up few.
_MOST_SEGMENTS = 48
# At least so many calls in a segment.
_LEAST_CALLS = 24
# A run of at least so many periods, each of which touches fewer bytes than this (about a millisecond's work), is cut at
# every second one: beginning a segment takes the device some 40 microseconds. Longer segments take longer to compile.
_LEAST_BYTES = 16 << 20
_MANY = 8


class Cut(NamedTuple):
    """A Program in segments, in an order in which they can run.

    Attributes:
        outputs: for each output of the Program, the Value that holds it when the segments have run.
    """

    segments: list[Segment]
    outputs: dict[str, Value]


class Segment(NamedTuple):
    """Some calls in a row.

    Attributes:
        function: segments of one number compute the same.
        inputs: what it takes from outside, in the order of use; an int is the number of a random draw.
        outputs: what it gives to others.
        signature: what it computes from its inputs; the same for segments of one number, and for no others.
    """

    function: int
    calls: tuple[Call, ...]
    inputs: tuple[Value | int, ...]
    outputs: tuple[Value, ...]
    signature: Hashable


def cut(program: Program, first: Iterable[str] = (), apart: Iterable[str] = ()) -> Cut | None:
    """Cut `program` where it repeats; None if too little of it does.

    Args:
        first: names of outputs that are wanted as soon as can be: it is cut behind the call that makes the last of
            these, too. (A loss is there long before the backward pass has even been compiled.)
        apart: names of outputs that get a Value of their own, which is no input and no other output.
    """
    if len(program.nodes) < _SAVED:
        return None
    calls = calls_apart(program.nodes)
    looks = _looks(program, apart)
    for look in looks.values():
        calls.insert(1 + max((i for i, call in enumerate(calls) if look.inputs[0] in call.outputs), default=-1), look)
    kinds: dict[Hashable, int] = {}
    keys = [kinds.setdefault((call.kind, _avals(call)), len(kinds)) for call in calls]
    runs = find_runs(keys, least=_SAVED // 4)
    if sum(run.stop - run.start - run.period for run in runs) < max(_SAVED, _SHARE * len(calls)):
        return None
    outputs = _outputs(program, looks)
    last_use = {value: i for i, call in enumerate(calls) for value in call.inputs}
    last_use.update(dict.fromkeys(outputs.values(), len(calls)))
    wanted = {outputs[name] for name in first}
    bounds = [0, 1 + max((i for i, call in enumerate(calls) if not wanted.isdisjoint(call.outputs)), default=-1)]
    for run in runs:
        bounds.extend(_bounds(run, calls, last_use))
    bounds = sorted({*bounds, len(calls)})
    pieces = [calls[a:b] for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    return Cut(_shared(pieces, set(program.inputs.values()), set(outputs.values())), outputs)


def uncut(program: Program, apart: Iterable[str] = ()) -> Cut:
    """As `cut`, all of `program` as one segment."""
    looks = _looks(program, apart)
    outputs = _outputs(program, looks)
    calls = [*map(call_of, program.nodes), *looks.values()]
    return Cut(_shared([calls] if calls else [], set(program.inputs.values()), set(outputs.values())), outputs)


def _looks(program: Program, apart: Iterable[str]) -> dict[str, Call]:
    """For outputs that are no whole Values, and those that are to have one of their own, the calls that make these."""
    own = set(apart)
    return {name: _view_call(ref) for name, ref in program.outputs.items() if view_of(ref) is not None or name in own}


def _outputs(program: Program, looks: Mapping[str, Call]) -> dict[str, Value]:
    return {n: looks[n].outputs[0] if n in looks else ref.value for n, ref in program.outputs.items()}


def _view_call(ref: Ref) -> Call:
    """A call that makes a Value of its own of what `ref` sees."""
    value = ref.value
    view = View(value.shape, value.stride, value.dtype, ref.size, ref.stride, ref.offset, ref.dtype)
    return Call(view, (ref.value,), (Value(ref.size, ref.stride, ref.dtype, ref.value.device),), None, None)


def _avals(call: Call) -> tuple:
    return tuple((value.shape, value.dtype) for value in call.inputs)


def _bounds(run: Repeats, calls: Sequence[Call], last_use: dict[Value, int]) -> list[int]:
    """Where to cut a run: every so many periods, at the place in the period that the fewest bytes are carried across.

    A run can be cut anywhere in its period. Where one layer ends and the next begins there is least to carry.
    """
    length = run.stop - run.start
    crossing = [0] * (run.period + 1)
    first = run.start + run.period // 2  # the second stretch, seen from half a stretch before
    for i in range(run.start, min(run.stop, first + run.period)):
        for value in calls[i].outputs:
            end = last_use.get(value, i)
            if end > i + run.period:  # kept for long, for the backward pass: carried wherever the cut is
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
    # Of places as good, the one that leaves the fewest calls outside: these are compiled again.
    return list(cuts(min(costs, key=lambda phase: (costs[phase], length - cuts(phase)[-1] + cuts(phase)[0]))))


def _shared(pieces: Sequence[Sequence[Call]], inputs: set[Value], results: set[Value]) -> list[Segment]:
    """The pieces as segments; those that are alike get the same function number and the same outputs."""
    maker = {value: n for n, piece in enumerate(pieces) for call in piece for value in call.outputs}
    given = {*inputs, *maker}
    used_outside: set[Value] = set(results)
    for n, piece in enumerate(pieces):
        for call in piece:
            used_outside.update(value for value in call.inputs if maker.get(value, n) != n)
    functions: dict[Hashable, int] = {}
    numbers: list[int] = []
    signatures: list[Hashable] = []
    taken: list[tuple[Value | int, ...]] = []
    places: dict[int, set[int]] = {}  # for a function, which of all outputs of its calls leave it
    for piece in pieces:
        signature, outside = _signature(piece, given)
        number = functions.setdefault(signature, len(functions))
        numbers.append(number)
        signatures.append(signature)
        taken.append(outside)
        made = (value for call in piece for value in call.outputs)
        places.setdefault(number, set()).update(i for i, value in enumerate(made) if value in used_outside)
    segments = []
    for piece, number, outside, signature in zip(pieces, numbers, taken, signatures, strict=True):
        made_values = [value for call in piece for value in call.outputs]
        outputs = tuple(made_values[i] for i in sorted(places[number]))
        segments.append(Segment(number, tuple(piece), outside, outputs, signature))
    return segments


def _signature(piece: Sequence[Call], given: set[Value]) -> tuple[Hashable, tuple[Value | int, ...]]:
    """What the piece computes from arrays given to it, and which these are, in the order of their first use."""
    names: dict[Any, tuple] = {}
    outside: list[Value | int] = []
    signature: list[Any] = []
    made = 0
    for call in piece:
        wires = []
        for value in call.inputs:
            wire = names.get(value)
            if wire is None:
                if _baked(value, given):
                    wire = ("baked", value.shape, value.dtype, _bytes(value))
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
            names[value] = ("made", made)
            made += 1
    return tuple(signature), tuple(outside)


def _baked(value: Value, given: set[Value]) -> bool:
    """Whether a Value is part of the code: captured Python numbers, and memory that was never written."""
    if value in given:
        return False
    return value.real is None or value.numel <= 1


def _bytes(value: Value) -> bytes | None:
    if value.real is None:
        return None
    flat = value.real.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
