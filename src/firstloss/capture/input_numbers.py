"""Python numbers that change from call to call of a traced step, and are inputs of it.

A step that reads `beta = min(1.0, self.iteration / 1000)` computes something else at each call, though its Program is
always the same. Once a number has been seen to change, an *input number* takes its place while the step is traced: it
has the number's value, and remembers the expression by which it was computed. What Python does with it decides:

- arithmetic gives another input number, with a longer expression;
- as an argument of an operation on tensors it becomes an input of the Program, whose value each call computes on the
  host, in Python's own arithmetic, exactly as eager PyTorch would;
- a comparison (`if step > warmup`) gives an ordinary bool, and a guard on it;
- an f-string that is only printed is made anew at each call (`printed_texts.py`);
- anything else (`int(x)`, an index) gives what the number itself would, and a guard on the value: the step is
  *specialized* on it.

What the step leaves in Python (`self.iteration += 1`) is computed anew at each call.

A number that the step reads from a tensor (`loss.item()`) is one, too, whose value is known when the step has run that
far. As an argument of an operation it is computed by the step itself; what the step branches on is an *outcome*.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..compat.python_names import getframe
from ..program.graph import Ref
from .printed_texts import is_for_print, mark
from .python_generators import Draws

NUMBERS = (float, int, np.floating, np.integer)


def is_plain_number(value: Any) -> bool:
    """Whether it is a number that can be an input: of Python's or NumPy's own types, but not a bool."""
    kind = type(value)
    return kind is float or kind is int or isinstance(value, (np.floating, np.integer))


class Source(NamedTuple):
    """Where a number or a text comes from, and how to read it at a call, given the leaves of its arguments."""

    read: Callable[[Sequence[Any]], Any]
    kind: type  # of the number or text; one of another type is a change of the step
    description: str
    name: str
    trusted: bool = False  # only code that treats all numbers alike computes with it


class Expression:
    """How a number is computed at a call: from a source, or from other numbers; or read from a tensor.

    Attributes:
        example: its value in the trace.
        is_read: whether it depends on a number that is read from a tensor.
    """

    __slots__ = ("combine", "operands", "source", "example", "is_read")

    def __init__(
        self,
        combine: Callable[..., Any] | None,
        operands: tuple[Any, ...],
        source: Source | None = None,
        example: Any = None,
    ) -> None:
        self.combine: Callable[..., Any] | None = combine
        self.operands: tuple[Any, ...] = operands
        self.source: Source | None = source
        self.example: Any = example
        is_read: bool = combine is None and source is None
        self.is_read: bool = is_read or any(type(o) is Expression and o.is_read for o in operands)

    def value(self, arguments: Sequence[Any], known: dict[Expression, Any]) -> Any:
        """The number at a call.

        Args:
            arguments: the leaves of the call's arguments.
            known: the numbers of this call that were computed already, to which it is added.
        """
        if self in known:
            return known[self]
        if self.source is not None:
            result = self.source.read(arguments)
        else:
            assert self.combine is not None
            result = self.combine(*[o.value(arguments, known) if type(o) is Expression else o for o in self.operands])
        known[self] = result
        return result

    def sources(self) -> list[Source]:
        """Where the number comes from."""
        if self.source is not None:
            return [self.source]
        return [source for o in self.operands if type(o) is Expression for source in o.sources()]

    def reads(self) -> Iterator[Expression]:
        """The numbers read from tensors on which it depends."""
        if self.combine is None and self.source is None:
            yield self
        for operand in self.operands:
            if type(operand) is Expression:
                yield from operand.reads()


class InputNumbers:
    """The input numbers of one trace.

    Attributes:
        sources: the expressions of the numbers that are read at each call.
        guards: the values of expressions that the step has branched on, or was specialized on.
        inputs: the traced tensors of those that are inputs of the Program, by expression and dtype.
        draws: what is drawn from Python's and NumPy's generators; None if that is not an input.
        reads, by_ref: the numbers read from tensors, in order, with the tensors.
        outcomes: like `guards`, of what depends on such numbers.
    """

    def __init__(self) -> None:
        self.sources: list[Expression] = []
        self.guards: dict[Expression, Any] = {}
        self.inputs: dict[tuple[Expression, torch.dtype], Any] = {}
        self._known: dict[tuple[Any, ...], Expression] = {}
        self.is_open = True  # while the step is being traced
        self.thread: int = threading.get_ident()  # that traces it
        self.draws: Draws | None = None
        self.printed: list[Expression] = []  # texts of numbers, by their marks; see `printed_texts.py`
        self.reads: dict[Expression, Ref] = {}
        self.by_ref: dict[Ref, Expression] = {}  # the same
        self.outcomes: dict[Expression, Any] = {}

    def read_from(self, ref: Ref, value: Any) -> Expression:
        """The expression of what is read from a tensor, with its current `value`."""
        expression = Expression(None, (), None, value)
        self.reads[expression] = ref
        self.by_ref[ref] = expression
        return expression

    def of(self, expression: Expression) -> Any:
        """The input number of an expression; a bool is returned itself."""
        return _number(expression.example, expression, self)

    def number(self, value: Any, source: Source) -> Any:
        """The input number with the current `value`, which is read from `source` at each call."""
        expression = self.read(source)
        expression.example = value
        return _number(value, expression, self)

    def constant(self, value: Any) -> Any:
        """The input number that is `value` at each call of this trace's step, whose Program serves others, too."""
        return self.of(Expression(plain, (value,), None, value))

    def read(self, source: Source) -> Expression:
        """The expression of what is read from `source` at each call."""
        expression = Expression(None, (), source)
        self.sources.append(expression)
        return expression

    def computed(self, combine: Callable[..., Any], operands: tuple[Any, ...]) -> Expression:
        """The expression `combine(*operands)`; the same object for equal ones."""
        key = (combine, tuple((id(o) if type(o) is Expression else (type(o), repr(o))) for o in operands))
        expression = self._known.get(key)
        if expression is None:
            expression = self._known[key] = Expression(combine, operands)
        return expression

    def expressions(self) -> Iterable[Expression]:
        """What the step has computed from input numbers and texts."""
        return self._known.values()

    def apply(self, combine: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Expression]:
        """The value of `combine(*args)`, where some of `args` are input numbers or their nodes, and its expression."""
        nodes = [node_of(arg) or arg for arg in args]
        try:
            value = combine(*[n.number if type(n) is NumberNode else n for n in nodes])
        except Exception:  # a division by zero, for example: it depends on the values
            for node in nodes:
                if type(node) is NumberNode:
                    node.specialized()
            raise
        expression = self.computed(combine, tuple(n.expression if type(n) is NumberNode else n for n in nodes))
        expression.example = value
        return value, expression

    def read_all(self, arguments: Sequence[Any], known: dict[Expression, Any]) -> None:
        """Read everything that is read at a call, in the order of the trace; see `Expression.value`. Generators are
        left as they are; see `Draws.commit`."""
        if self.draws is not None and self.draws.count:
            self.draws.read(self.sources, arguments, known)
        else:
            for source in self.sources:
                source.value(arguments, known)

    def guard(self, expression: Expression, value: Any) -> None:
        """Assume that an expression has this value at each call."""
        if self.is_open:
            (self.outcomes if expression.is_read else self.guards).setdefault(expression, value)


