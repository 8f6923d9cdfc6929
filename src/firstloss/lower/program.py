"""Lowering of a Program to a JAX function that computes its outputs from its inputs.

Each node becomes a call of a small jitted function: its arguments' views, the rule, the casts to the dtypes that
capture recorded and, for a write through a view, the scatter back into the base. Nodes that differ only in their arrays
share that function, so equal layers are traced and lowered once, and a module is as long as its list of calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch
from jax import lax

from ..compat.torch_names import schema_of
from ..errors import LoweringError
from ..program.graph import Node, Ref, Value
from ..program.nested import mapped
from ..program.program import Program
from . import aten, dispatched, precision
from .decompose import decomposition, rule_of
from .dtypes import cast, constant, to_jax
from .registry import OF_ORDERS, OF_PROGRAMS, PORTABLE_RULES, functional
from .rules import RULES
from .threefry import fold_in
from .views import as_strided, as_strided_scatter, view_as_complex, view_as_real, view_dtype


class ArrayParameter(NamedTuple):
    """In a node's template, a placeholder for array `number`, read through a view (None: the whole array)."""

    number: int
    view: View | None


class View(NamedTuple):
    """A Ref without its Value: the geometries of the view and of its base.

    `start` is where the offset is if it is an operand of the call: the number of an array, and an index.
    """

    base_shape: tuple[int, ...]
    base_stride: tuple[int, ...]
    base_dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    start: tuple[int, int] | None = None


class Template(NamedTuple):
    """Everything about a node except its arrays."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    writes: tuple[tuple[int, View | None], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    keyed: bool

    def results(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes that the functional overload returns: of new tensors, then of those written to."""
        mutated = [
            output if view is None else (view.size, view.dtype)
            for (_, view), output in zip(self.writes, self.outputs, strict=False)
        ]
        return [*self.outputs[len(mutated) :], *mutated]


class AnyCall(Protocol):
    """What `run_calls` runs: a node's call, or one instead of several nodes'."""

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The Values that it reads."""

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The Values that it makes."""

    @property
    def draw(self) -> int | None:
        """For a random operation, its index in the step's stream."""

    def run(self, operands: Sequence[Any], key: jax.Array | None) -> Sequence[Any]:
        """Compute the outputs' arrays."""


