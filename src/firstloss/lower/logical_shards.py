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
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax import lax
from jax import numpy as jnp

from .jaxprs import called_by
from .sharding_rules import rule_of_equation

Params = dict[str, Any]
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes of the mesh that shard it; (): whole


class Along(NamedTuple):
    """How a value is cut into logical shards.

    Attributes:
        dim: the dimension.
        outer: how often the logical shards follow each other in it: more than once if the batch was not the first of
            the dimensions that were merged to it.
    """

    dim: int
    outer: int = 1


class Operation(NamedTuple):
    """An operation of the cut function, on values by their numbers.

    Attributes:
        bind: computes the results from the operands.
        cuts: for each operand how it is read in logical shards; None: whole.
        results: the numbers of the results.
        is_cut: whether it is computed for each logical shard.
        add: if each logical shard's results are terms of a whole one, how two are added.
        equation: which it is.
        specs, out_specs: if it is computed of weights where they are kept, on each device of its own shards, the
            shardings of its operands and results.
    """

    bind: Callable[..., Sequence[Any]]
    operands: tuple[int, ...]
    cuts: tuple[Along | None, ...]
    results: tuple[int, ...]
    is_cut: bool
    add: Callable[[Any, Any], Any] | None = None
    equation: _Equation | None = None
    specs: tuple[Spec, ...] = ()
    out_specs: tuple[Spec, ...] = ()


class CutFunction(NamedTuple):
    """A function, cut into logical shards.

    Attributes:
        shards: the number of logical shards.
        inputs, outputs: the numbers of its arguments and results.
        dims: for each value that is cut, how.
        shapes: of each value, whole, with its dtype.
        constants: the values that are known.
        loops: the operations of each pass over the logical shards.
        between: the operations on whole values before each pass, and after the last.
        gathered: the cut values that are made whole after each pass, and the numbers of the whole ones.
        lines: for each of the last, the line that needs it whole.
        reduced: the sums over logical shards of which each device keeps only a shard, and how they are sharded.
    """

    shards: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dims: dict[int, Along]
    shapes: list[Any]
    constants: dict[int, Any]
    loops: list[list[Operation]]
    between: list[list[Operation]]
    gathered: list[dict[int, int]]
    lines: dict[int, str]
    reduced: dict[int, Spec]


# -- how a primitive is computed piece by piece ------------------------------------------------------------------------


class _Request(NamedTuple):
    """An equation that is to be cut into `shards` along a factor.

    Attributes:
        params: its parameters, maybe cut along another factor already.
        at, to: for each operand and result the dimension of that factor, or None.
        outer: of the operands and of the results, as in `Along`.
    """

    eqn: Any
    params: Params
    at: tuple[int | None, ...]
    to: tuple[int | None, ...]
    shards: int
    outer: tuple[int, int] = (1, 1)

    @property
    def operands(self) -> tuple[Along | None, ...]:
        """How the operands are cut."""
        return tuple(None if dim is None else Along(dim, self.outer[0]) for dim in self.at)

    @property
    def results(self) -> tuple[Along | None, ...]:
        """How the results are cut."""
        return tuple(None if dim is None else Along(dim, self.outer[1]) for dim in self.to)

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
            dims = request.params[name]
            if request.at[0] in (dims if isinstance(dims, (tuple, list)) else (dims,)):
                return None
        return {}

    return cut


def _new_shape(name: str) -> _Cut:
    """The parameter `name` is the result's shape."""

    def cut(request: _Request) -> Params | None:
        return {name: request.local(request.params[name], request.to[0]), "sharding": None}

    return cut


def _slice(request: _Request) -> Params | None:
    params, (dim, *_) = request.params, request.at
    size = request.eqn.invars[0].aval.shape[dim]
    if params["start_indices"][dim] or params["limit_indices"][dim] != size:
        return None
    if params["strides"] is not None and params["strides"][dim] != 1:
        return None
    return {"limit_indices": request.local(params["limit_indices"], dim)}


def _pad(request: _Request) -> Params | None:
    (dim, *_) = request.at
    return {} if dim is not None and request.params["padding_config"][dim] == (0, 0, 0) else None


def _dynamic_slice(request: _Request) -> Params | None:
    dim, sizes = request.at[0], request.params["slice_sizes"]
    if dim is None or sizes[dim] != request.eqn.invars[0].aval.shape[dim]:
        return None
    return {"slice_sizes": request.local(sizes, dim)}


