"""A function cut along its batch into logical shards, which computes the same bits on any number of devices.

XLA's partitioner gives each device one piece of the batch, so both the shapes that kernels see and the order in which
sums are taken follow the number of devices, and the last digits do. Here the batch is cut into a fixed number of
*logical shards*, whatever the mesh. Each value of the function is either *whole*, the same on all devices, or *cut*
along one dimension into logical shards. A device computes its logical shards one after another, all with the same
code; where the cut dimension is summed, the shards' sums are added in one binary tree over the logical shards, inside a
device as over devices. What cannot be computed shard by shard is computed from gathered whole values, on each device
alike.

The function is cut by its jaxpr: which dimensions of operands and results belong together is known from
`sharding_rules`, and `_CUTS` says of each primitive whether it can be computed piece by piece along one of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax import lax
from jax import numpy as jnp

from .jaxprs import called_by
from .sharding_rules import rule_of_equation

Params = dict[str, Any]


class Operation(NamedTuple):
    """An operation of the cut function, on values by their numbers.

    Attributes:
        bind: computes the results from the operands.
        cuts: for each operand the dimension along which it is read in logical shards; None: whole.
        results: the numbers of the results.
        is_cut: whether it is computed for each logical shard.
        add: if each logical shard's results are terms of a whole one, how two are added.
        draws: whether its first operand is a random key, which is then another for each logical shard.
        line: of the user's code.
    """

    bind: Callable[..., Sequence[Any]]
    operands: tuple[int, ...]
    cuts: tuple[int | None, ...]
    results: tuple[int, ...]
    is_cut: bool
    add: Callable[[Any, Any], Any] | None = None
    draws: bool = False
    line: str = ""


class CutFunction(NamedTuple):
    """A function, cut into logical shards.

    Attributes:
        shards: the number of logical shards.
        inputs, outputs: the numbers of its arguments and results.
        dims: for each value that is cut, along which dimension.
        shapes: of each value, whole, with its dtype.
        constants: the values that are known.
        loops: the operations of each pass over the logical shards.
        between: the operations on whole values before each pass, and after the last.
        gathered: the cut values that are made whole after each pass, and the numbers of the whole ones.
        lines: for each of the last, the line that needs it whole.
    """

    shards: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dims: dict[int, int]
    shapes: list[Any]
    constants: dict[int, Any]
    loops: list[list[Operation]]
    between: list[list[Operation]]
    gathered: list[dict[int, int]]
    lines: dict[int, str]


# -- how a primitive is computed piece by piece ------------------------------------------------------------------------


class _Request(NamedTuple):
    """An equation that is to be cut into `shards` along a factor.

    Attributes:
        at, to: for each operand and result the dimension of that factor, or None.
    """

    eqn: Any
    at: tuple[int | None, ...]
    to: tuple[int | None, ...]
    shards: int

    def local(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """The shape of one logical shard."""
        return tuple(size // self.shards if i == dim else size for i, size in enumerate(shape))


_Cut = Callable[[_Request], Params | None]  # the parameters for one logical shard; None if it cannot be cut so


def _as_it_is(request: _Request) -> Params | None:
    return {}


def _unless(*names: str) -> _Cut:
    """Along all dimensions but those of the parameters `names`."""

    def cut(request: _Request) -> Params | None:
        for name in names:
            dims = request.eqn.params[name]
            if request.at[0] in (dims if isinstance(dims, (tuple, list)) else (dims,)):
                return None
        return {}

    return cut


def _new_shape(name: str) -> _Cut:
    """The parameter `name` is the result's shape."""

    def cut(request: _Request) -> Params | None:
        return {name: request.local(request.eqn.params[name], request.to[0]), "sharding": None}

    return cut


def _slice(request: _Request) -> Params | None:
    params, (dim, *_) = request.eqn.params, request.at
    size = request.eqn.invars[0].aval.shape[dim]
    if params["start_indices"][dim] or params["limit_indices"][dim] != size:
        return None
    if params["strides"] is not None and params["strides"][dim] != 1:
        return None
    return {"limit_indices": request.local(params["limit_indices"], dim)}


