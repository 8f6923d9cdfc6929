"""Fusion of an optimizer's operations on a weight into one pass over memory, on a CPU.

XLA on a CPU makes a loop of each result: momentum and weight are updated one after the other, each read from memory
again. For a convolution's weight it also makes a loop of each dimension, so the innermost ones have three iterations. A
custom call (`elementwise_call.py`) runs all operations on one block of elements after the other instead, and each
rounds its result as in PyTorch. Updating the weights of a ResNet-18 with momentum: 3.4 ms instead of 10.2 on two cores.

Small weights are no faster so, but nothing is compiled for them: XLA takes 0.03 s of processor time for each loop over
another shape, and AdamW has four of a weight. A MobileViT's step, 205 weights of 54 shapes, compiles in 34 s of
processor time instead of 45. What is computed of single numbers for one weight only, as Adam's corrections by the step,
is part of its call, too: three functions less to compile for each weight (with AdamW, a MobileViT's second loss comes
6.2 s after the first instead of 8.1, a ConvNeXt-T's 4.3 s instead of 5.7).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
import torch

from ..program.graph import Value
from ..program.nested import mapped
from . import aten
from .dtypes import to_jax
from .elementwise_call import ElementwiseProgram, Untranslatable
from .foreach_split import connected_groups, is_foreach, is_whole_step
from .program import AnyCall, LoweredCall, Template, run_calls

_ANY_SHAPE = (2,)  # for which a group is traced: its operations are elementwise, so that one trace is for all
_NUMBERS = (torch.float64, torch.float32)


class FusedUpdate(NamedTuple):
    """Calls of one weight's update as one call; used like a `LoweredCall`."""

    function: Callable[..., Sequence[Any]]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    draw: None = None

    def run(self, operands: Sequence[Any], key: jax.Array | None) -> Sequence[Any]:
        """Compute the outputs' arrays."""
        return self.function(*operands)


def with_fused_updates(calls: Sequence[LoweredCall], results: Iterable[Value | int]) -> Sequence[AnyCall]:
    """`calls`, in which those of an optimizer on one weight are replaced by one, if custom calls are usable.

    Args:
        results: what is needed of the calls' outputs.
    """
    groups = [group for run in _runs(calls) for group in _connected(calls, run)] if aten.usable() else []
    groups = [group for group in groups if len(group) > 1 or is_whole_step(_op(calls[group[0]]))]
    if not groups:
        return calls
    fusion = _Fusion(calls, results)
    fused: list[AnyCall | None] = [*calls]
    for group in groups:
        for members in (fusion.with_numbers(group), group):
            update = fusion.fuse(members)
            if update is not None:
                for i in members:
                    fused[i] = None
                fused[group[-1]] = update
                break
    return [call for call in fused if call is not None]


def _runs(calls: Sequence[LoweredCall]) -> Iterator[list[int]]:
    """Runs of calls of an optimizer with arrays of one size. Calls of single numbers may lie between them."""
    run: list[int] = []
    size = 0
    for i, call in enumerate(calls):
        arrays = _arrays(call)
        if not arrays:
            continue
        elements = _elements(call, arrays)
        if run and elements != size:
            yield run
            run = []
        if elements:
            run.append(i)
        size = elements
    if run:
        yield run


def _arrays(call: LoweredCall) -> set[Value]:
    """What a call reads and makes, but for single numbers."""
    return {value for value in (*call.inputs, *call.outputs) if value.shape}


def _elements(call: LoweredCall, arrays: Iterable[Value]) -> int:
    """The number of elements of each of a call's `arrays`, if it is of an optimizer and in float32; else 0."""
    if call.draw is not None or not isinstance(call.kind, Template):
        return 0
    if not (is_foreach(call.kind.op) or is_whole_step(call.kind.op)):
        return 0
    sizes = {int(np.prod(value.shape, dtype=int)) for value in arrays}
    if len(sizes) != 1 or any(to_jax(value.dtype) != np.float32 for value in arrays):
        return 0
    return sizes.pop()