class NumberInput(NamedTuple):
    """An input of the Program that is a number."""

    expression: Expression

    def read(self, arguments: Sequence[Any], known: dict[Expression, Any]) -> Any:
        """The number at a call; see `Expression.value`."""
        return self.expression.value(arguments, known)


class NumberNode:
    """What an input number is: its value in the trace, and its expression. Implements PyTorch's `SymNode` interface, by
    which operations written in C++ compute with numbers."""

    def __init__(self, number: Any, expression: Expression, numbers: InputNumbers) -> None:
        self.number = number
        self.expression = expression
        self.numbers = numbers

    def specialized(self) -> Any:
        """The value, on which the step depends from now on."""
        self.numbers.guard(self.expression, self.number)
        return self.number

    def apply(self, combine: Callable[..., Any], *others: Any, reflected: bool = False) -> tuple[Any, Expression]:
        """The value of `combine(self, *others)`, and its expression."""
        return self.numbers.apply(combine, (*others, self) if reflected else (self, *others))

    # -- the SymNode interface --

    def is_int(self) -> bool:
        return not self.is_float() and not self.is_bool()

    def is_float(self) -> bool:
        return isinstance(self.number, (float, np.floating))

    def is_bool(self) -> bool:
        return isinstance(self.number, (bool, np.bool_))

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def _false(self) -> bool:
        return False

    def _unknown(self) -> None:
        return None

    is_constant = is_nested_int = _false
    maybe_as_int = maybe_as_float = maybe_as_bool = constant_int = constant_float = constant_bool = _unknown

    def _wrap(self, number: Any) -> NumberNode:
        return NumberNode(number, self.numbers.computed(_identity, (number,)), self.numbers)

    wrap_int = wrap_float = wrap_bool = _wrap

    def guard_int(self, file: str = "", line: int = 0) -> int:
        return int(self.specialized())

    def guard_float(self, file: str = "", line: int = 0) -> float:
        return float(self.specialized())

    def guard_bool(self, file: str = "", line: int = 0) -> bool:
        return bool(self.specialized())

    bool_ = int_ = expect_true = guard_bool
    guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true = guard_bool

    def __getattr__(self, name: str) -> Callable[..., NumberNode]:
        combine = OF_NODES.get(name)
        if combine is None:
            raise AttributeError(name)

        def compute(*others: Any) -> NumberNode:
            value, expression = self.apply(combine, *others)
            return NumberNode(value, expression, self.numbers)

        return compute

    def __str__(self) -> str:
        return str(self.specialized())

    _graph_repr = __repr__ = __str__