def _dynamic_update_slice(request: _Request) -> Params | None:
    base, update = request.at[:2]
    shapes = [atom.aval.shape for atom in request.eqn.invars[:2]]
    return {} if base is not None and base == update and shapes[0][base] == shapes[1][base] else None


def _batched(count: Callable[[Params], int]) -> _Cut:
    """Along all dimensions but so many last ones."""

    def cut(request: _Request) -> Params | None:
        last = [atom.aval.ndim - count(request.params) for atom in request.eqn.invars]
        dims = zip(request.at, last, strict=True)
        return {} if all(dim is not None and dim < end for dim, end in dims) else None

    return cut


def _top_k(request: _Request) -> Params | None:
    return {} if request.at[0] != request.eqn.invars[0].aval.ndim - 1 else None


def _window(request: _Request) -> Params | None:
    """Windows over other dimensions."""
    params, dim = request.params, request.at[0]
    if dim is None:
        return None
    sizes = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    return {} if all(tuple(params[n])[dim] == one for n, one in sizes.items() if n in params) else None


def _gather(request: _Request) -> Params | None:
    params = request.params
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
    batching = base in request.params["dimension_numbers"].operand_batching_dims
    return {} if updates is not None and (indices is not None) == batching else None


def _convolution(request: _Request) -> Params | None:
    params, numbers = request.params, request.params["dimension_numbers"]
    if request.to[0] is None:
        of_channels = request.at == (numbers.lhs_spec[1], numbers.rhs_spec[1])  # which are summed
        return {} if of_channels and params["feature_group_count"] == 1 else None
    is_batch = request.at[0] == numbers.lhs_spec[0] and request.at[1] is None
    return {} if is_batch and params["batch_group_count"] == 1 else None


def _split(request: _Request) -> Params | None:
    return {} if request.at[0] != request.params["axis"] else None


def _random_bits(request: _Request) -> Params | None:
    return {"shape": request.local(request.params["shape"], request.to[0])}


def _iota(request: _Request) -> Params | None:
    params = request.params
    if request.to[0] == params["dimension"]:
        return None
    return {"shape": request.local(params["shape"], request.to[0]), "sharding": None}


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul
    ne neg nextafter not optimization_barrier or polygamma population_count pow random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
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
    **dict.fromkeys(("cholesky", "triangular_solve"), _batched(lambda params: 2)),
    "fft": _batched(lambda params: len(params["fft_lengths"])),
    "random_bits": _random_bits,
}

# Those with results that have dimensions which no operand has.
_MAKERS = {"broadcast_in_dim", "iota", "random_bits"}

# Those with the same bits whatever the shape of the shard, since they are rounded once, element by element, or not at
# all. (In which order XLA sums a shard, and how it computes an exponential of it, depends on the shard's shape.)
_EXACT = set(
    """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type copy
    copy_p div eq floor ge gt integer_pow iota is_finite le lt max min mul ne neg not optimization_barrier or pad
    reduce_precision reshape rev round select_n shift_left shift_right_arithmetic shift_right_logical sign slice
    split sqrt square squeeze stack stop_gradient sub transpose unstack xor
    """.split()
)
_PRODUCTS = {"mul", "square", "integer_pow", "div"}  # a quotient may be computed as a product

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

    def along(self, number: int, along: Along, shards: int) -> _Request | None:
        """It, to be cut as operand `number` is cut, or, from -1 downwards, a result; None if it cannot be."""
        eqn = self.eqn
        if eqn.primitive.name == "reshape":
            (before,), (after,) = eqn.invars, eqn.outvars
            order = eqn.params["dimensions"] or range(before.aval.ndim)
            permuted = [before.aval.shape[dim] for dim in order]
            operand, result = along, along
            if number >= 0:
                moved = Along(list(order).index(along.dim), along.outer)
                found = _regrouped(permuted, moved, after.aval.shape, shards)
                result = found or along
            else:
                found = _regrouped(after.aval.shape, along, permuted, shards)
                operand = Along(order[found.dim], found.outer) if found else along
            if found is None:
                return None
            return _Request(eqn, eqn.params, (operand.dim,), (result.dim,), shards, (operand.outer, result.outer))
        rule = rule_of_equation(eqn)
        dims = rule.operands[number] if number >= 0 else rule.results[-number - 1]
        factor = dims[along.dim]
        if any(dims.count(factor) > 1 for dims in (*rule.operands, *rule.results)):
            return None
        at, to = ([dims.index(factor) if factor in dims else None for dims in side] for side in rule)
        atoms = (*zip(eqn.invars, at, strict=True), *zip(eqn.outvars, to, strict=True))
        if len({atom.aval.shape[dim] for atom, dim in atoms if dim is not None} | {0}) > 2:
            return None  # a slice, for example
        if any(dim is not None and atom.aval.shape[dim] % (along.outer * shards) for atom, dim in atoms):
            return None
        return _Request(eqn, eqn.params, tuple(at), tuple(to), shards, (along.outer, along.outer))