class LoweredCall(NamedTuple):
    """A node that is ready to be lowered: the function to call, and the Values to call it on.

    Calls with equal `kind` lower to the same code.
    """

    kind: Template | View
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    draw: int | None  # for a random operation, its index in the step's stream
    node: Node | None

    def run(self, operands: Sequence[Any], key: jax.Array | None) -> Sequence[Any]:
        """Compute the outputs' arrays. `key` is the step's random key, needed if this call draws."""
        if isinstance(self.kind, View):
            return (read_view(operands[0], self.kind),)
        if self.draw is not None:
            assert key is not None
            operands = [*operands, key]
        with self._refusals():
            return self._function()(*operands)

    def jaxpr(self, operands: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """The jaxpr of the call: its operands and, if it draws, a key after them. For operands like those of `run`, JAX
        traces the call only once for both."""
        if isinstance(self.kind, View):
            view = self.kind
            return jax.make_jaxpr(lambda array: (read_view(array, view),))(*operands).jaxpr
        with self._refusals():
            return self._function().trace(*operands).jaxpr.jaxpr

    def _function(self) -> Any:
        assert isinstance(self.kind, Template)
        return function_of(self.kind, aten.usable(), precision.now())

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Errors raised while tracing it, as an error that names the line of the step."""
        assert self.node is not None
        try:
            yield
        except LoweringError as error:
            raise LoweringError(f"{self.node.source}: {error}") from error.__cause__
        except jax.errors.ConcretizationTypeError:
            raise LoweringError(
                f"{self.node.source}: {self.node.op} got a traced value for a number that must be known when it is "
                "lowered. Pass a Python number, or write the formula with tensor operations."
            ) from None
        except (NotImplementedError, TypeError, ValueError) as error:  # raised by the rule or by JAX
            raise LoweringError(f"{self.node.source}: {self.node.op} cannot be lowered: {error}") from error


def call_of(node: Node) -> LoweredCall:
    """Make a call from `node`."""
    inputs: list[Value] = []
    template = template_of(node, inputs)
    draw = None
    if template.keyed:
        assert node.draw is not None
        draw = node.draw.position.words
    return LoweredCall(template, tuple(inputs), node.outputs, draw, node)


def lower(program: Program, values: Mapping[Value, jax.Array], key: jax.Array | None = None) -> dict[str, jax.Array]:
    """Compute the Program's outputs from the `values` of its inputs. To be called under `jax.jit`.

    Args:
        key: the step's random key, from which each random operation's key is derived; needed if there is any.
    """
    arrays: dict[Value, Any] = dict(values)
    run_calls(map(call_of, program.nodes), arrays, lambda draw: fold_in(key, draw))
    out = {}
    for name, ref in program.outputs.items():
        base = _array(arrays, ref.value)
        view = view_of(ref)
        out[name] = base if view is None else read_view(base, view)
    return out


def run_calls(calls: Iterable[AnyCall], arrays: dict[Value, Any], key_of: Callable[[int], jax.Array]) -> None:
    """Run `calls` in order; `arrays` has the inputs, and gets the outputs. `key_of` returns a draw's random key."""
    for call in calls:
        operands = [_array(arrays, value) for value in call.inputs]
        results = call.run(operands, None if call.draw is None else key_of(call.draw))
        arrays.update(zip(call.outputs, results, strict=True))


def unsupported(program: Program) -> dict[str, list[Node]]:
    """The operations in `program` that have neither a rule nor a decomposition, with their nodes."""
    missing: dict[str, list[Node]] = {}
    for node in program.nodes:
        if functional(node.op) not in RULES and node.op not in RULES and not decomposition(node.op):
            missing.setdefault(str(node.op), []).append(node)
    return missing


def _array(arrays: dict[Value, Any], value: Value) -> Any:
    array = arrays.get(value)
    if array is None:
        if value.real is None:
            array = lax.full(value.shape, 0, to_jax(value.dtype))  # uninitialized memory (torch.empty)
        else:
            array = constant(value.real)
        arrays[value] = array
    return array


def template_of(node: Node, inputs: list[Value]) -> Template:
    """The common part of all nodes like `node`; the Values that it reads are appended to `inputs`."""
    index: dict[Value, int] = {}

    def slot(ref: Ref) -> ArrayParameter:
        i = index.get(ref.value)
        if i is None:
            i = index[ref.value] = len(inputs)
            inputs.append(ref.value)
        return ArrayParameter(i, view_of(ref))

    def parameter(arg: Any) -> Any:
        if type(arg) is Ref:
            return slot(arg)
        if type(arg) is float or type(arg) is bool:
            return NumberArgument(type(arg), arg)  # 1, 1.0 and True are equal in Python, but not in PyTorch
        return arg

    args = mapped(parameter, node.args, tuple)
    kwargs = tuple((k, mapped(parameter, v, tuple)) for k, v in node.kwargs.items()) if node.kwargs else ()
    writes = tuple((slot(ref).number, view_of(ref)) for ref in node.writes)
    outputs = tuple((value.shape, value.dtype) for value in node.outputs)
    return Template(node.op, args, kwargs, writes, outputs, node.draw is not None)


class NumberArgument(NamedTuple):
    kind: type
    value: Any


def view_of(ref: Ref) -> View | None:
    """The view of its Value that `ref` is; None if it is the whole Value."""
    if ref.whole:
        return None
    value = ref.value
    return View(value.shape, value.stride, value.dtype, ref.size, ref.stride, ref.offset, ref.dtype)


@functools.lru_cache(maxsize=8192)
def function_of(
    template: Template,
    by_pytorch: bool = False,
    precisions: precision.Precisions | None = None,
    portable: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """The jitted function of all nodes with one template, from the arrays that they read to their results.

    Args:
        by_pytorch: `aten.usable()`; whether PyTorch's kernels may be called.
        precisions: `precision.now()` at the first call; each setting has its own function.
        portable: whether the result must run where JAX's own custom calls, such as LAPACK's, do not exist.
    """
    op = functional(template.op)
    rule = PORTABLE_RULES.get(op) if portable else None
    rule = rule or RULES.get(op) or RULES.get(template.op) or rule_of(template.op, lower)
    if rule is None:
        raise LoweringError(
            f"{template.op} has no lowering to StableHLO. Write the line with other operations, or register one: "
            f"firstloss.register_lowering(torch.ops.{str(template.op)})."
        )
    names_out = {a.name for a in schema_of(template.op).arguments if a.kwarg_only and a.alias_info is not None}

    def call(*arrays: Any) -> tuple[Any, ...]:
        def start_of(view: View) -> Any:
            return None if view.start is None else arrays[view.start[0]][view.start[1]]

        def fill(arg: Any) -> Any:
            if type(arg) is ArrayParameter:
                array, view = arrays[arg.number], arg.view
                return array if view is None else read_view(array, view, start_of(view))
            return arg.value if type(arg) is NumberArgument else arg

        given = ((name, arg) for name, arg in template.kwargs if name not in names_out and name != "generator")
        kwargs = {name: mapped(fill, arg, list) for name, arg in given}
        if template.keyed:
            kwargs["rng_key"] = arrays[-1]
        if template.op in OF_PROGRAMS:
            kwargs["lower"] = lower
        if template.op in OF_ORDERS:
            kwargs["by_columns"] = [_by_columns(arg.view) for arg in template.args if type(arg) is ArrayParameter]
        args = [mapped(fill, arg, list) for arg in template.args if not isinstance(arg, torch.Generator)]
        # Functional overloads return new tensors first, then the new contents of mutated ones.
        count = len(template.writes)
        results = dispatched.call(op, args, kwargs, template.results()) if by_pytorch else None
        flat = list(_flatten(rule(*args, **kwargs) if results is None else results))
        new_tensors, mutated = flat[: len(flat) - count], flat[len(flat) - count :]
        out = []
        for (index, view), new, (shape, dtype) in zip(template.writes, mutated, template.outputs, strict=False):
            if view is None:
                out.append(_checked(template, new, shape, dtype))
            else:
                new = _checked(template, new, view.size, view.dtype)
                out.append(write_view(arrays[index], new, view, start_of(view)))
        new_tensors = [m for m in new_tensors if m is not None]
        expected = template.outputs[count:]
        if len(new_tensors) != len(expected):
            raise LoweringError(
                f"the lowering of {template.op} returns {len(new_tensors)} results, but capture recorded "
                f"{len(expected)}"
            )
        out.extend(_checked(template, m, shape, dtype) for m, (shape, dtype) in zip(new_tensors, expected, strict=True))
        return tuple(out)

    call.__name__ = call.__qualname__ = str(template.op).removeprefix("aten.").replace(".", "_")
    return jax.jit(call)


def _by_columns(view: View | None) -> bool:
    """Whether a view is of a matrix, or a batch of them, that is stored by columns."""
    return view is not None and len(view.size) in (2, 3) and view.stride[-2] < view.stride[-1] and view.size[-2] > 1


def forget_functions() -> None:
    """Clear the cache of functions after a rule has changed."""
    function_of.cache_clear()


def _flatten(results: Any) -> Any:
    if isinstance(results, (list, tuple)):
        for r in results:
            yield from _flatten(r)
    else:
        yield results


def _checked(template: Template, result: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    result = cast(result, to_jax(dtype))
    if np.shape(result) != shape:
        if np.prod(np.shape(result), dtype=int) == 1 or len(np.shape(result)) < len(shape):
            return lax.broadcast_in_dim(result, shape, range(len(shape) - np.ndim(result), len(shape)))
        raise LoweringError(
            f"the lowering of {template.op} returns shape {list(np.shape(result))}, but capture recorded {list(shape)}"
        )
    return result


# -- views -----------------------------------------------------------------------------------------------------------


def _order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions ordered from outermost to innermost in memory."""
    return sorted(range(len(shape)), key=lambda d: (-stride[d], -shape[d], d))


def _dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    if 0 in shape:  # strides of empty tensors are arbitrary
        return True
    expected = 1
    for d in reversed(order):
        if shape[d] == 1:
            continue
        if stride[d] != expected:
            return False
        expected *= shape[d]
    return True


def read_view(base: Any, view: View, start: Any = None) -> Any:
    """Read the view from `base`, an array of `view.base_shape` in logical order; from `start` on, if it is given."""
    memory = _in_memory_order(base, view)
    if view.dtype != view.base_dtype:
        memory = _reinterpret(memory, view.base_dtype, view.dtype)
    if start is not None:
        memory = lax.dynamic_slice_in_dim(lax.reshape(memory, (memory.size,)), start, _extent(view))
    order = _order(view.size, view.stride)
    if view.offset == 0 and memory.size == np.prod(view.size, dtype=int) and _dense(view.size, view.stride, order):
        # A reshaped or transposed whole: do not flatten it, which would lose its sharding.
        x = lax.reshape(memory, tuple(view.size[d] for d in order))
        inverse = [order.index(d) for d in range(len(order))]
        return x if inverse == list(range(len(inverse))) else lax.transpose(x, inverse)
    return as_strided(memory, view.size, view.stride, view.offset)


def _extent(view: View) -> int:
    """From a view's first element to its last, in elements of the memory."""
    return 1 + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))


def write_view(base: Any, new: Any, view: View, start: Any = None) -> Any:
    """Write `new` through the view, and return the new base; from `start` on, if it is given."""
    memory = _in_memory_order(base, view)
    if view.dtype != view.base_dtype:
        memory = _reinterpret(memory, view.base_dtype, view.dtype)
    order = _order(view.size, view.stride)
    if view.offset == 0 and memory.size == np.prod(view.size, dtype=int) and _dense(view.size, view.stride, order):
        memory = lax.reshape(lax.transpose(new, order), memory.shape)
    elif start is not None:
        flat = lax.reshape(memory, (memory.size,))
        part = lax.dynamic_slice_in_dim(flat, start, _extent(view))
        part = as_strided_scatter(part, new, view.size, view.stride, 0)
        memory = lax.reshape(lax.dynamic_update_slice_in_dim(flat, part, start, 0), memory.shape)
    else:
        memory = as_strided_scatter(memory, new, view.size, view.stride, view.offset)
    if view.dtype != view.base_dtype:
        memory = _reinterpret(memory, view.dtype, view.base_dtype)
    memory_order = _order(view.base_shape, view.base_stride)
    shape = tuple(view.base_shape[d] for d in memory_order)
    return lax.transpose(lax.reshape(memory, shape), [memory_order.index(d) for d in range(len(memory_order))])


def _in_memory_order(base: Any, view: View) -> Any:
    order = _order(view.base_shape, view.base_stride)
    if not _dense(view.base_shape, view.base_stride, order):
        raise LoweringError(
            f"a view of a tensor of shape {list(view.base_shape)} whose strides {list(view.base_stride)} leave gaps in "
            "memory. Call .contiguous() on it first"
        )
    return base if order == list(range(len(order))) else lax.transpose(base, order)


def _reinterpret(memory: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if old.is_complex and not new.is_complex:
        return view_as_real(memory)
    if new.is_complex and not old.is_complex:
        return view_as_complex(lax.reshape(memory, (memory.size // 2, 2)))
    return view_dtype(lax.reshape(memory, (memory.size,)), new)