def _identity(number: Any) -> Any:
    return number


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}
# The methods of PyTorch's SymNode.
OF_NODES: dict[str, Callable[..., Any]] = {
    **_ARITHMETIC,
    **_COMPARISONS,
    **_UNARY,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "float_pow": operator.pow,
    "pow_by_natural": operator.pow,
    "int_floordiv": operator.floordiv,
    "sym_float": float,
    "sym_int": int,
    "sym_sqrt": math.sqrt,
    "sym_min": min,
    "sym_max": max,
    "sym_not": operator.not_,
    **dict.fromkeys(("and_", "sym_and", "bitwise_and"), operator.and_),
    **dict.fromkeys(("or_", "sym_or", "bitwise_or"), operator.or_),
    "bitwise_xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "round": round,
    "is_integer": float.is_integer,
    **{f"sym_{name}": getattr(math, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
                                                      "tanh", "log2")},
}  # fmt: skip


def node_of(value: Any) -> NumberNode | None:
    """The node of an input number, also as PyTorch's C++ code hands it on; None for any other object."""
    if type(value) is NumberNode:
        return value
    node = value.node if isinstance(value, (torch.SymFloat, torch.SymInt)) else None
    return node if type(node) is NumberNode else None


def _number(value: Any, expression: Expression, numbers: InputNumbers) -> Any:
    """An input number; a value that is not one (a complex number, NaN as a bool) is returned itself, specialized."""
    node = NumberNode(value, expression, numbers)
    if isinstance(value, (bool, np.bool_)):
        return node.specialized()
    if isinstance(value, (float, np.floating)):
        return InputFloat(node)
    if is_plain_number(value):
        return InputInt(node)
    return node.specialized()


def _binary(combine: Callable[..., Any], reflected: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (*NUMBERS, bool, np.bool_)):
            return NotImplemented
        value, expression = self.node.apply(combine, other, reflected=reflected)
        return _number(value, expression, self.node.numbers)

    return method


def _comparison(combine: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (*NUMBERS, bool, np.bool_)):
            return NotImplemented
        value, expression = self.node.apply(combine, other)
        self.node.numbers.guard(expression, value)
        return value

    return method