def _connected(calls: Sequence[LoweredCall], run: Sequence[int]) -> list[list[int]]:
    """The calls of a run by weight: those that share an array are in one group, in order."""
    latest: dict[Value, int] = {}
    shares_with = []
    for k, i in enumerate(run):
        arrays = _arrays(calls[i])
        shares_with.append([latest[value] for value in arrays if value in latest])
        latest.update(dict.fromkeys(arrays, k))
    groups: dict[int, list[int]] = {}
    for i, group in zip(run, connected_groups(shares_with, [True] * len(run)), strict=True):
        groups.setdefault(group, []).append(i)
    return list(groups.values())


def _op(call: LoweredCall) -> Any:
    assert isinstance(call.kind, Template)
    return call.kind.op


class _Fusion:
    """Fusion of groups of calls; groups that differ only in their arrays share a function."""

    def __init__(self, calls: Sequence[LoweredCall], results: Iterable[Value | int]) -> None:
        self._calls = calls
        self._results = set(results)
        self._readers: dict[Value, list[int]] = {}
        self._makers: dict[Value, int] = {}
        self._are_numbers: dict[Any, bool] = {}  # by kind of call, whether it can be part of a custom call
        self._traced: dict[tuple[Any, ...], jex.ClosedJaxpr] = {}
        self._functions: dict[tuple[Any, ...], Callable[..., Sequence[Any]] | None] = {}
        for i, call in enumerate(calls):
            for value in call.inputs:
                self._readers.setdefault(value, []).append(i)
            self._makers.update(dict.fromkeys(call.outputs, i))

    def with_numbers(self, members: Sequence[int]) -> list[int]:
        """`members`, and the calls of single numbers that only they need, or that only keep what these compute."""
        found = set(members)
        pending = [-i for i in members]
        heapq.heapify(pending)  # the last one first, so that all that read a call have been seen before it
        while pending:
            for value in self._calls[-heapq.heappop(pending)].inputs:
                i = self._makers.get(value, -1)
                if i >= 0 and i not in found and self._is_of_numbers(self._calls[i]):
                    others = self._reading(i) - found
                    if all(self._only_keeps(k, members[-1]) for k in others):
                        found.update(others, [i])
                        heapq.heappush(pending, -i)
        return sorted(found)

    def _only_keeps(self, i: int, last: int) -> bool:
        """Whether a call computes single numbers that no other reads, from what is there before the call `last`."""
        if self._reading(i) or not self._is_of_numbers(self._calls[i]):
            return False
        return all(self._makers.get(value, -1) <= last for value in self._calls[i].inputs)

    def _reading(self, i: int) -> set[int]:
        """The calls that read what a call makes."""
        return {reader for value in self._calls[i].outputs for reader in self._readers.get(value, ())}

    def _is_of_numbers(self, call: LoweredCall) -> bool:
        """Whether a call computes single numbers in a way that a custom call can."""
        if call.draw is not None or not isinstance(call.kind, Template):
            return False
        if any(value.shape or value.dtype not in _NUMBERS for value in (*call.inputs, *call.outputs)):
            return False
        kind = call.kind, tuple(value.dtype for value in call.inputs)
        if kind not in self._are_numbers:
            traced = _traced([call], call.inputs, call.outputs, dict.fromkeys((*call.inputs, *call.outputs), ()))
            program = ElementwiseProgram(all_numbers=True)
            try:
                program.add_jaxpr(traced.jaxpr, traced.consts, [program.argument(x) for x in traced.in_avals])
                self._are_numbers[kind] = True
            except Untranslatable:
                self._are_numbers[kind] = False
        return self._are_numbers[kind]

    def fuse(self, members: Sequence[int]) -> FusedUpdate | None:
        """One call instead of `members`; None if the custom call has not all of their operations."""
        group = [self._calls[i] for i in members]
        made = dict.fromkeys(value for call in group for value in call.outputs)
        inputs = tuple(dict.fromkeys(v for call in group for v in call.inputs if v not in made))
        outputs = tuple(v for v in made if v in self._results or not set(members).issuperset(self._readers.get(v, ())))
        origins = _origins(group)
        overwritten = {
            inputs.index(origin): k
            for k, value in enumerate(outputs)
            if value.shape and (origin := origins.get(value)) in inputs and origin not in self._results
        }
        shapes = {value: value.shape for value in (*inputs, *made)}
        if all(map(_reads_whole_arrays, group)):
            shapes = {value: _ANY_SHAPE if shape else shape for value, shape in shapes.items()}
            group = [_with_shapes(call, shapes) for call in group]
        numbers = {value: n for n, value in enumerate(shapes)}
        wiring = [tuple(tuple(numbers[v] for v in values) for values in (call.inputs, call.outputs)) for call in group]
        kind: tuple[Any, ...] = (
            tuple((call.kind, *numbered) for call, numbered in zip(group, wiring, strict=True)),
            tuple(numbers[value] for value in outputs),
            tuple((shapes[value], value.dtype) for value in inputs),
        )
        if kind not in self._traced:
            self._traced[kind] = _traced(group, inputs, outputs, shapes)
        key = (kind, tuple(value.shape for value in (*inputs, *outputs)), tuple(overwritten.items()))
        if key not in self._functions:
            name = "_and_".join(dict.fromkeys(map(_short, group)))
            self._functions[key] = _function(self._traced[kind], inputs, outputs, overwritten, name)
        function = self._functions[key]
        return None if function is None else FusedUpdate(function, inputs, outputs)


