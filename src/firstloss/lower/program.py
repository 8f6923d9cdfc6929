"""Lower a Program: a JAX function that computes its outputs from its inputs.

Each node becomes one call of a small jitted function: its arguments' views, the rule, the casts to the dtypes that
capture recorded and, for a write through a view, the scatter back into the base. Nodes that differ in nothing but their
arrays share that function, so that layer after layer is traced and lowered once, and a module is as long as its list
of calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax import lax

from ..compat.torch_names import schema_of
from ..errors import LoweringError
from ..program.graph import Node, Ref, Value
from ..program.program import Program
from . import aten, precision
from .decompose import decomposition, rule_of
from .dtypes import cast, to_jax
from .functional_overloads import functional
from .registry import OF_ORDERS, OF_PROGRAMS
from .rules import RULES
from .views import as_strided, as_strided_scatter, view_as_complex, view_as_real, view_dtype


class ArrayParameter(NamedTuple):
    """In a node's template, the place of its array number `place`, read through a view (None: as it is)."""

    place: int
    view: View | None


class View(NamedTuple):
    """A Ref without its Value: the view's own geometry, and its base's."""

    base_shape: tuple[int, ...]
    base_stride: tuple[int, ...]
    base_dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Template(NamedTuple):
    """All of a node but its arrays."""

    op: Any
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]
    writes: tuple[tuple[int, View | None], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    keyed: bool


class LoweredCall(NamedTuple):
    """A node, ready to be lowered: what is called, and on which Values.

    Calls that are equal in `kind` lower to the same code.
    """

    kind: Template | View
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    draw: int | None  # for a random operation, its number in the step's stream
    node: Node | None

    def run(self, operands: Sequence[Any], key: jax.Array | None) -> Sequence[Any]:
        """The outputs' arrays. `key` is the step's; needed if this draws."""
        if isinstance(self.kind, View):
            return (read_view(operands[0], self.kind),)
        if self.draw is not None:
            assert key is not None
            operands = [*operands, key]
        with self._refusals():
            return self._function()(*operands)

    def jaxpr(self, operands: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """What it computes of `operands` and, if it draws, of a key behind them. Where the operands are like those of
        `run`, JAX traces it once for both."""
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
        """What tracing it may raise, as an error that says where in the step it is."""
        assert self.node is not None
        try:
            yield
        except LoweringError as error:
            raise LoweringError(f"{self.node.source}: {error}") from error.__cause__
        except jax.errors.ConcretizationTypeError:
            raise LoweringError(
                f"{self.node.source}: {self.node.op} is given a traced value for a number on which its very "
                "computation depends. Pass a Python number, or write the formula with tensor operations."
            ) from None
        except (NotImplementedError, TypeError, ValueError) as error:  # a rule's own refusal, or what JAX refuses
            raise LoweringError(f"{self.node.source}: {self.node.op} cannot be lowered: {error}") from error


def call_of(node: Node) -> LoweredCall:
    """`node` as a Call."""
    inputs: list[Value] = []
    template = template_of(node, inputs)
    draw = None
    if template.keyed:
        assert node.draw is not None
        draw = node.draw.position.words
    return LoweredCall(template, tuple(inputs), node.outputs, draw, node)


def lower(program: Program, values: Mapping[Value, jax.Array], key: jax.Array | None = None) -> dict[str, jax.Array]:
    """The Program's outputs, computed from `values` for its inputs. To be called under `jax.jit`.

    Args:
        key: the step's random key, from which each random operation's is made; needed if there is one.
    """
    arrays: dict[Value, Any] = dict(values)
    run_calls(map(call_of, program.nodes), arrays, lambda draw: jax.random.fold_in(key, draw))
    out = {}
    for name, ref in program.outputs.items():
        base = _array(arrays, ref.value)
        view = view_of(ref)
        out[name] = base if view is None else read_view(base, view)
    return out


def run_calls(calls: Iterable[LoweredCall], arrays: dict[Value, Any], key_of: Callable[[int], jax.Array]) -> None:
    """Run `calls` in order: inputs are taken from `arrays`, outputs put there. `key_of` gives a draw's random key."""
    for call in calls:
        operands = [_array(arrays, value) for value in call.inputs]
        results = call.run(operands, None if call.draw is None else key_of(call.draw))
        arrays.update(zip(call.outputs, results, strict=True))


def unsupported(program: Program) -> dict[str, list[Node]]:
    """The operations in `program` that have neither rule nor decomposition, each with its nodes."""
    missing: dict[str, list[Node]] = {}
    for node in program.nodes:
        if functional(node.op) not in RULES and node.op not in RULES and not decomposition(node.op):
            missing.setdefault(str(node.op), []).append(node)
    return missing


def _array(arrays: dict[Value, Any], value: Value) -> Any:
    found = arrays.get(value)
    if found is None:
        if value.real is None:
            found = lax.full(value.shape, 0, to_jax(value.dtype))  # memory that was never written (torch.empty)
        else:
            found = constant(value.real)
        arrays[value] = found
    return found


def constant(tensor: torch.Tensor) -> np.ndarray:
    """A torch tensor's values as numpy has them (bfloat16 and the like by ml_dtypes), in row-major order."""
    return as_numpy(tensor).copy()


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """As `constant`, of a tensor in row-major order its own memory."""
    tensor = tensor.detach().contiguous()
    dtype = to_jax(tensor.dtype)
    if tensor.dtype.is_floating_point and tensor.dtype not in (torch.float32, torch.float64, torch.float16):
        integer = {1: torch.uint8, 2: torch.int16}[tensor.itemsize]
        return tensor.view(integer).numpy().view(dtype)
    return tensor.numpy().astype(dtype, copy=False)


def template_of(node: Node, inputs: list[Value]) -> Template:
    """What is the same in all nodes like `node`; the Values that it reads are added to `inputs`, in their order."""
    index: dict[Value, int] = {}

    def slot(ref: Ref) -> ArrayParameter:
        i = index.get(ref.value)
        if i is None:
            i = index[ref.value] = len(inputs)
            inputs.append(ref.value)
        return ArrayParameter(i, view_of(ref))

    def walk(arg: Any) -> Any:
        if type(arg) is Ref:
            return slot(arg)
        if type(arg) in (list, tuple):
            return tuple(walk(a) for a in arg)
        if type(arg) is float or type(arg) is bool:
            return _NumberArgument(type(arg), arg)  # 1, 1.0 and True are equal to Python, and not to PyTorch
        return arg

    args = walk(node.args)
    kwargs = tuple((k, walk(v)) for k, v in node.kwargs.items()) if node.kwargs else ()
    writes = tuple((slot(ref).place, view_of(ref)) for ref in node.writes)
    outputs = tuple((value.shape, value.dtype) for value in node.outputs)
    return Template(node.op, args, kwargs, writes, outputs, node.draw is not None)


class _NumberArgument(NamedTuple):
    kind: type
    value: Any


def view_of(ref: Ref) -> View | None:
    """How `ref` looks at its Value; None: as it is."""
    if ref.whole:
        return None
    value = ref.value
    return View(value.shape, value.stride, value.dtype, ref.size, ref.stride, ref.offset, ref.dtype)


@functools.lru_cache(maxsize=8192)
def function_of(
    template: Template, by_pytorch: bool = False, precisions: precision.Precisions | None = None
) -> Callable[..., tuple]:
    """The jitted function of all nodes of one template, from the arrays that they read to those that they make.

    Args:
        by_pytorch: as `aten.usable()` says; it may call PyTorch's kernels.
        precisions: as `precision.now()` says, when it is called first: under others it is another function.
    """
    op = functional(template.op)
    rule = RULES.get(op) or RULES.get(template.op) or rule_of(template.op, lower)
    if rule is None:
        raise LoweringError(
            f"{template.op} has no lowering to StableHLO. Write the line with other operations, or give it one: "
            f"firstloss.register_lowering(torch.ops.{str(template.op)})."
        )
    names_out = {a.name for a in schema_of(template.op).arguments if a.kwarg_only and a.alias_info is not None}

    def call(*arrays: Any) -> tuple:
        def fill(arg: Any) -> Any:
            if type(arg) is ArrayParameter:
                array = arrays[arg.place]
                return array if arg.view is None else read_view(array, arg.view)
            if type(arg) is _NumberArgument:
                return arg.value
            if type(arg) is tuple:
                return [fill(a) for a in arg]
            return arg

        kwargs = {name: fill(arg) for name, arg in template.kwargs if name not in names_out and name != "generator"}
        if template.keyed:
            kwargs["rng_key"] = arrays[-1]
        if template.op in OF_PROGRAMS:
            kwargs["lower"] = lower
        if template.op in OF_ORDERS:
            kwargs["by_columns"] = [_by_columns(arg.view) for arg in template.args if type(arg) is ArrayParameter]
        results = rule(*[fill(arg) for arg in template.args if not isinstance(arg, torch.Generator)], **kwargs)
        flat = list(_flatten(results))
        count = len(template.writes)
        # functional overloads return new tensors first, then what the mutable one writes
        made, written = flat[: len(flat) - count], flat[len(flat) - count :]
        out = []
        for (index, view), new, (shape, dtype) in zip(template.writes, written, template.outputs, strict=False):
            if view is None:
                out.append(_checked(template, new, shape, dtype))
            else:
                new = _checked(template, new, view.size, view.dtype)
                out.append(write_view(arrays[index], new, view))
        made = [m for m in made if m is not None]
        expected = template.outputs[count:]
        if len(made) != len(expected):
            raise LoweringError(f"the lowering of {template.op} gives {len(made)} results, capture saw {len(expected)}")
        out.extend(_checked(template, m, shape, dtype) for m, (shape, dtype) in zip(made, expected, strict=True))
        return tuple(out)

    call.__name__ = call.__qualname__ = str(template.op).removeprefix("aten.").replace(".", "_")
    return jax.jit(call)


def _by_columns(view: View | None) -> bool:
    """Whether what a view sees is a matrix that lies in memory by columns."""
    return view is not None and len(view.size) == 2 and view.stride[0] < view.stride[1] and view.size[0] > 1


def forget_functions() -> None:
    """Lower nodes again from here on: a rule has changed."""
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
            f"the lowering of {template.op} gives shape {list(np.shape(result))}, capture saw {list(shape)}"
        )
    return result


# -- views -----------------------------------------------------------------------------------------------------------


def _order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(shape)), key=lambda d: (-stride[d], -shape[d], d))