def _unary(combine: Callable[..., Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        value, expression = self.node.apply(combine)
        return _number(value, expression, self.node.numbers)

    return method


def _converted(combine: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion, whose result the step is specialized on."""

    def method(self: Any, *args: Any) -> Any:
        if args:
            return combine(self.node.specialized(), *args)
        value, expression = self.node.apply(combine)
        self.node.numbers.guard(expression, value)
        return value

    return method


class _InputNumber:
    """The methods of both kinds of input numbers. To Python code they are of the number's class."""

    node: NumberNode

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Call a function of NumPy's, also an operator of one of its numbers."""
        if method == "__call__" and not kwargs and all(isinstance(i, (*NUMBERS, bool, np.bool_)) for i in inputs):
            return apply_to(function, inputs)
        return getattr(function, method)(*map(specialized, inputs), **kwargs)

    __class__ = property(lambda self: type(self.node.number))

    def __getattr__(self, name: str) -> Any:
        if name == "node" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.node.specialized(), name)

    def __round__(self, digits: Any = None) -> Any:
        combine = round if digits is None else functools.partial(round, ndigits=digits)
        return _unary(combine)(self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return self

    def __format__(self, spec: str) -> str:
        numbers = self.node.numbers
        is_printed = numbers.is_open and numbers.thread == threading.get_ident() and is_for_print(getframe(1))
        return self.printed(spec) if is_printed else format(self.node.specialized(), spec)

    def printed(self, spec: str) -> str:
        """What stands for its text in what is printed; see `printed_texts.py`."""
        numbers = self.node.numbers
        numbers.printed.append(self.node.apply(format, spec)[1])
        return mark(len(numbers.printed) - 1)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.node.specialized().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.node.specialized(), *args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.node.specialized())


for _name, _combine in _ARITHMETIC.items():
    setattr(_InputNumber, f"__{_name}__", _binary(_combine))
    setattr(_InputNumber, f"__r{_name}__", _binary(_combine, reflected=True))
for _name, _combine in _COMPARISONS.items():
    setattr(_InputNumber, f"__{_name}__", _comparison(_combine))
for _name, _combine in _UNARY.items():
    setattr(_InputNumber, f"__{_name}__", _unary(_combine))
_CONVERSIONS: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "float": float,
    "int": int,
    "complex": complex,
    "str": str,
    "repr": repr,
}
for _name, _combine in _CONVERSIONS.items():
    setattr(_InputNumber, f"__{_name}__", _converted(_combine))


class InputFloat(_InputNumber, torch.SymFloat):
    """A float that is an input. PyTorch's operations accept it as they accept a `SymFloat`."""

    def __init__(self, node: NumberNode) -> None:
        self.node = node


class InputInt(_InputNumber, torch.SymInt):
    """An int that is an input."""

    def __init__(self, node: NumberNode) -> None:
        self.node = node

    __index__ = _converted(operator.index)
    __and__, __or__, __xor__ = _binary(operator.and_), _binary(operator.or_), _binary(operator.xor)
    __rand__, __ror__ = _binary(operator.and_, True), _binary(operator.or_, True)
    __lshift__, __rshift__ = _binary(operator.lshift), _binary(operator.rshift)


InputFloat.__name__, InputInt.__name__ = "float", "int"  # as in `type(x).__name__`


def _delegated(name: str) -> property:
    return property(lambda self: getattr(self.node.specialized(), name))


# Attributes that `torch.SymFloat` or `torch.SymInt` has, too.
for _kind in (InputFloat, InputInt):
    for _name in ("is_integer", "as_integer_ratio", "hex", "conjugate", "real", "imag"):
        if hasattr(_kind, _name):
            setattr(_kind, _name, _delegated(_name))


def apply_to(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The input number `function(*args)`, where some of `args` are input numbers."""
    numbers = next(a.node.numbers for a in args if is_input_number(a))
    value, expression = numbers.apply(function, args)
    return _number(value, expression, numbers)


def specialized(value: Any) -> Any:
    """As `plain`; the step depends on the value from now on."""
    return value.node.specialized() if is_input_number(value) else value


def is_input_number(value: Any) -> bool:
    """Whether it is an input number."""
    return type(value) is InputFloat or type(value) is InputInt


def plain(value: Any) -> Any:
    """The number itself, of an input number; any other value as it is."""
    return value.node.number if is_input_number(value) else value
