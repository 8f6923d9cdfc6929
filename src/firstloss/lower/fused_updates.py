"""Fusion of an optimizer's operations on a weight into one pass over memory, on a CPU.

XLA on a CPU makes a loop of each result: momentum and weight are updated one after the other, each read from memory
again. For a convolution's weight it also makes a loop of each dimension, so the innermost ones have three iterations. A
custom call (`_pointwise.h`) runs all operations on one block of elements after the other instead, and each rounds its
result as in PyTorch. Updating the weights of a ResNet-18 with momentum: 3.4 ms instead of 10.2 on two cores.

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
from .dtypes import is_kept, to_jax
from .foreach_split import connected_groups, is_foreach, is_whole_step
from .program import AnyCall, LoweredCall, Template, run_calls

# In the order of _pointwise.h.
_OPCODES = ("copy", "neg", "abs", "sqrt", "square", "add", "sub", "mul", "div", "max", "min")
_ARGUMENT, _NUMBER, _RESULT, _SCRATCH = range(4)
# Of single numbers, likewise. They are computed in double precision; "round" gives one of single precision.
_NUMBER_OPCODES = (
    *("constant", "round", "neg", "abs", "sqrt", "not", "add", "sub", "mul", "div", "max", "min", "pow"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "select_n"),
)
_ANY_SHAPE = (2,)  # for which a group is traced: its operations are elementwise, so that one trace is for all
_MOST_SCRATCH = 8
_MOST_ARRAYS = 16
_MOST_NUMBERS = 64
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
            program = _ElementwiseProgram(all_numbers=True)
            try:
                program.add_jaxpr(traced.jaxpr, traced.consts, [program.argument(x) for x in traced.in_avals])
                self._are_numbers[kind] = True
            except _Untranslatable:
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
        program = _ElementwiseProgram()
        given = [program.argument(x) for x in operands]
        results = program.add_jaxpr(traced.jaxpr, traced.consts, given)
        return program.call(results, [v.shape for v in outputs], {k: given[i] for i, k in overwritten.items()})

    update.__name__ = name
    jitted = jax.jit(update)
    try:
        jitted.eval_shape(*(jax.ShapeDtypeStruct(value.shape, to_jax(value.dtype)) for value in inputs))
    except _Untranslatable:
        return None
    return jitted


def _no_key(draw: int) -> Any:
    raise AssertionError("an optimizer draws no random numbers")


def _short(call: LoweredCall) -> str:
    return str(_op(call)).removeprefix("aten._foreach_").partition(".")[0].strip("_")


class _Untranslatable(Exception):
    """The group has an operation that the custom call has not."""


class _Block(NamedTuple):
    """A value with as many elements as the weight: an argument of the custom call, or an instruction's result."""

    storage: int
    number: int


class _Number(NamedTuple):
    """A single number: one that is given to the custom call, or an instruction's result."""

    position: int
    dtype: np.dtype


class _Instruction(NamedTuple):
    operation: str
    operands: list[Any]  # blocks and numbers; for what is given or constant, the array