def _pad(request: _Request) -> Params | None:
    (dim, *_) = request.at
    return {} if dim is not None and request.eqn.params["padding_config"][dim] == (0, 0, 0) else None


def _dynamic_slice(request: _Request) -> Params | None:
    dim, sizes = request.at[0], request.eqn.params["slice_sizes"]
    if dim is None or sizes[dim] != request.eqn.invars[0].aval.shape[dim]:
        return None
    return {"slice_sizes": request.local(sizes, dim)}


def _dynamic_update_slice(request: _Request) -> Params | None:
    base, update = request.at[:2]
    shapes = [atom.aval.shape for atom in request.eqn.invars[:2]]
    return {} if base is not None and base == update and shapes[0][base] == shapes[1][base] else None


def _top_k(request: _Request) -> Params | None:
    return {} if request.at[0] != request.eqn.invars[0].aval.ndim - 1 else None


def _window(request: _Request) -> Params | None:
    """Windows over other dimensions."""
    params, dim = request.eqn.params, request.at[0]
    if dim is None:
        return None
    sizes = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    return {} if all(tuple(params[n])[dim] == one for n, one in sizes.items() if n in params) else None


def _gather(request: _Request) -> Params | None:
    params = request.eqn.params
    numbers, sizes, dim = params["dimension_numbers"], params["slice_sizes"], request.at[0]
    if dim is None or dim in numbers.operand_batching_dims:
        return {}
    if sizes[dim] != request.eqn.invars[0].aval.shape[dim]:
        return None
    return {"slice_sizes": request.local(sizes, dim)}


def _scatter(request: _Request) -> Params | None:
    base, indices, updates = request.at
    if base is None:
        return {} if request.eqn.primitive.name in _SUMS else None
    batching = base in request.eqn.params["dimension_numbers"].operand_batching_dims
    return {} if updates is not None and (indices is not None) == batching else None


def _convolution(request: _Request) -> Params | None:
    params, numbers = request.eqn.params, request.eqn.params["dimension_numbers"]
    if request.to[0] is None:  # the input channels, which are summed
        return {} if params["feature_group_count"] == 1 else None
    is_batch = request.at[0] == numbers.lhs_spec[0] and request.at[1] is None
    return {} if is_batch and params["batch_group_count"] == 1 else None


def _split(request: _Request) -> Params | None:
    return {} if request.at[0] != request.eqn.params["axis"] else None


def _random_bits(request: _Request) -> Params | None:
    return {"shape": request.local(request.eqn.params["shape"], request.to[0])}


def _iota(request: _Request) -> Params | None:
    params = request.eqn.params
    if request.to[0] == params["dimension"]:
        return None
    return {"shape": request.local(params["shape"], request.to[0]), "sharding": None}


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
    optimization_barrier or polygamma population_count pow random_gamma_grad real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh xor zeta
