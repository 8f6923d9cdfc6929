"""A custom call that runs elementwise operations on blocks of an array one after the other (`_pointwise.h`).

It is made from a jaxpr of arrays of one size and single numbers, all in float32 or numbers in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from . import aten
from .dtypes import is_kept

# In the order of _pointwise.h.
_OPCODES = ("copy", "neg", "abs", "sqrt", "square", "add", "sub", "mul", "div", "max", "min")
_ARGUMENT, _NUMBER, _RESULT, _SCRATCH = range(4)
# Of single numbers, likewise. They are computed in double precision; "round" gives one of single precision.
_NUMBER_OPCODES = (
    *("constant", "round", "neg", "abs", "sqrt", "not", "add", "sub", "mul", "div", "max", "min", "pow"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "select_n"),
)
_MOST_SCRATCH = 8
_MOST_ARRAYS = 16
_MOST_NUMBERS = 64


class Untranslatable(Exception):
    """There is an operation that the custom call has not."""


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


class ElementwiseProgram:
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
            raise Untranslatable
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
            raise Untranslatable
        self._instructions.append(_Instruction(name, operands))
        return [_Block(_SCRATCH, len(self._instructions) - 1)]

    def _add_numbers(self, eqn: Any, name: str, operands: list[_Number]) -> Sequence[_Number]:
        """Add instructions of single numbers, or let XLA compute these from those that are given."""
        if eqn.outvars[0].aval.shape:
            raise Untranslatable
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
            raise Untranslatable
        results = eqn.primitive.bind(*(number.operands[0] for number in given), **eqn.params)
        return [self.argument(x) for x in (results if eqn.primitive.multiple_results else [results])]

    def _constant(self, array: Any) -> Any:
        if np.size(array) != 1 or array.dtype not in (np.float64, np.float32, np.bool_):
            raise Untranslatable
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
            raise Untranslatable  # a number, an argument, or one instruction's result twice
        taken = {blocks.index(k): argument for k, argument in overwritten.items()}
        read: list[_Number] = []
        instructions = self._words([x.number for x in written], taken, read)
        given, words = self._number_words([*read, *(results[k] for k in numbers)])
        if max(len(self._arguments), len(given), len(read), len(results)) > _MOST_ARRAYS:
            raise Untranslatable
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
            raise Untranslatable
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
                raise Untranslatable
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
                raise Untranslatable
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