def _regrouped(before: Sequence[int], along: Along, after: Sequence[int], shards: int) -> Along | None:
    """How the dimensions `after` a reshape are cut. In memory, the logical shards follow each other as often as before,
    which must be within one dimension."""
    times = math.prod(before[: along.dim]) * along.outer
    for dim in reversed(range(len(after))):
        outer, rest = divmod(times, math.prod(after[:dim]))
        if not rest and outer and after[dim] and after[dim] % (outer * shards) == 0:
            return Along(dim, outer)
    return None


def _params(request: _Request) -> Params | None:
    """The parameters that change for one logical shard; None if it cannot be cut so."""
    name = request.eqn.primitive.name
    if name not in _CUTS or name not in _SUMS and None in request.to:
        return None
    if name not in _MAKERS and all(dim is None for dim in request.at):
        return None
    return _CUTS[name](request)


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
        self._dims = {n: Along(dim) for n, dim in zip(flat.inputs, inputs_cut, strict=True) if dim is not None}
        self._whole: dict[int, int] = {}  # of cut values that are read whole, the whole ones
        self._lines: dict[int, str] = {}
        self._equations = flat.needed()
        self._requests = self._forward()
        for output in flat.outputs:
            if output in self._dims and self._dims[output].outer > 1:
                self._gather(output, "")
        self._backward()

    # -- which values are cut --

    def _forward(self) -> list[_Request | None]:
        """Cut what is computed from cut values, where it can be."""
        requests = []
        for equation in self._equations:
            request = self._request(equation)
            requests.append(request)
            if request is not None:
                self._dims.update((v, d) for v, d in zip(equation.results, request.results, strict=True) if d)
            for number, operand in enumerate(equation.operands):
                if operand in self._dims and (request is None or request.operands[number] != self._dims[operand]):
                    self._gather(operand, equation.line)
        return requests

    def _request(self, equation: _Equation) -> _Request | None:
        cut_operands = [n for n, operand in enumerate(equation.operands) if operand in self._dims]
        # The largest first, and what stays cut before what is summed.
        cut_operands.sort(key=lambda n: -self._flat.shapes[equation.operands[n]].size)
        found = []
        for number in cut_operands:
            request = equation.along(number, self._dims[equation.operands[number]], self._shards)
            if request is not None and _params(request) is not None:
                found.append(request)
        return next((r for r in found if None not in r.to), next(iter(found), None))

    def _gather(self, value: int, line: str) -> None:
        if value not in self._whole:
            whole = self._whole[value] = self._flat.new(self._flat.shapes[value])
            self._lines[whole] = line

    def _backward(self) -> None:
        """Cut what is whole and is only read in logical shards, along one dimension: masks, positions, random draws."""
        read_along: dict[int, set[Along | None]] = {}

        def note(equation: _Equation, request: _Request | None) -> None:
            at = (None,) * len(equation.operands) if request is None else request.operands
            for operand, dim in zip(equation.operands, at, strict=True):
                read_along.setdefault(operand, set()).add(dim)

        for output in self._flat.outputs:
            read_along.setdefault(output, set()).add(None)
        for n in reversed(range(len(self._equations))):
            equation = self._equations[n]
            if self._requests[n] is None and not any(operand in self._dims for operand in equation.operands):
                self._requests[n] = self._wanted(equation, [read_along.get(v) for v in equation.results])
            note(equation, self._requests[n])

    def _wanted(self, equation: _Equation, read: Sequence[set[Along | None] | None]) -> _Request | None:
        for number, dims in enumerate(read):
            if dims is None:
                continue
            if len(dims) != 1 or None in dims:
                return None
            (dim,) = dims
            assert dim is not None
            request = equation.along(-number - 1, dim, self._shards)
            if request is None or any(d is not None and {t} != d for t, d in zip(request.results, read, strict=True)):
                return None
            if None in request.to or _params(request) is None:
                return None
            self._dims.update((v, d) for v, d in zip(equation.results, request.results, strict=True) if d)
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
            tuple(self._whole[v] if v in self._dims and self._dims[v].outer > 1 else v for v in self._flat.outputs),
            self._dims,
            self._flat.shapes,
            self._flat.constants,
            [[] for _ in range(count + 1)],
            [[] for _ in range(count + 2)],
            [{} for _ in range(count + 1)],
            self._lines,
            {},
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
                    yield Operation(_nothing, (value,), (self._dims[value],), (whole,), True)

        yield from gathered(self._flat.inputs)
        for equation, request in zip(self._equations, self._requests, strict=True):
            yield from self._operation(equation, request)
            yield from gathered(equation.results)

    def _operation(self, equation: _Equation, request: _Request | None) -> Iterator[Operation]:
        eqn, operands = equation.eqn, list(equation.operands)
        bind = _binder(eqn, None if request is None else _params(request))
        cuts: tuple[Along | None, ...] = (None,) * len(operands) if request is None else request.operands
        for n, operand in enumerate(operands):
            if operand in self._dims and self._dims[operand] != cuts[n]:
                operands[n] = self._whole[operand]
        if request is None:
            yield Operation(bind, tuple(operands), cuts, equation.results, False, None, equation)
            return
        name = eqn.primitive.name
        if None not in request.to:
            yield Operation(bind, tuple(operands), cuts, equation.results, True, None, equation)
        elif not name.startswith("scatter"):
            yield Operation(bind, tuple(operands), cuts, equation.results, True, _SUMS[name], equation)
        else:  # each logical shard adds to zeros, and the sum is added to what there was
            base, (result,) = operands[0], equation.results
            aval = self._flat.shapes[result]
            zeros, total = self._flat.new(aval), self._flat.new(aval)
            yield Operation(lambda aval=aval: (jnp.zeros(aval.shape, aval.dtype),), (), (), (zeros,), False)
            yield Operation(bind, (zeros, *operands[1:]), cuts, (total,), True, _SUMS[name], equation)
            (add,) = jax.make_jaxpr(lax.add)(aval, aval).eqns
            added = _Equation(add, (base, total), (result,), equation.line)
            yield Operation(_binder(add, None), (base, total), (None, None), (result,), False, None, added)

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
    dims = lax.ConvDimensionNumbers(
        (0, last, *range(1, last)), (last, last - 1, *range(last - 1)), (0, last, *range(1, last))
    )
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