""".split()

_CUTS: dict[str, _Cut] = {
    **dict.fromkeys(_ELEMENTWISE, _as_it_is),
    **dict.fromkeys(("dot_general", "squeeze", "stack", "transpose", "unstack"), _as_it_is),
    **{f"reduce_{kind}": _as_it_is for kind in ("sum", "max", "min", "prod", "and", "or", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _unless("axes")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _unless("axis")),
    **dict.fromkeys(("sort", "concatenate"), _unless("dimension")),
    "rev": _unless("dimensions"),
    "top_k": _top_k,
    "broadcast_in_dim": _new_shape("shape"),
    "reshape": _new_shape("new_sizes"),
    "iota": _iota,
    "slice": _slice,
    "pad": _pad,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), _scatter),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
            *("select_and_scatter_add", "select_and_gather_add"),
        ),
        _window,
    ),
    "random_bits": _random_bits,
}

# How the results of logical shards are joined, if the cut dimension is not one of the result's.
_SUMS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("reduce_sum", "dot_general", "conv_general_dilated", "scatter-add", "scatter_add"), lax.add),
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "reduce_xor": lax.bitwise_xor,
}


# -- cutting a function ------------------------------------------------------------------------------------------------


class _Equation(NamedTuple):
    """An equation on numbered values."""

    eqn: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    line: str

    def along(self, factor: int, shards: int) -> _Request | None:
        """It, to be cut along a factor, if it can be."""
        rule = rule_of_equation(self.eqn)
        if any(dims.count(factor) > 1 for dims in (*rule.operands, *rule.results)):
            return None
        at, to = ([dims.index(factor) if factor in dims else None for dims in side] for side in rule)
        atoms = (*zip(self.eqn.invars, at, strict=True), *zip(self.eqn.outvars, to, strict=True))
        if any(dim is not None and atom.aval.shape[dim] % shards for atom, dim in atoms):
            return None
        return _Request(self.eqn, tuple(at), tuple(to), shards)

    def factor(self, number: int, dim: int) -> int:
        """The factor of a dimension of operand `number`, or, from -1 downwards, of a result."""
        rule = rule_of_equation(self.eqn)
        return (rule.operands[number] if number >= 0 else rule.results[-number - 1])[dim]


def cut(closed: Any, inputs_cut: Sequence[int | None], shards: int, lines: Sequence[str] = ()) -> CutFunction:
    """Cut a function into logical shards.

    Args:
        closed: its jaxpr.
        inputs_cut: for each argument, the dimension along which it is cut; None: whole.
        lines: of the user's code, by the numbers that the equations' name stacks begin with.
    """
    flat = _Flat(closed, lines)
    return _Cutter(flat, inputs_cut, shards).function()


class _Flat:
    """A jaxpr without calls of others, on numbered values."""

    def __init__(self, closed: Any, lines: Sequence[str]) -> None:
        self.shapes: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[_Equation] = []
        self._lines = lines
        self.inputs: tuple[int, ...] = tuple(self.new(var.aval) for var in closed.jaxpr.invars)
        self.outputs: tuple[int, ...] = tuple(self._inline(closed.jaxpr, closed.consts, self.inputs, ""))

    def new(self, aval: Any) -> int:
        self.shapes.append(aval)
        return len(self.shapes) - 1

    def _constant(self, aval: Any, value: Any) -> int:
        number = self.new(aval)
        self.constants[number] = value
        return number

    def _inline(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[int], line: str) -> list[int]:
        env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            env[var] = self._constant(var.aval, value)

        def read(atom: Any) -> int:
            return self._constant(atom.aval, atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            at = line or self._line(eqn)
            called = called_by(eqn)
            if called is not None and len(called.jaxpr.invars) == len(operands):
                results = tuple(self._inline(called.jaxpr, called.consts, operands, at))
            else:
                results = tuple(self.new(var.aval) for var in eqn.outvars)
                self.equations.append(_Equation(eqn, operands, results, at))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _line(self, eqn: Any) -> str:
        name, _, _ = str(eqn.source_info.name_stack).partition("/")
        return self._lines[int(name)] if name.isdecimal() else ""

    def needed(self) -> list[_Equation]:
        """The equations that the outputs need."""
        wanted = set(self.outputs)
        out = []
        for equation in reversed(self.equations):
            if not wanted.isdisjoint(equation.results):
                wanted.update(equation.operands)
                out.append(equation)
        return out[::-1]


class _Cutter:
    def __init__(self, flat: _Flat, inputs_cut: Sequence[int | None], shards: int) -> None:
        self._flat = flat
        self._shards = shards
        self._dims = {number: dim for number, dim in zip(flat.inputs, inputs_cut, strict=True) if dim is not None}
        self._whole: dict[int, int] = {}  # of cut values that are read whole, the whole ones
        self._lines: dict[int, str] = {}
        self._equations = flat.needed()
        self._requests = self._forward()
        self._backward()

    # -- which values are cut --

    def _forward(self) -> list[_Request | None]:
        """Cut what is computed from cut values, where it can be."""
        requests = []
        for equation in self._equations:
            request = self._request(equation)
            requests.append(request)
            if request is not None:
                self._dims.update((v, d) for v, d in zip(equation.results, request.to, strict=True) if d is not None)
            for number, operand in enumerate(equation.operands):
                if operand in self._dims and (request is None or request.at[number] != self._dims[operand]):
                    self._gather(operand, equation.line)
        return requests

    def _request(self, equation: _Equation) -> _Request | None:
        cut_operands = [n for n, operand in enumerate(equation.operands) if operand in self._dims]
        # The largest first, and what stays cut before what is summed.
        cut_operands.sort(key=lambda n: -self._flat.shapes[equation.operands[n]].size)
        found = []
        for number in cut_operands:
            request = equation.along(
                equation.factor(number, self._dims[equation.operands[number]]), self._shards
            )
            if request is not None and self._params(request) is not None:
                found.append(request)
        return next((r for r in found if None not in r.to), next(iter(found), None))

    def _params(self, request: _Request) -> Params | None:
        name = request.eqn.primitive.name
        if name not in _CUTS or name not in _SUMS and None in request.to:
            return None
        if name == "random_bits" and request.at != (None,):
            return None
        if all(dim is None for dim in request.to) and name not in _SUMS:
            return None
        return _CUTS[name](request)

    def _gather(self, value: int, line: str) -> None:
        if value not in self._whole:
            whole = self._whole[value] = self._flat.new(self._flat.shapes[value])
            self._lines[whole] = line

    def _backward(self) -> None:
        """Cut what is whole and is only read in logical shards, along one dimension: masks, positions, random draws."""
        read_along: dict[int, set[int | None]] = {}

        def note(equation: _Equation, request: _Request | None) -> None:
            at = (None,) * len(equation.operands) if request is None else request.at
            for operand, dim in zip(equation.operands, at, strict=True):
                read_along.setdefault(operand, set()).add(dim)

        for output in self._flat.outputs:
            read_along.setdefault(output, set()).add(None)
        for n in reversed(range(len(self._equations))):
            equation = self._equations[n]
            if self._requests[n] is None and not any(operand in self._dims for operand in equation.operands):
                self._requests[n] = self._wanted(equation, [read_along.get(v) for v in equation.results])
            note(equation, self._requests[n])

    def _wanted(self, equation: _Equation, read: Sequence[set[int | None] | None]) -> _Request | None:
        for number, dims in enumerate(read):
            if dims is None:
                continue
            if len(dims) != 1 or None in dims:
                return None
            (dim,) = dims
            assert dim is not None
            request = equation.along(equation.factor(-number - 1, dim), self._shards)
            if request is None or any(d is not None and set((t,)) != d for t, d in zip(request.to, read, strict=True)):
                return None
            if None in request.to or self._params(request) is None:
                return None
            self._dims.update(zip(equation.results, request.to, strict=True))
            return request
        return None

    # -- when what is computed --

    def function(self) -> CutFunction:
        operations = list(self._operations())
        loops = self._loops(operations)
        count = max((loop for operation, loop in zip(operations, loops, strict=True) if operation.is_cut), default=-1)
        function = CutFunction(
            self._shards,
            self._flat.inputs,
            self._flat.outputs,
            self._dims,
            self._flat.shapes,
            self._flat.constants,
            [[] for _ in range(count + 1)],
            [[] for _ in range(count + 2)],
            [{} for _ in range(count + 1)],
            self._lines,
        )
        of_whole = {whole: value for value, whole in self._whole.items()}
        for operation, loop in zip(operations, loops, strict=True):
            if not operation.is_cut:
                function.between[loop + 1].append(operation)
            elif operation.results[0] in of_whole:
                function.gathered[loop][of_whole[operation.results[0]]] = operation.results[0]
            else:
                function.loops[loop].append(operation)
        return function

    def _operations(self) -> Iterator[Operation]:
        """The operations in order, the gathers of cut values among them."""
        gathers = dict(self._whole)

        def gathered(values: Iterable[int]) -> Iterator[Operation]:
            for value in values:
                if (whole := gathers.pop(value, None)) is not None:
                    line = self._lines[whole]
                    yield Operation(_nothing, (value,), (self._dims[value],), (whole,), True, line=line)

        yield from gathered(self._flat.inputs)
        for equation, request in zip(self._equations, self._requests, strict=True):
            yield from self._operation(equation, request)
            yield from gathered(equation.results)

    def _operation(self, equation: _Equation, request: _Request | None) -> Iterator[Operation]:
        eqn, operands = equation.eqn, list(equation.operands)
        bind = _binder(eqn, None if request is None else self._params(request))
        cuts: tuple[int | None, ...] = (None,) * len(operands) if request is None else request.at
        for n, operand in enumerate(operands):
            if operand in self._dims and self._dims[operand] != cuts[n]:
                operands[n] = self._whole[operand]
        if request is None:
            yield Operation(bind, tuple(operands), cuts, equation.results, False, line=equation.line)
            return
        name = eqn.primitive.name
        if None not in request.to:
            draws = name == "random_bits"
            yield Operation(bind, tuple(operands), cuts, equation.results, True, None, draws, equation.line)
        elif not name.startswith("scatter"):
            yield Operation(bind, tuple(operands), cuts, equation.results, True, _SUMS[name], line=equation.line)
        else:  # each logical shard adds to zeros, and the sum is added to what there was
            base, (result,) = operands[0], equation.results
            aval = self._flat.shapes[result]
            zeros, total = self._flat.new(aval), self._flat.new(aval)
            yield Operation(lambda aval=aval: (jnp.zeros(aval.shape, aval.dtype),), (), (), (zeros,), False)
            yield Operation(bind, (zeros, *operands[1:]), cuts, (total,), True, _SUMS[name], line=equation.line)
            yield Operation(lambda a, b: (lax.add(a, b),), (base, total), (None, None), (result,), False)

    def _loops(self, operations: Sequence[Operation]) -> list[int]:
        """For each operation, the pass over the logical shards in which it is computed, or, if it is of whole values,
        after which; -1: before the first. As late as possible, without another pass: what one logical shard computes
        is then used in the same pass."""
        cut_in: dict[int, int] = dict.fromkeys(self._dims, 0)  # the pass that computes it
        whole_after: dict[int, int] = {}
        earliest = []
        for operation in operations:
            at = 0 if operation.is_cut else -1
            for value, dim in zip(operation.operands, operation.cuts, strict=True):
                if dim is not None and value in self._dims:
                    at = max(at, cut_in[value])
                else:
                    at = max(at, whole_after.get(value, -1) + operation.is_cut)
            earliest.append(at)
            for value in operation.results:
                if operation.is_cut and value in self._dims:
                    cut_in[value] = at
                else:
                    whole_after[value] = at
        last = max((at for at, operation in zip(earliest, operations, strict=True) if operation.is_cut), default=-1)
        latest: dict[int, int] = {}
        out = []
        for operation in reversed(operations):
            at = min((latest.get(value, last) for value in operation.results), default=last)
            out.append(at)
            for value, dim in zip(operation.operands, operation.cuts, strict=True):
                is_cut = dim is not None and value in self._dims
                before = at if is_cut or not operation.is_cut else at - 1
                latest[value] = min(latest.get(value, last), before)
        return out[::-1]


def _nothing(*operands: Any) -> Sequence[Any]:
    raise AssertionError("a gather is no operation of one logical shard")


def _binder(eqn: Any, changed: Params | None) -> Callable[..., Sequence[Any]]:
    """How an equation is computed; `changed` are the parameters for one logical shard, None: whole."""
    params = {**eqn.params, **(changed or {})}
    primitive = eqn.primitive
    if changed is not None and primitive.name == "conv_general_dilated" and params["batch_group_count"] == 1:
        return lambda data, kernel: (_channels_last(data, kernel, params),)

    def bind(*operands: Any) -> Sequence[Any]:
        results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else (results,)

    return bind


def _channels_last(data: Any, kernel: Any, params: Params) -> Any:
    """A convolution of (batch, *space, channels) with (*space, in, out). On a CPU, XLA has a library for these, and
    transposes others, but only outside of loops: in a loop they would be computed by a plain one, ten times slower."""
    numbers = params["dimension_numbers"]
    (batch, channels, *space), (out, in_, *window) = numbers.lhs_spec, numbers.rhs_spec
    data = lax.transpose(data, (batch, *space, channels))
    kernel = lax.transpose(kernel, (*window, in_, out))
    last = len(space) + 1
    dims = lax.ConvDimensionNumbers((0, last, *range(1, last)), (last, last - 1, *range(last - 1)), (0, last, *range(1, last)))
    result = lax.conv_general_dilated(
        data,
        kernel,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        dims,
        params["feature_group_count"],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return lax.transpose(result, [order.index(dim) for dim in range(len(order))])


# -- running it on devices ---------------------------------------------------------------------------------------------


def run(function: CutFunction, operands: Sequence[Any], axes: tuple[str, ...], devices: int, more: Any) -> list[Any]:
    """Compute the function on one of `devices`, inside a `shard_map` over the mesh's `axes`.

    Args:
        operands: its arguments; of those that are cut, the device's logical shards.
        more: a number that is 0, which the compiler does not know: XLA would compile a pass over one logical shard
            otherwise than one over several.

    Returns:
        Its results; of those that are cut, the device's logical shards.
    """
    return _Run(function, axes, devices, more).results(operands)


class _Run:
    def __init__(self, function: CutFunction, axes: tuple[str, ...], devices: int, more: Any) -> None:
        self._function = function
        self._axes = axes
        self._devices = devices
        self._more = more
        self._own = function.shards // devices
        self._first = lax.axis_index(axes) * self._own
        self._whole: dict[int, Any] = {number: jnp.asarray(value) for number, value in function.constants.items()}
        self._pieces: dict[int, Any] = {}  # of cut values, this device's logical shards, stacked

    def results(self, operands: Sequence[Any]) -> list[Any]:
        function = self._function
        for value, operand in zip(function.inputs, operands, strict=True):
            if value in function.dims:
                pieces = _stacked(operand, function.dims[value], self._own)
                if self._own == 1:
                    pieces = lax.concatenate([pieces, pieces], 0)
                self._pieces[value] = pieces
            else:
                self._whole[value] = operand
        used_after = self._used_after()
        for number, operations in enumerate(function.between):
            for operation in operations:
                results = operation.bind(*(self._whole[value] for value in operation.operands))
                self._whole.update(zip(operation.results, results, strict=True))
            if number < len(function.loops):
                self._pass(number, used_after[number])
        return [
            _joined(self._pieces[value][: self._own], function.dims[value]) if value in function.dims else self._whole[value]
            for value in function.outputs
        ]

    def _used_after(self) -> list[set[int]]:
        """For each pass, the cut values that are used after it."""
        function = self._function
        used = {value for value in function.outputs if value in function.dims}
        out = []
        for number in reversed(range(len(function.loops))):
            used |= function.gathered[number].keys()
            out.append(set(used))
            for operation in function.loops[number]:
                used.update(v for v, d in zip(operation.operands, operation.cuts, strict=True) if d is not None)
        return out[::-1]

    def _pass(self, number: int, used_after: set[int]) -> None:
        """Compute the operations of one pass for each of this device's logical shards."""
        function = self._function
        operations = function.loops[number]
        kept = [v for operation in operations for v in operation.results if v in function.dims and v in used_after]
        terms = [(v, op.add) for op in operations if op.add is not None for v in op.results]
        adds = [add for _, add in terms]
        levels = self._own.bit_length()

        def pieces_of(value: int) -> Any:
            aval = function.shapes[value]
            shape = list(aval.shape)
            shape[function.dims[value]] //= function.shards
            return jnp.zeros((max(2, self._own), *shape), aval.dtype)

        stacks = [pieces_of(value) for value in kept]
        sums = [[jnp.zeros(function.shapes[v].shape, function.shapes[v].dtype) for v, _ in terms] for _ in range(levels)]

        def body(i: Any, carry: Any) -> Any:
            stacks, sums = carry
            computed = self._shard(operations, i)
            stacks = [
                lax.dynamic_update_index_in_dim(stack, computed[value], i, 0)
                for stack, value in zip(stacks, kept, strict=True)
            ]
            new = list(lax.optimization_barrier(tuple(computed[value] for value, _ in terms)))
            return stacks, _added(sums, new, adds, i)

        stacks, sums = lax.fori_loop(0, self._own + self._more, body, (stacks, sums))
        self._pieces.update(zip(kept, stacks, strict=True))
        totals = self._over_devices(sums[-1] if terms else [], adds)
        self._whole.update(zip((value for value, _ in terms), totals, strict=True))
        for value, whole in function.gathered[number].items():
            dim = function.dims[value]
            pieces = lax.all_gather(self._pieces[value][: self._own], self._axes, tiled=True)
            self._whole[whole] = _joined(pieces, dim)

    def _shard(self, operations: Sequence[Operation], i: Any) -> dict[int, Any]:
        """Compute `operations` for this device's logical shard `i`."""
        function, env = self._function, dict[int, Any]()
        shard = self._first + i

        def read(value: int, dim: int | None) -> Any:
            if dim is None or value not in function.dims:
                whole = self._whole[value]
                if dim is None:
                    return whole
                size = whole.shape[dim] // function.shards
                return lax.dynamic_slice_in_dim(whole, shard * size, size, dim)
            if value not in env:
                env[value] = lax.dynamic_index_in_dim(self._pieces[value], i, 0, keepdims=False)
            return env[value]

        for operation in operations:
            operands = list(map(read, operation.operands, operation.cuts))
            if operation.draws:
                operands[0] = jax.random.fold_in(operands[0], shard)
            env.update(zip(operation.results, operation.bind(*operands), strict=True))
        return env

    def _over_devices(self, totals: list[Any], adds: Sequence[Callable[[Any, Any], Any]]) -> list[Any]:
        """Add the devices' sums, in the tree of which each device's is a branch."""
        totals = list(lax.optimization_barrier(tuple(totals)))
        distance = 1
        while distance < self._devices:
            pairs = [(i, i ^ distance) for i in range(self._devices)]
            others = [lax.ppermute(total, self._axes, pairs) for total in totals]
            totals = [add(a, b) for add, a, b in zip(adds, totals, others, strict=True)]  # a + b is b + a in all bits
            totals = list(lax.optimization_barrier(tuple(totals)))
            distance *= 2
        return totals


