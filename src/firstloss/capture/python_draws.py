"""Draws from the global random generators of Python and NumPy, which a traced step repeats at each call.

A step that mixes up its batch with `lam = np.random.beta(0.4, 0.4)` computes with another number at each call. Once a
generator has been seen to move, its functions give *inputs* while the step is traced: numbers (`input_numbers.py`) and
arrays, which each call draws anew with the same functions in the same order, from the state in which it finds the
generator. As for numbers, what Python does with them decides: arithmetic and `torch.from_numpy` make an input of the
Program, a branch makes a guard, and anything else specializes the step on the value.

A step that moves a generator in another way (`random.shuffle`, a seed, a method of the generator) is traced with the
values themselves, and guarded on the generator's state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ..compat.patches import NUMPY_DRAWS, PYTHON_DRAWS, replaces
from . import session
from .input_numbers import Expression, InputNumbers, Source, is_input_number, is_plain_number, plain, specialized
from .input_texts import InputText, is_text


@replaces(*(f"random.{name}" for name in PYTHON_DRAWS), *(f"numpy.random.{name}" for name in NUMPY_DRAWS))
def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As a function of `random` or `numpy.random`."""
    numbers = session.trace.numbers if session.trace is not None else None
    if numbers is None or numbers.draws is None or not numbers.is_open:
        return original(*args, **kwargs)
    args, kwargs = tuple(map(specialized, args)), {key: specialized(value) for key, value in kwargs.items()}
    if not all(map(_is_immutable, (*args, *kwargs.values()))):
        return original(*args, **kwargs)
    again = functools.partial(original, *args, **kwargs)
    value = numbers.draws.draw(again)
    name = f"{original.__name__}()"
    source = Source(lambda _: again(), type(value), f"what {name} draws", name)
    if is_plain_number(value):
        return numbers.number(value, source)
    expression = numbers.read(source)
    if type(value) is np.ndarray and value.dtype.kind in "fiu":
        return InputArray(value, expression, numbers)
    if is_text(value):
        return InputText(value, expression, numbers)
    numbers.guard(expression, value)
    return value


def _is_immutable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return value is None or is_plain_number(value) or is_text(value) or isinstance(value, (bool, range, type))


class InputArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is drawn at each call. To Python code it is of the class of NumPy's arrays.

    Its shape and dtype are the same at each call; the step depends on its content where it reads that in any other way
    than by arithmetic and by `torch.from_numpy`.
    """

    def __init__(self, array: np.ndarray, expression: Expression, numbers: InputNumbers) -> None:
        self._array = array
        self._expression = expression
        self._numbers = numbers

    __class__ = property(lambda self: np.ndarray)

    def content(self) -> np.ndarray:
        """The array, on whose content the step depends from now on."""
        self._numbers.guard(self._numbers.computed(_bytes, (self._expression,)), _bytes(self._array))
        return self._array

    def computed(self, function: Callable[..., Any], *operands: Any, **kwargs: Any) -> Any:
        """The array `function(*operands)`, whose operands are numbers and input arrays, this one among them."""
        call = functools.partial(function, **kwargs) if kwargs else function
        expressions = [_expression_of(operand) for operand in operands]
        result = call(*[o._array if type(o) is InputArray else plain(o) for o in operands])
        if type(result) is not np.ndarray:
            for operand in operands:
                if type(operand) is InputArray:
                    operand.content()
            return result
        return InputArray(result, self._numbers.computed(call, tuple(expressions)), self._numbers)

    def tensor(self) -> torch.Tensor:
        """As `torch.from_numpy`, an input of the Program."""
        assert session.trace is not None
        return session.trace.input_array(self._expression, self._array)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and all(map(_is_operand, inputs)):
            return self.computed(function, *inputs)
        return getattr(function, method)(*[_content(i) for i in inputs], **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "ndim", "size", "itemsize", "nbytes"):
            return getattr(self._array, name)
        if name in ("astype", "reshape", "copy", "ravel", "flatten", "squeeze", "transpose", "clip"):
            return functools.partial(self.computed, getattr(np.ndarray, name), self)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.content(), name)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        return self.content()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise InPlaceError  # the step is traced with the array itself

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.array(self.content(), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.content().__reduce_ex__(protocol)


def array_of(data: Any) -> InputArray | None:
    """The array of numbers in (nested) lists, as float64 or int64, if there are input numbers among them that are known
    before the step runs; None for anything else."""
    held = list(items_of(data))
    nodes = [item.node for item in held if is_input_number(item)]
    if not nodes or not all(is_input_number(item) or is_plain_number(item) or type(item) is bool for item in held):
        return None
    if any(node.expression.is_read for node in nodes):
        return None
    try:
        shape = np.shape(without_inputs(data))
    except ValueError:  # of lists of unequal lengths
        return None
    is_float = any(isinstance(plain(item), (float, np.floating)) for item in held)
    call = functools.partial(_array, shape, np.float64 if is_float else np.int64)
    array, expression = nodes[0].numbers.apply(call, held)
    return InputArray(array, expression, nodes[0].numbers)


def items_of(data: Any) -> Iterable[Any]:
    """The items of nested lists and tuples."""
    if not isinstance(data, (list, tuple)):
        yield data
        return
    for item in data:
        yield from items_of(item)


def without_inputs(data: Any) -> Any:
    return [without_inputs(item) for item in data] if isinstance(data, (list, tuple)) else plain(data)


def _array(shape: tuple[int, ...], dtype: type, *numbers: Any) -> np.ndarray:
    return np.array(numbers, dtype).reshape(shape)


class InPlaceError(Exception):
    """An array that is an input is edited in place."""


for _name, _function in {"iter": iter, "float": float, "int": int, "bool": bool, "repr": repr, "str": str}.items():
    setattr(InputArray, f"__{_name}__", lambda self, function=_function: function(self.content()))


def _bytes(array: np.ndarray) -> bytes:
    return array.tobytes()


def _expression_of(operand: Any) -> Any:
    if type(operand) is InputArray:
        return operand._expression
    return operand.node.expression if is_input_number(operand) else operand


def _is_operand(value: Any) -> bool:
    return type(value) is InputArray or is_input_number(value) or is_plain_number(value)


def _content(value: Any) -> Any:
    return value.content() if type(value) is InputArray else specialized(value)


@replaces("torch.from_numpy")
def from_numpy(original: Callable[..., torch.Tensor], array: Any) -> torch.Tensor:
    """As `torch.from_numpy`."""
    return array.tensor() if type(array) is InputArray else original(array)