def _dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    if 0 in shape:  # strides of what is empty say nothing
        return True
    expected = 1
    for d in reversed(order):
        if shape[d] == 1:
            continue
        if stride[d] != expected:
            return False
        expected *= shape[d]
    return True


def read_view(base: Any, view: View) -> Any:
    """The view of `base`, an array of `view.base_shape` in logical order."""
    memory = _in_memory_order(base, view)
    if view.dtype != view.base_dtype:
        memory = _reinterpret(memory, view.base_dtype, view.dtype)
    order = _order(view.size, view.stride)
    if view.offset == 0 and memory.size == np.prod(view.size, dtype=int) and _dense(view.size, view.stride, order):
        # All of it in another shape and order: no detour through one dimension, which would lose a sharding.
        x = lax.reshape(memory, tuple(view.size[d] for d in order))
        back = [order.index(d) for d in range(len(order))]
        return x if back == list(range(len(back))) else lax.transpose(x, back)
    return as_strided(memory, view.size, view.stride, view.offset)


def write_view(base: Any, new: Any, view: View) -> Any:
    """`base` with `new` written through the view."""
    memory = _in_memory_order(base, view)
    if view.dtype != view.base_dtype:
        memory = _reinterpret(memory, view.base_dtype, view.dtype)
    order = _order(view.size, view.stride)
    if view.offset == 0 and memory.size == np.prod(view.size, dtype=int) and _dense(view.size, view.stride, order):
        memory = lax.reshape(lax.transpose(new, order), memory.shape)
    else:
        memory = as_strided_scatter(memory, new, view.size, view.stride, view.offset)
    if view.dtype != view.base_dtype:
        memory = _reinterpret(memory, view.dtype, view.base_dtype)
    back = _order(view.base_shape, view.base_stride)
    shape = tuple(view.base_shape[d] for d in back)
    return lax.transpose(lax.reshape(memory, shape), [back.index(d) for d in range(len(back))])


def _in_memory_order(base: Any, view: View) -> Any:
    order = _order(view.base_shape, view.base_stride)
    if not _dense(view.base_shape, view.base_stride, order):
        raise LoweringError(
            f"a view of a tensor whose strides {list(view.base_stride)} leave gaps in memory for shape "
            f"{list(view.base_shape)}. Call .contiguous() on it first"
        )
    return base if order == list(range(len(order))) else lax.transpose(base, order)


def _reinterpret(memory: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if old.is_complex and not new.is_complex:
        return view_as_real(memory)
    if new.is_complex and not old.is_complex:
        return view_as_complex(lax.reshape(memory, (memory.size // 2, 2)))
    return view_dtype(lax.reshape(memory, (memory.size,)), new)