# -- where whole values are kept -----------------------------------------------------------------------------------


def place(
    function: CutFunction, inputs: Sequence[Spec], outputs: Sequence[Spec], axes: Mapping[str, int]
) -> CutFunction:
    """Compute what follows from weights alone, as an optimizer's update does, on each device for the shards of the
    weights that it keeps.

    Args:
        inputs, outputs: how the arguments and results are sharded over the mesh; `()` for those that are whole or cut.
        axes: the sizes of the mesh's axes.
    """
    placed = {value: spec for value, spec in zip(function.inputs, inputs, strict=True) if any(spec)}
    operations = [operation for operations in function.between for operation in operations]
    placements: list[Operation | None] = []
    for operation in operations:
        found = _placed(operation, placed, False, axes)
        placements.append(found)
        if found is not None:
            placed.update(zip(found.results, found.out_specs, strict=True))
    read: dict[int, set[Spec]] = {}  # for each whole value, how it is read
    for value, spec in zip(function.outputs, outputs, strict=True):
        read.setdefault(value, set()).add(spec)
    for operation in itertools.chain.from_iterable(function.loops):
        for value in operation.operands:
            read.setdefault(value, set()).add(())
    for n in reversed(range(len(operations))):
        found, operation = placements[n], operations[n]
        if found is None:
            wanted = {value: next(iter(read[value])) for value in operation.results if len(read.get(value, ())) == 1}
            if len(wanted) == len(operation.results):
                found = placements[n] = _placed(operation, wanted, True, axes)
        for number, value in enumerate(operation.operands):
            read.setdefault(value, set()).add(() if found is None else found.specs[number])
    sums = {v for loop in function.loops for operation in loop if operation.add is not None for v in operation.results}
    reduced = {value: next(iter(read[value])) for value in sums if len(read.get(value, ())) == 1}
    done = iter(operation if found is None else found for operation, found in zip(operations, placements, strict=True))
    between = [[next(done) for _ in group] for group in function.between]
    return function._replace(between=between, reduced={value: spec for value, spec in reduced.items() if any(spec)})