class _ElementwiseProgram:
    """The arguments and instructions of a custom call: first those of single numbers, then those of blocks."""

    def __init__(self, all_numbers: bool = False) -> None:
        """`all_numbers`: whether what cannot be computed of single numbers is an error, not left to XLA."""
        self._arguments: list[Any] = []
        self._numbers: list[_Instruction] = []
        self._instructions: list[_Instruction] = []
        self._all_numbers = all_numbers

    def argument(self, operand: Any) -> Any:
        """A block for an array, a number for a single one."""
        if not operand.shape:
            return self._number("given", [operand], operand.dtype)
        if operand.dtype != np.float32:
            raise _Untranslatable
        self._arguments.append(operand)
        return _Block(_ARGUMENT, len(self._arguments) - 1)

    def add_jaxpr(self, jaxpr: jex.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Add instructions for a jaxpr of blocks and numbers, and return the blocks and numbers that it returns."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((var, self._constant(const)) for var, const in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Any:
            return self._constant(np.asarray(atom.val, atom.aval.dtype)) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._add_equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _add_equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if is_kept(eqn):
            return operands[:1]
        name, params, aval = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
        called = params.get("jaxpr")
        if name == "jit" and called is not None:
            return self.add_jaxpr(called.jaxpr, called.consts, operands)
        blocks = [x for x in operands if isinstance(x, _Block)]
        if name == "broadcast_in_dim" and not blocks:
            return operands[:1]  # an instruction reads one number for all elements
        if name == "integer_pow" and params["y"] == 2:
            name = "square"
        if not blocks:
            return self._add_numbers(eqn, name, operands)
        if name == "reshape" or (name == "convert_element_type" and aval.dtype == np.float32):
            return blocks
        if name not in _OPCODES or aval.dtype != np.float32 or params.get("accuracy") is not None:
            raise _Untranslatable
        self._instructions.append(_Instruction(name, operands))
        return [_Block(_SCRATCH, len(self._instructions) - 1)]

    def _add_numbers(self, eqn: Any, name: str, operands: list[_Number]) -> Sequence[_Number]:
        """Add instructions of single numbers, or let XLA compute these from those that are given."""
        if eqn.outvars[0].aval.shape:
            raise _Untranslatable
        dtype, operation = eqn.outvars[0].aval.dtype, name
        if name == "square":
            operation, operands = "mul", operands * 2
        elif name == "convert_element_type":
            operation = "round"
        single = dtype == np.float32
        kinds = {x.dtype for x in operands} | {dtype}
        if (
            operation in _NUMBER_OPCODES
            and kinds <= {np.dtype(np.float64), np.dtype(np.float32), np.dtype(bool)}
            and not (operation == "pow" and single)  # rounded twice it would be another number; others are not
            and eqn.params.get("accuracy") is None
        ):
            if operation == "round":
                return [self._number("round", operands, dtype)] if single else [operands[0]._replace(dtype=dtype)]
            made = self._number(operation, operands, dtype)
            return [self._number("round", [made], dtype)] if single else [made]
        given = [self._numbers[x.position] for x in operands]
        if self._all_numbers or any(number.operation not in ("given", "constant") for number in given):
            raise _Untranslatable
        results = eqn.primitive.bind(*(number.operands[0] for number in given), **eqn.params)
        return [self.argument(x) for x in (results if eqn.primitive.multiple_results else [results])]

    def _constant(self, array: Any) -> Any:
        if np.size(array) != 1 or array.dtype not in (np.float64, np.float32, np.bool_):
            raise _Untranslatable
        return self._number("constant", [np.reshape(array, ())], array.dtype)

    def _number(self, operation: str, operands: Sequence[Any], dtype: np.dtype) -> _Number:
        self._numbers.append(_Instruction(operation, [*operands]))
        return _Number(len(self._numbers) - 1, np.dtype(dtype))

    def call(self, results: Sequence[Any], shapes: Sequence[tuple[int, ...]], overwritten: dict[int, _Block]) -> Any:
        """The custom call.

        Args:
            results: the blocks and numbers that it returns.
            shapes: their shapes.
            overwritten: for a result, the argument whose memory it takes.
        """
        blocks = [k for k, shape in enumerate(shapes) if shape]
        numbers = [k for k, shape in enumerate(shapes) if not shape]
        written = [results[k] for k in blocks]
        if any(type(x) is not _Block or x.storage != _SCRATCH for x in written) or len(set(written)) < len(written):
            raise _Untranslatable  # a number, an argument, or one instruction's result twice
        taken = {blocks.index(k): argument for k, argument in overwritten.items()}
        read: list[_Number] = []
        instructions = self._words([x.number for x in written], taken, read)
        given, words = self._number_words([*read, *(results[k] for k in numbers)])
        if max(len(self._arguments), len(given), len(read), len(results)) > _MOST_ARRAYS:
            raise _Untranslatable
        kinds = [jax.ShapeDtypeStruct(shapes[k], np.float32) for k in blocks]
        kinds += [jax.ShapeDtypeStruct((), results[k].dtype) for k in numbers]
        aliases = {argument.number: k for k, argument in taken.items()}
        call = jax.ffi.ffi_call(aten.TARGETS[5], kinds, input_output_aliases=aliases)
        program = np.array([len(self._arguments), len(read), *words, *instructions], np.int64)
        made = call(*self._arguments, *given, program=program)
        return [array for _, array in sorted(zip((*blocks, *numbers), made, strict=True), key=lambda made: made[0])]

    def _number_words(self, wanted: Sequence[_Number]) -> tuple[list[Any], list[int]]:
        """What is given of single numbers; and as words how many instructions compute `wanted`, the places of these
        among what is given and computed, and the instructions."""
        needed = {x.position for x in wanted}
        for i in reversed(range(len(self._numbers))):
            if i in needed and self._numbers[i].operation not in ("given", "constant"):
                needed.update(x.position for x in self._numbers[i].operands)
        given = [i for i in sorted(needed) if self._numbers[i].operation == "given"]
        computed = sorted(needed.difference(given))
        places = {i: place for place, i in enumerate((*given, *computed))}
        arrays = [self._numbers[i].operands[0] for i in given]
        if len(places) > _MOST_NUMBERS or any(array.dtype not in (np.float32, np.float64) for array in arrays):
            raise _Untranslatable
        words = [len(computed), *(places[x.position] for x in wanted)]
        for i in computed:
            operation, operands = self._numbers[i]
            if operation == "constant":
                read = [int(np.asarray(operands[0], np.float64).view(np.int64))]
            else:
                read = [places[x.position] for x in operands]
            words += [_NUMBER_OPCODES.index(operation), *read, *[0] * (3 - len(read))]
        return arrays, words

    def _words(self, results: Sequence[int], overwritten: dict[int, _Block], numbers: list[_Number]) -> list[int]:
        """The needed instructions of blocks as words; `numbers` gets what they read."""
        last: dict[_Block, int] = {}  # the last needed instruction that reads a block
        needed = set(results)
        for i in reversed(range(len(self._instructions))):
            if i in needed:
                for x in self._instructions[i].operands:
                    if isinstance(x, _Block):
                        last.setdefault(x, i)
                        if x.storage == _SCRATCH:
                            needed.add(x.number)
        words: list[int] = []
        copies: list[int] = []
        places: dict[int, _Place] = {}  # where instructions leave their results
        free = list(range(_MOST_SCRATCH))

        def place_of(x: Any) -> _Place:
            if isinstance(x, _Block):
                return _Place(*x) if x.storage == _ARGUMENT else places[x.number]
            if x.dtype != np.float32:
                raise _Untranslatable
            numbers.append(x)
            return _Place(_NUMBER, len(numbers) - 1)

        for i in sorted(needed):
            operation, operands = self._instructions[i]
            read = [place_of(x) for x in operands]
            # A block that is read for the last time makes room, also for this instruction's result.
            ending = {place for x, place in zip(operands, read, strict=True) if isinstance(x, _Block) and last[x] == i}
            free += [place.number for place in ending if place.storage == _SCRATCH]
            k = results.index(i) if i in results else None
            if k is not None and last.get(overwritten.get(k), -1) <= i:  # type: ignore[arg-type]
                places[i] = _Place(_RESULT, k)
            elif free:
                places[i] = _Place(_SCRATCH, free.pop())
                if k is not None:
                    last[_Block(_SCRATCH, i)] = len(self._instructions)  # until it is copied
                    copies += _instruction("copy", _Place(_RESULT, k), [places[i]])
            else:
                raise _Untranslatable
            words += _instruction(operation, places[i], read)
        return words + copies


class _Place(NamedTuple):
    """A `struct place`."""

    storage: int
    number: int

    @property
    def word(self) -> int:
        """Its 64 bits."""
        return self.storage | self.number << 32


def _instruction(operation: str, to: _Place, read: Sequence[_Place]) -> list[int]:
    """A `struct instruction` as words; of one operand, it is also the second."""
    return [_OPCODES.index(operation), to.word, read[0].word, read[-1].word]
