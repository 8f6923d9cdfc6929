"""A function cut along its batch into logical shards, which computes the same bits on any number of devices.

XLA's partitioner gives each device one piece of the batch, so both the shapes that kernels see and the order in which
sums are taken follow the number of devices, and the last digits do. Here the batch is cut into a fixed number of
*logical shards*, whatever the mesh. Each value of the function is either *whole*, the same on all devices, or *cut*
along one dimension into logical shards. A device computes its logical shards one after another, all with the same
code; where the cut dimension is summed, the shards' sums are added in one binary tree over the logical shards, inside a
device as over devices. What cannot be computed shard by shard is computed from gathered whole values, on each device
alike.

The function is cut by its jaxpr: which dimensions of operands and results belong together is known from
`sharding_rules.py`; whether a primitive can be computed piece by piece along one of them, from `piecewise.py`.
`shard_passes.py` runs the result on a device.
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
from .piecewise import EXACT, SUMS, Along, Params, Request, binder, local_params
from .sharding import Spec
from .sharding_rules import rule_of_equation


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
    equation: Equation | None = None
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


# -- cutting a function ------------------------------------------------------------------------------------------------


class Equation(NamedTuple):
    """An equation on numbered values."""

    eqn: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    line: str

    def along(self, number: int, along: Along, shards: int) -> Request | None:
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
            return Request(eqn, eqn.params, (operand.dim,), (result.dim,), shards, (operand.outer, result.outer))
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
        return Request(eqn, eqn.params, tuple(at), tuple(to), shards, (along.outer, along.outer))


def _regrouped(before: Sequence[int], along: Along, after: Sequence[int], shards: int) -> Along | None:
    """How the dimensions `after` a reshape are cut. In memory, the logical shards follow each other as often as before,
    which must be within one dimension."""
    times = math.prod(before[: along.dim]) * along.outer
    for dim in reversed(range(len(after))):
        outer, rest = divmod(times, math.prod(after[:dim]))
        if not rest and outer and after[dim] and after[dim] % (outer * shards) == 0:
            return Along(dim, outer)
    return None


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
        self.equations: list[Equation] = []
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
                self.equations.append(Equation(eqn, operands, results, at))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _line(self, eqn: Any) -> str:
        name, _, _ = str(eqn.source_info.name_stack).partition("/")
        return self._lines[int(name)] if name.isdecimal() else ""

    def needed(self) -> list[Equation]:
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

    def _forward(self) -> list[Request | None]:
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

    def _request(self, equation: Equation) -> Request | None:
        cut_operands = [n for n, operand in enumerate(equation.operands) if operand in self._dims]
        # The largest first, and what stays cut before what is summed.
        cut_operands.sort(key=lambda n: -self._flat.shapes[equation.operands[n]].size)
        found = []
        for number in cut_operands:
            request = equation.along(number, self._dims[equation.operands[number]], self._shards)
            if request is not None and local_params(request) is not None:
                found.append(request)
        return next((r for r in found if None not in r.to), next(iter(found), None))

    def _gather(self, value: int, line: str) -> None:
        if value not in self._whole:
            whole = self._whole[value] = self._flat.new(self._flat.shapes[value])
            self._lines[whole] = line

    def _backward(self) -> None:
        """Cut what is whole and is only read in logical shards, along one dimension: masks, positions, random draws."""
        read_along: dict[int, set[Along | None]] = {}

        def note(equation: Equation, request: Request | None) -> None:
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

    def _wanted(self, equation: Equation, read: Sequence[set[Along | None] | None]) -> Request | None:
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
            if None in request.to or local_params(request) is None:
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

    def _operation(self, equation: Equation, request: Request | None) -> Iterator[Operation]:
        eqn, operands = equation.eqn, list(equation.operands)
        bind = binder(eqn, None if request is None else local_params(request))
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
            yield Operation(bind, tuple(operands), cuts, equation.results, True, SUMS[name], equation)
        else:  # each logical shard adds to zeros, and the sum is added to what there was
            base, (result,) = operands[0], equation.results
            aval = self._flat.shapes[result]
            zeros, total = self._flat.new(aval), self._flat.new(aval)
            yield Operation(lambda aval=aval: (jnp.zeros(aval.shape, aval.dtype),), (), (), (zeros,), False)
            yield Operation(bind, (zeros, *operands[1:]), cuts, (total,), True, SUMS[name], equation)
            (add,) = jax.make_jaxpr(lax.add)(aval, aval).eqns
            added = Equation(add, (base, total), (result,), equation.line)
            yield Operation(binder(add, None), (base, total), (None, None), (result,), False, None, added)

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


# -- where whole values are kept ---------------------------------------------------------------------------------------


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
    if equation is None or equation.eqn.primitive.name not in EXACT:
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
        changed = local_params(request._replace(params=params))
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
    return operation._replace(bind=binder(equation.eqn, params), specs=ins, out_specs=outs)


# -- what it costs -----------------------------------------------------------------------------------------------------


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