def _placed(
    operation: Operation, specs: Mapping[int, Spec], of_results: bool, axes: Mapping[str, int]
) -> Operation | None:
    """An operation as it is computed for shards, given the shardings of some operands, or of all results; None if it
    cannot be."""
    equation = operation.equation
    if equation is None or equation.eqn.primitive.name not in _EXACT:
        return None
    atoms = operation.results if of_results else operation.operands
    shapes = [atom.aval.shape for atom in (equation.eqn.outvars if of_results else equation.eqn.invars)]
    known = [n for n, value in enumerate(atoms) if any(specs.get(value, ()))]
    if not known:
        return None
    first = max(known, key=lambda n: math.prod(shapes[n]))
    spec = specs[atoms[first]]
    params: Params = equation.eqn.params
    operand_specs: list[list[tuple[str, ...]]] = [[()] * len(atom.aval.shape) for atom in equation.eqn.invars]
    result_specs: list[list[tuple[str, ...]]] = [[()] * len(atom.aval.shape) for atom in equation.eqn.outvars]
    for dim, names in enumerate(spec):
        if not names:
            continue
        shards = math.prod(axes[name] for name in names)
        request = equation.along(-first - 1 if of_results else first, Along(dim), shards)
        if request is None or None in request.to or request.outer != (1, 1):
            return None
        changed = _params(request._replace(params=params))
        if changed is None:
            return None
        params = {**params, **changed}
        for found, sides in ((request.at, operand_specs), (request.to, result_specs)):
            for side, position in zip(sides, found, strict=True):
                if position is not None:
                    side[position] = names
    ins, outs = tuple(map(tuple, operand_specs)), tuple(map(tuple, result_specs))
    if of_results and any(specs[value] != out for value, out in zip(operation.results, outs, strict=True)):
        return None
    return operation._replace(bind=_binder(equation.eqn, params), specs=ins, out_specs=outs)


# -- running it on devices ---------------------------------------------------------------------------------------------


def run(
    function: CutFunction,
    operands: Sequence[Any],
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    axes: Mapping[str, int],
    more: Any,
) -> list[Any]:
    """Compute the function on one device of a mesh, inside a `shard_map` over all its axes.

    Args:
        operands: its arguments; of those that are cut, the device's logical shards.
        inputs, outputs: as in `place`.
        axes: the sizes of the mesh's axes.
        more: a number that is 0, which the compiler does not know: XLA would compile a pass over one logical shard
            otherwise than one over several.

    Returns:
        Its results; of those that are cut, the device's logical shards.
    """
    return _Run(function, axes, more).results(operands, inputs, outputs)