def _reads_whole_arrays(call: LoweredCall) -> bool:
    """Whether a call reads and writes no view of an array."""
    kind = call.kind
    assert isinstance(kind, Template)
    views = [view for _, view in kind.writes]
    mapped(lambda arg: views.append(getattr(arg, "view", None)), (kind.args, tuple(arg for _, arg in kind.kwargs)))
    return all(view is None for view in views)


def _with_shapes(call: LoweredCall, shapes: Mapping[Value, tuple[int, ...]]) -> LoweredCall:
    assert isinstance(call.kind, Template)
    made = tuple((shapes[value], dtype) for value, (_, dtype) in zip(call.outputs, call.kind.outputs, strict=True))
    return call._replace(kind=call.kind._replace(outputs=made))


def _origins(group: Sequence[LoweredCall]) -> dict[Value, Value]:
    """For new contents of an input of the group, this input."""
    origins: dict[Value, Value] = {}
    for call in group:
        assert isinstance(call.kind, Template)
        for (number, view), value in zip(call.kind.writes, call.outputs, strict=False):
            if view is None:
                old = call.inputs[number]
                origins[value] = origins.get(old, old)
    return origins


def _traced(
    group: Sequence[LoweredCall],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    shapes: Mapping[Value, tuple[int, ...]],
) -> jex.ClosedJaxpr:
    """What a group computes of its inputs, if these have the given shapes."""

    def one_by_one(*operands: Any) -> tuple[Any, ...]:
        arrays = dict(zip(inputs, operands, strict=True))
        run_calls(group, arrays, _no_key)
        return tuple(arrays[value] for value in outputs)

    return jax.make_jaxpr(one_by_one)(*(jax.ShapeDtypeStruct(shapes[v], to_jax(v.dtype)) for v in inputs))


def _function(
    traced: jex.ClosedJaxpr,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    overwritten: Mapping[int, int],
    name: str,
) -> Callable[..., Sequence[Any]] | None:
    """The function from the inputs' arrays to the outputs'; None if the custom call lacks an operation of the group.

    Args:
        traced: what the group computes, of arrays of any one size.
        overwritten: for the number of an input, that of the output that takes its memory. (XLA computes what else reads
            the input before.)
    """

    def update(*operands: Any) -> Sequence[Any]:
        program = ElementwiseProgram()
        given = [program.argument(x) for x in operands]
        results = program.add_jaxpr(traced.jaxpr, traced.consts, given)
        return program.call(results, [v.shape for v in outputs], {k: given[i] for i, k in overwritten.items()})

    update.__name__ = name
    jitted = jax.jit(update)
    try:
        jitted.eval_shape(*(jax.ShapeDtypeStruct(value.shape, to_jax(value.dtype)) for value in inputs))
    except Untranslatable:
        return None
    return jitted


def _no_key(draw: int) -> Any:
    raise AssertionError("an optimizer draws no random numbers")


def _short(call: LoweredCall) -> str:
    return str(_op(call)).removeprefix("aten._foreach_").partition(".")[0].strip("_")
