"""Symbolic scalars: numbers that are not known until the step runs.

If PyTorch expects a number and gets a 0-dim tensor (`add_(x, alpha=lr)`, `addcdiv_(a, b, value=lr)`), it reads the
tensor's value. A traced tensor has none yet, so it returns a symbolic number: PyTorch's `SymFloat` or `SymInt`, around
a `SymbolicNumber` that holds the traced tensor. The recorder passes that tensor to the operation as a number.
Arithmetic on a symbolic number is recorded like arithmetic on tensors; branching on one is an error, as for tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.ops import aten

from ..compat.torch_names import schema_of
from ..errors import TraceError
from ..program.graph import Ref
from ..program.nested import mapped
from ..program.source import here
from . import session
from .input_numbers import OF_NODES, NumberNode, node_of, specialized
from .op_call import OpCall, is_symbolic, ref_of
from .tensor import DeferredTensor, Hooks

Tensor = torch.Tensor

# The arithmetic methods of PyTorch's SymNode, and their equivalents on tensors.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "pow": operator.pow,
    "float_pow": operator.pow,
    "pow_by_natural": operator.pow,
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_float": lambda x: x.double(),
    "sym_sqrt": lambda x: torch.sqrt(x),
    "sym_min": lambda x, y: torch.where(x < y, x, y),
    "sym_max": lambda x, y: torch.where(x > y, x, y),
}


_KINDS = {torch.float64: float, torch.int64: int, torch.bool: bool}


class SymbolicNumber:
    """Implements PyTorch's `SymNode` interface for a 0-dim traced tensor.

    Args:
        value: the tensor, float64 or int64; or a Python number that is the other operand of an operation.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._kind: Any = _KINDS[value.dtype] if isinstance(value, Tensor) else type(value)

    # -- the SymNode interface --

    def is_int(self) -> bool:
        return self._kind is int

    def is_float(self) -> bool:
        return self._kind is float

    def is_bool(self) -> bool:
        return self._kind is bool

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return False

    def _unknown(self) -> None:
        return None

    maybe_as_int = maybe_as_float = maybe_as_bool = constant_int = constant_float = constant_bool = _unknown

    def wrap_int(self, number: int) -> SymbolicNumber:
        return SymbolicNumber(number)

    def wrap_float(self, number: float) -> SymbolicNumber:
        return SymbolicNumber(number)

    def wrap_bool(self, number: bool) -> SymbolicNumber:
        return SymbolicNumber(number)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if (compute := _ARITHMETIC.get(name)) is not None:
            return lambda *others: self._computed(compute, others)
        if (combine := OF_NODES.get(name)) is not None:
            return lambda *others: SymbolicNumber(combine(self.number(), *(other.number() for other in others)))
        raise AttributeError(name)

    def _computed(self, compute: Callable[..., Any], others: tuple[SymbolicNumber, ...]) -> SymbolicNumber:
        with torch.no_grad():
            return SymbolicNumber(compute(self.value, *(other.value for other in others)))

    def read(self, file: str = "", line: int = 0) -> Any:
        """The value: to print it, or use it as a size."""
        return specialized(self.number())

    def number(self) -> Any:
        """The value, as an input number if possible."""
        if not isinstance(self.value, Tensor):
            return self.value
        if session.trace is None:
            raise TraceError(
                f"{here()}: this number was computed inside a traced step, and has no value outside of it. Return the "
                "tensor that it was computed from."
            )
        return session.trace.number(self.value)

    guard_int = guard_float = guard_bool = bool_ = expect_true = read
    guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true = read

    def __str__(self) -> str:
        return str(self.read())

    _graph_repr = __repr__ = __str__


class Hyperparameter(SymbolicNumber):
    """A number in an optimizer's parameter group that changes from step to step.

    It can be compared with zero by its sign, as PyTorch's optimizers do to skip terms (`if weight_decay != 0`). An
    unknown sign (None) compares as positive; the creator has to handle the case that it is zero.
    """

    def __init__(self, value: Tensor, sign: int | None = None) -> None:
        super().__init__(value)
        self.sign = sign

    def bool_(self, file: str = "", line: int = 0) -> bool:
        return self.sign != 0

    def ne(self, other: SymbolicNumber) -> SymbolicNumber:
        return self._compare_with_zero(operator.ne, other)

    def eq(self, other: SymbolicNumber) -> SymbolicNumber:
        return self._compare_with_zero(operator.eq, other)

    def gt(self, other: SymbolicNumber) -> SymbolicNumber:
        return self._compare_with_zero(operator.gt, other)

    def ge(self, other: SymbolicNumber) -> SymbolicNumber:
        return self._compare_with_zero(operator.ge, other)

    def lt(self, other: SymbolicNumber) -> SymbolicNumber:
        return self._compare_with_zero(operator.lt, other)

    def le(self, other: SymbolicNumber) -> SymbolicNumber:
        return self._compare_with_zero(operator.le, other)

    def _compare_with_zero(self, compare: Callable[[int, int], bool], other: SymbolicNumber) -> SymbolicNumber:
        is_zero = isinstance(other.value, (int, float)) and other.value == 0
        sign = 1 if self.sign is None else self.sign
        return SymbolicNumber(compare(sign, 0) if is_zero else compare(self.number(), other.number()))