class _Run:
    def __init__(self, function: CutFunction, axes: Mapping[str, int], more: Any) -> None:
        self._function = function
        self._sizes = axes
        self._axes = tuple(axes)
        self._more = jnp.asarray(more)
        self._devices = math.prod(axes.values())
        self._own = function.shards // self._devices
        self._whole: dict[int, Any] = {number: jnp.asarray(value) for number, value in function.constants.items()}
        self._kept: dict[
            int, tuple[Spec, Any]
        ] = {}  # of values that are sharded, the shardings and this device's shards
        self._batch: dict[int, Any] = {}  # of arguments that are cut, all logical shards, stacked
        self._pieces: dict[int, Any] = {}  # of other cut values, this device's logical shards, stacked

    def results(self, operands: Sequence[Any], inputs: Sequence[Spec], outputs: Sequence[Spec]) -> list[Any]:
        function = self._function
        for value, operand, spec in zip(function.inputs, operands, inputs, strict=True):
            if value in function.dims:
                pieces = _stacked(operand, function.dims[value], self._own)
                self._batch[value] = self._gathered(pieces, 0, self._axes)
            else:
                self._keep(value, spec, operand)
        used_after = self._used_after()
        for number, operations in enumerate(function.between):
            for operation in operations:
                specs = operation.specs or ((),) * len(operation.operands)
                results = operation.bind(*map(self._shard_of, operation.operands, specs))
                name = "" if operation.equation is None else operation.equation.eqn.primitive.name
                if name not in _EXACT or name in _PRODUCTS:
                    results = list(map(self._rounded, results))
                for value, result, spec in zip(
                    operation.results, results, operation.out_specs or [()] * len(results), strict=True
                ):
                    self._keep(value, spec, result)
            if number < len(function.loops):
                self._pass(number, used_after[number])
        return [
            self._own_rows(value) if value in function.dims else self._shard_of(value, spec)
            for value, spec in zip(function.outputs, outputs, strict=True)
        ]

    def _gathered(self, array: Any, dim: int, axes: tuple[str, ...]) -> Any:
        """The devices' arrays, concatenated along `dim`."""
        count = math.prod(self._sizes[name] for name in axes)
        return lax.all_gather(array, axes, axis=dim, tiled=True) if count > 1 else array

    def _all_pieces(self, value: int) -> Any:
        """All logical shards of a cut value, stacked."""
        if value in self._batch:
            return self._batch[value]
        pieces = self._pieces[value][: self._own]
        by_device = self._gathered(pieces, 0, self._axes).reshape(self._devices, self._own, *pieces.shape[1:])
        return jnp.swapaxes(by_device, 0, 1).reshape(self._function.shards, *pieces.shape[1:])

    def _own_rows(self, value: int) -> Any:
        """This device's part of a cut value, which begins with the rows after those of the device before."""
        pieces = self._all_pieces(value)
        own = lax.dynamic_slice_in_dim(pieces, lax.axis_index(self._axes) * self._own, self._own)
        return _joined(own, self._function.dims[value])

    def _keep(self, value: int, spec: Spec, array: Any) -> None:
        if any(spec):
            self._kept[value] = spec, array
        else:
            self._whole[value] = array

    def _shard_of(self, value: int, spec: Spec) -> Any:
        """This device's shard of a whole value."""
        if value in self._kept and self._kept[value][0] == spec:
            return self._kept[value][1]
        array = self._whole_of(value)
        for dim, names in enumerate(spec):
            if names:
                size = array.shape[dim] // math.prod(self._sizes[name] for name in names)
                array = lax.dynamic_slice_in_dim(array, lax.axis_index(names) * size, size, dim)
        return self._apart(array) if any(spec) else array

    def _whole_of(self, value: int) -> Any:
        if value not in self._whole:
            self._whole[value] = self._apart(self._gathered_shards(*self._kept[value]))
        return self._whole[value]

    def _gathered_shards(self, spec: Spec, array: Any) -> Any:
        for dim, names in enumerate(spec):
            if names:
                array = self._gathered(array, dim, names)
        return array

    def _apart(self, array: Any) -> Any:
        """`array`, compiled apart from what is before it: what one logical shard computes is compiled alike on any
        mesh, wherever its operands come from. The compiler does not know which branch is taken."""
        if not array.ndim or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return array
        return lax.cond(self._more == 0, lambda array: array, jnp.zeros_like, array)

    def _rounded(self, result: Any) -> Any:
        """A result, as it is after its last rounding. A processor can add a product that is not rounded yet; whether
        the compiler lets it, and which product of `a * b + c * d`, depends on shapes and on what is computed where,
        which are others on each mesh. It does not add what it does not know to be a product."""
        if not jnp.issubdtype(result.dtype, jnp.floating):
            return result
        word = jnp.dtype(f"int{8 * result.dtype.itemsize}")
        bits = lax.bitcast_convert_type(result, word)
        return lax.bitcast_convert_type(bits ^ self._more.astype(word), result.dtype)

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
        levels = max(1, self._own.bit_length() - 1)

        def pieces_of(value: int) -> Any:
            aval = function.shapes[value]
            shape = list(aval.shape)
            shape[function.dims[value].dim] //= function.shards
            return jnp.zeros((max(2, self._own), *shape), aval.dtype)

        specs = [function.reduced.get(value, ()) for value, _ in terms]

        def zeros(value: int, spec: Spec) -> Any:
            aval = function.shapes[value]
            return jnp.zeros(self._shard_shape(aval.shape, spec), aval.dtype)

        stacks = [pieces_of(value) for value in kept]
        sums = [[zeros(value, spec) for (value, _), spec in zip(terms, specs, strict=True)] for _ in range(levels)]

        def body(i: Any, carry: Any) -> Any:
            stacks, sums = carry
            computed = self._shard(operations, i)
            stacks = [
                lax.dynamic_update_index_in_dim(stack, computed[value], i, 0)
                for stack, value in zip(stacks, kept, strict=True)
            ]
            new = self._over_devices([self._apart(computed[value]) for value, _ in terms], adds, specs)
            return stacks, _added(sums, new, adds, i, self._own)

        stacks, sums = lax.fori_loop(0, self._own + self._more, body, (stacks, sums))
        self._pieces.update(zip(kept, stacks, strict=True))
        for (value, _), spec, total in zip(terms, specs, sums[0] if terms else (), strict=True):
            self._keep(value, spec, total)
        for value, whole in function.gathered[number].items():
            self._whole[whole] = self._apart(_joined(self._all_pieces(value), function.dims[value]))

    def _shard_shape(self, shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
        """The shape of a device's shard of a whole value."""
        ways = [math.prod(self._sizes[name] for name in names) for names in spec or [()] * len(shape)]
        return tuple(size // n for size, n in zip(shape, ways, strict=True))

    def _shard(self, operations: Sequence[Operation], i: Any) -> dict[int, Any]:
        """Compute `operations` for this device's logical shard `i`."""
        function, env = self._function, dict[int, Any]()
        shard = i * self._devices + lax.axis_index(self._axes)

        def whole_of(value: int) -> Any:
            if value in self._whole:
                return self._whole[value]
            # Gathered for each operation that reads it, not to be kept from the forward pass to the backward pass; and
            # in the pass, not to be kept from one logical shard to the next.
            spec, array = self._kept[value]
            return self._gathered_shards(spec, lax.optimization_barrier((array, i))[0])

        def read(value: int, along: Along | None) -> Any:
            if along is None or value not in function.dims:
                whole = whole_of(value)
                if along is None:
                    return self._apart(whole)
                pieces = _opened(whole, along, function.shards)
                piece = lax.dynamic_slice_in_dim(pieces, shard, 1, along.dim + 1)
                return self._apart(_closed(piece, along))
            if value not in env:
                pieces, at = (self._batch[value], shard) if value in self._batch else (self._pieces[value], i)
                env[value] = self._apart(lax.dynamic_index_in_dim(pieces, at, 0, keepdims=False))
            return env[value]

        for operation in operations:
            operands = list(map(read, operation.operands, operation.cuts))
            equation = operation.equation
            if equation is not None and equation.eqn.primitive.name == "random_bits":  # another key for each
                operands[0] = jax.random.fold_in(operands[0], shard)
            env.update(zip(operation.results, operation.bind(*operands), strict=True))
        return env

    def _over_devices(
        self, totals: list[Any], adds: Sequence[Callable[[Any, Any], Any]], specs: Sequence[Spec]
    ) -> list[Any]:
        """Add the devices' sums in a binary tree of which each device's is a branch; of those that are sharded, each
        device exchanges only the half with its shard."""
        totals = list(lax.optimization_barrier(tuple(totals)))
        shapes = [total.shape for total in totals]
        totals = [total.reshape(self._halved(total.shape, spec)) for total, spec in zip(totals, specs, strict=True)]
        distance = 1
        for axis in reversed(self._axes):
            for bit in range(self._sizes[axis].bit_length() - 1):
                own = (lax.axis_index(axis) >> bit) & 1
                pairs = [(i, i ^ distance) for i in range(self._devices)]
                for n, (add, spec) in enumerate(zip(adds, specs, strict=True)):
                    kept = sent = totals[n]
                    if (place := self._place_of(axis, bit, spec, shapes[n])) is not None:
                        kept, sent = (lax.dynamic_slice_in_dim(kept, k, 1, place) for k in (own, 1 - own))
                    # In all bits, a + b is b + a.
                    totals[n] = add(kept, lax.ppermute(sent, self._axes, pairs))
                totals = list(lax.optimization_barrier(tuple(totals)))
                distance *= 2
        return [
            total.reshape(self._shard_shape(shape, spec))
            for total, shape, spec in zip(totals, shapes, specs, strict=True)
        ]

    def _halved(self, shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
        """The shape with a dimension of 2 for each bit of a shard's number, before the dimension that is sharded."""
        out: list[int] = []
        for dim, size in enumerate(shape):
            bits = [2] * sum(self._sizes[name].bit_length() - 1 for name in spec[dim]) if any(spec) else []
            out += [*bits, size >> len(bits)]
        return tuple(out)

    def _place_of(self, axis: str, bit: int, spec: Spec, shape: Sequence[int]) -> int | None:
        """The dimension of `_halved` that a bit of the device's place on an axis decides; None if it does not."""
        place = 0
        for dim in range(len(shape) if any(spec) else 0):
            for name in spec[dim]:
                bits = self._sizes[name].bit_length() - 1
                if name == axis:
                    return place + bits - 1 - bit
                place += bits
            place += 1
        return None


def _added(
    sums: list[list[Any]], terms: list[Any], adds: Sequence[Callable[[Any, Any], Any]], i: Any, count: int
) -> list[list[Any]]:
    """Add the terms of logical shard `i` to those before it, in a binary tree of `count` shards. `sums[k]` are the sums
    of the last complete branch of 2^k shards; in the end, `sums[0]` are those of all."""
    if not terms:
        return sums
    if count == 1:
        return [terms]

    def joining(levels: int) -> Callable[..., list[list[Any]]]:
        place = levels % len(sums)  # the whole tree takes the place of its first branch, which is no longer needed

        def join(sums: list[list[Any]], terms: list[Any]) -> list[list[Any]]:
            for level in range(levels):
                terms = [add(a, b) for add, a, b in zip(adds, sums[level], terms, strict=True)]
            return [*sums[:place], terms, *sums[place + 1 :]]

        return join

    complete = lax.population_count(i ^ (i + 1)) - 1  # how many branches shard i completes: the ones that i ends in
    return lax.switch(complete, [joining(levels) for levels in range(len(sums) + 1)], sums, terms)


def _opened(array: Any, along: Along, count: int) -> Any:
    """`array`, its cut dimension replaced by three: how often, of `count` logical shards, and the rest."""
    shape, (dim, outer) = array.shape, along
    return array.reshape(*shape[:dim], outer, count, shape[dim] // (outer * count), *shape[dim + 1 :])


def _closed(array: Any, along: Along) -> Any:
    """The inverse of `_opened`."""
    shape, dim = array.shape, along.dim
    return array.reshape(*shape[:dim], math.prod(shape[dim : dim + 3]), *shape[dim + 3 :])


def _stacked(array: Any, along: Along, count: int) -> Any:
    """`array`, cut into `count` logical shards, stacked."""
    pieces = jnp.moveaxis(_opened(array, along, count), along.dim + 1, 0)
    shape, dim = pieces.shape, along.dim + 1
    return pieces.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _joined(pieces: Any, along: Along) -> Any:
    """The inverse of `_stacked`."""
    shape, (dim, outer) = pieces.shape[1:], along
    opened = pieces.reshape(len(pieces), *shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
    return _closed(jnp.moveaxis(opened, 0, dim + 1), along)


class Cost(NamedTuple):
    """What a device does for a placed function because it is computed by logical shards.

    Attributes:
        passes: over its logical shards.
        sent: bytes that it sends.
        gathered: bytes of cut values that are gathered whole, by the lines that need them so.
    """

    passes: int
    sent: float
    gathered: dict[str, int]


def cost(function: CutFunction, inputs: Sequence[Spec], axes: Mapping[str, int]) -> Cost:
    """The cost of a function that `place` has returned; `inputs` and `axes` as there."""
    devices = math.prod(axes.values())
    specs = {**dict(zip(function.inputs, inputs, strict=True)), **function.reduced}
    sent, gathered = 0.0, Counter[str]()

    def size(value: int) -> int:
        return function.shapes[value].size * function.shapes[value].dtype.itemsize

    def ways(spec: Spec) -> int:
        return math.prod(axes[name] for names in spec for name in names)

    def gathers(operation: Operation) -> float:
        read = operation.specs or ((),) * len(operation.operands)
        moved = (v for v, spec in zip(operation.operands, read, strict=True) if specs.get(v, spec) != spec)
        return sum(size(v) * (1 - 1 / ways(specs[v])) for v in moved if v not in function.dims)

    for operation in itertools.chain.from_iterable(function.between):
        sent += gathers(operation)
        specs.update(zip(operation.results, operation.out_specs, strict=False))
    for operation in itertools.chain.from_iterable(function.loops):
        exchanged = 0.0
        for value in operation.results if operation.add is not None else ():
            n = ways(specs.get(value, ()))
            exchanged += size(value) * ((1 - 1 / n) + math.log2(devices / n) / n)
        sent += (gathers(operation) + exchanged) * function.shards / devices
    for whole in itertools.chain.from_iterable(values.values() for values in function.gathered):
        sent += size(whole) * (1 - 1 / devices)
        gathered[function.lines[whole]] += size(whole)
    return Cost(len(function.loops), sent, dict(gathered))