def _added(
    sums: list[list[Any]], terms: list[Any], adds: Sequence[Callable[[Any, Any], Any]], i: Any
) -> list[list[Any]]:
    """Add the terms of logical shard `i` to those before it, in a binary tree. `sums[k]` are the sums of the last
    complete branch of 2^k shards."""
    if not terms:
        return sums
    if len(sums) == 1:
        return [terms]

    def joining(count: int) -> Callable[..., list[list[Any]]]:
        def join(sums: list[list[Any]], terms: list[Any]) -> list[list[Any]]:
            for level in range(count):
                terms = [add(a, b) for add, a, b in zip(adds, sums[level], terms, strict=True)]
            return [*sums[:count], terms, *sums[count + 1 :]]

        return join

    complete = lax.population_count(i ^ (i + 1)) - 1  # how many branches shard i completes: the ones that i ends in
    return lax.switch(complete, [joining(count) for count in range(len(sums))], sums, terms)


def _stacked(array: Any, dim: int, count: int) -> Any:
    """`array`, cut along `dim` into `count` pieces, stacked."""
    shape = array.shape
    pieces = array.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    return jnp.moveaxis(pieces, dim, 0)


def _joined(pieces: Any, dim: int) -> Any:
    """The inverse of `_stacked`."""
    moved = jnp.moveaxis(pieces, 0, dim)
    shape = moved.shape
    return moved.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def cost(function: CutFunction) -> Counter[str]:
    """The bytes of the values that are gathered whole, by the line that needs them so."""
    out: Counter[str] = Counter()
    for whole in itertools.chain.from_iterable(gathered.values() for gathered in function.gathered):
        aval = function.shapes[whole]
        out[function.lines[whole]] += aval.size * aval.dtype.itemsize
    return out