def number_of(tensor: DeferredTensor) -> Any:
    """The symbolic number of a traced tensor."""
    assert session.trace is not None
    if tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return session.trace.number(tensor)
    floating = tensor.dtype.is_floating_point
    # Below autograd the tensor's methods would not reach the recorder.
    if tensor.dim():
        tensor = Hooks.dispatch(aten.view.default, (tensor, ()), {})
    widened = Hooks.dispatch(aten._to_copy.default, (tensor,), {"dtype": torch.float64 if floating else torch.int64})
    return (torch.SymFloat if floating else torch.SymInt)(SymbolicNumber(widened))


def tensor_of(number: Any) -> Tensor:
    """The traced tensor behind a symbolic number."""
    return number.node.value


def example_value(number: Any) -> float | int:
    """A number of the same type, as an argument for meta kernels; shapes do not depend on it."""
    return example_of_node(number.node)


def example_of_node(node: Any) -> float | int:
    """As `example_value`, for a number's node."""
    return 2 if node.is_int() else 0.5


def with_known_positions(call: OpCall) -> tuple[OpCall, OpCall]:
    """`call`, in which numbers that are inputs of the step are specialized where they are sizes, indices or dimensions;
    numbers that the step has computed from tensors are refused there. In place of a tensor (`x * number`) they are
    tensors.

    Returns:
        It, and the same with the numbers in place of tensors, which do not promote dtypes as tensors do.
    """
    by_name = {spec.name: str(spec.type) for spec in schema_of(call.op).arguments}
    types = [str(spec.type) for spec in schema_of(call.op).arguments]

    def known(arg: Any, kind: str) -> Any:
        if kind in _TENSOR_TYPES and is_symbolic(arg) and (node := node_of(arg)) is not None:
            return session.trace.input_of(node, _dtype_beside(call, node))  # type: ignore[union-attr]
        return arg if kind in _NUMBER_TYPES or kind in _TENSOR_TYPES else mapped(_specialized, arg)

    args = tuple([known(arg, kind) for arg, kind in zip(call.args, types, strict=False)])
    kwargs = {name: known(arg, by_name[name]) for name, arg in call.kwargs.items()}

    def given(before: Any, now: Any) -> Any:
        return before if isinstance(now, Tensor) else now

    numbers = OpCall(
        call.op,
        call.traits,
        tuple(map(given, call.args, args)),
        {k: given(call.kwargs[k], v) for k, v in kwargs.items()},
    )
    return OpCall(call.op, call.traits, args, kwargs), numbers


def _specialized(arg: Any) -> Any:
    if not is_symbolic(arg):
        return arg
    node = node_of(arg)
    return arg.node.read() if node is None else node.specialized()


_NUMBER_TYPES = ("number", "Optional[number]", "List[number]")
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")


def _dtype_beside(call: OpCall, node: NumberNode) -> torch.dtype:
    """The dtype in which an operation computes with a number beside its tensors."""
    example = example_of_node(node)
    dtypes = [torch.result_type(torch.empty((0,) * bool(t.dim()), dtype=t.dtype), example) for t in call.tensors()]
    common = functools.reduce(torch.promote_types, dtypes, torch.bool)
    if common in (torch.float16, torch.bfloat16, torch.complex64):
        return torch.float32  # eager computes with the number in float32
    if common.is_complex:
        return torch.float64
    return common if common.is_floating_point else torch.float64 if node.is_float() else torch.int64


def number_ref(number: Any) -> Ref:
    """The Ref that represents a symbolic number in a node's arguments."""
    trace = session.trace
    if trace is None:
        return number.node.read()
    node = node_of(number)
    tensor = tensor_of(number) if node is None else trace.input_of(node)
    if type(tensor) is DeferredTensor and tensor._storage.trace is not trace:
        trace.adopt(tensor._storage)
    return ref_of(tensor)
