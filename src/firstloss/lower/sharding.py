"""Where what a Program computes lies on a mesh, found from where its inputs lie.

XLA's partitioner finds shardings for all of a function at once. Where a Program is cut into segments, those of the
arrays that cross a cut have to be said before; they are found here, operation by operation: a result's dimension lies
as the operands' dimensions from which it comes. Which these are is read from the operation's jaxpr. What is found
decides what is sent between devices, never what is computed: inside a segment XLA does as it likes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from ..program.graph import Value
from .dtypes import to_jax
from .program import Call, Template, View
from .segments import Segment

Axes = Mapping[str, int]  # sizes of a mesh's axes
Spec = tuple[tuple[str, ...], ...]  # for each dimension the axes that cut it
Dims = tuple[int, ...]  # for each dimension a number: those of one number are cut alike


class Placed(NamedTuple):
    """Where an array lies, and whether the batch is among what it is computed from.

    Where a weight and an activation are both cut over one axis (FSDP), their product lies as the activation does, and
    the weight is gathered.
    """

    spec: Spec
    of_batch: bool = False


class Alike(NamedTuple):
    """Which dimensions of an operation's operands and results are cut alike."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]


def propagate(
    segments: Sequence[Segment], given: Mapping[Value, Placed], wanted: Mapping[Value, Spec], axes: Axes
) -> dict[Value, Placed]:
    """How to cut each array that crosses from one of `segments` to another, or leaves them.

    Forward, from the inputs to what is computed of them; then back from what is `wanted` and from the other operands
    of those that read it: so a gradient, a sum over the batch, lies as its weight does. All of it twice. Segments that
    are alike and whose arrays lie alike are looked at once.

    Args:
        given: the inputs.
        wanted: what the results are to be; they will be.
    """
    like = {segment.function: segment for segment in reversed(segments)}
    look = functools.cache(lambda number, ins, outs, back: _look(like[number], ins, outs, back, axes))
    found: dict[Value, Placed] = {**given, **{value: Placed(spec) for value, spec in wanted.items()}}
    for back in (False, True, False, True):
        for segment in reversed(segments) if back else segments:
            ins = tuple(_known(found, value) for value in segment.inputs)
            outs = tuple(_known(found, value) for value in segment.outputs)
            crossing = (*segment.inputs, *segment.outputs)
            for value, placed in zip(crossing, look(segment.function, ins, outs, back), strict=True):
                if isinstance(value, Value) and value not in given:
                    found[value] = Placed(wanted[value], placed.of_batch) if value in wanted else placed
    return found


def within(segment: Segment, known: Mapping[Value, Placed], axes: Axes) -> dict[Value, Placed]:
    """Where all lies that a segment's calls read and make, given where what crosses its edges does."""
    found = dict(known)
    for call in segment.calls:
        _forward(call, found, axes)
    for call in reversed(segment.calls):
        _back(call, found, axes)
    return {**found, **known}


def _known(found: Mapping[Value, Placed], value: Value | int) -> Placed:
    if isinstance(value, int):  # the number of a draw
        return Placed(())
    return found.get(value) or Placed(((),) * len(value.shape))


def _look(
    segment: Segment, ins: Sequence[Placed], outs: Sequence[Placed], back: bool, axes: Axes
) -> tuple[Placed, ...]:
    """Where what a segment takes and gives lies: cut further than now, if what is inside says so."""
    crossing = (*segment.inputs, *segment.outputs)
    found = {v: placed for v, placed in zip(crossing, (*ins, *outs), strict=True) if isinstance(v, Value)}
    for call in segment.calls:
        _forward(call, found, axes)
    for call in reversed(segment.calls) if back else ():
        _back(call, found, axes)
    return tuple(_known(found, value) for value in crossing)


def _forward(call: Call, found: dict[Value, Placed], axes: Axes) -> None:
    operands = [_known(found, value) for value in call.inputs]
    alike = _alike_of(call)
    # What is of the batch is asked first, then what is larger.
    order = sorted(range(len(operands)), key=lambda i: (not operands[i].of_batch, -call.inputs[i].numel))
    asked = [(n, cut) for i in order for n, cut in zip(alike.operands[i], operands[i].spec, strict=True) if cut]
    of_batch = any(operand.of_batch for operand in operands)
    for value, dims in zip(call.outputs, alike.results, strict=True):
        spec = _known(found, value).spec
        for number, cut in asked:
            if number in dims:
                spec = _cut(spec, dims.index(number), cut, value.shape, axes)
        found[value] = Placed(spec, of_batch)


def _back(call: Call, found: dict[Value, Placed], axes: Axes) -> None:
    alike = _alike_of(call)
    asked: dict[int, tuple[str, ...]] = {}
    known = (*zip(call.outputs, alike.results, strict=True), *zip(call.inputs, alike.operands, strict=True))
    for value, dims in known:
        for number, cut in zip(dims, _known(found, value).spec, strict=True):
            if cut:
                asked.setdefault(number, cut)
    for value, dims in zip(call.inputs, alike.operands, strict=True):
        placed = _known(found, value)
        spec = placed.spec
        for dim, number in enumerate(dims):
            if number in asked:
                spec = _cut(spec, dim, asked[number], value.shape, axes)
        found[value] = placed._replace(spec=spec)


def _cut(spec: Spec, dim: int, cut: tuple[str, ...], shape: Sequence[int], axes: Axes) -> Spec:
    """`spec` with dimension `dim` cut over `cut`, if nothing cuts it yet, as far as that divides it and nothing else is
    cut over the same axes."""
    if spec[dim]:
        return spec
    used = {axis for other in spec for axis in other}
    left: tuple[str, ...] = ()
    for axis in cut:
        if axis not in used and shape[dim] and shape[dim] % math.prod(axes[a] for a in (*left, axis)) == 0:
            left += (axis,)
    return (*spec[:dim], left, *spec[dim + 1 :])


# -- which dimensions are cut alike ----------------------------------------------------------------------------------


def _alike_of(call: Call) -> Alike:
    shapes = tuple((tuple(value.shape), value.dtype) for value in call.inputs)
    found = _alike.get((call.kind, shapes))
    if found is None:
        alike = dims_of(jaxpr_of(call))
        found = _alike[call.kind, shapes] = Alike(alike.operands[1:], alike.results)
        if len(_alike) > _MOST:
            del _alike[next(iter(_alike))]
    return found


def jaxpr_of(call: Call) -> jex.Jaxpr:
    """What a call computes; its first input is the step's random key."""
    arrays = [jax.ShapeDtypeStruct(tuple(value.shape), to_jax(value.dtype)) for value in call.inputs]
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.enable_x64(True):
        return jax.make_jaxpr(lambda key, *operands: tuple(call.run(operands, key)))(key, *arrays).jaxpr


_alike: dict[tuple[Template | View, tuple], Alike] = {}
_MOST = 8192


def dims_of(jaxpr: jex.Jaxpr) -> Alike:
    """Which dimensions of a jaxpr's inputs and outputs are cut alike."""
    dims = _Dims()
    inputs = [dims.new(var.aval) for var in jaxpr.invars]
    outputs = dims.run(jaxpr, inputs)
    number = dims.number
    return Alike(
        tuple(tuple(map(number, operand)) for operand in inputs), tuple(tuple(map(number, out)) for out in outputs)
    )


class _Dims:
    """Numbers for dimensions, of which some turn out to be the same."""

    def __init__(self) -> None:
        self._parent: list[int] = []

    def fresh(self) -> int:
        """A number for a dimension that comes from none."""
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def new(self, aval: Any) -> list[int]:
        """Numbers for an array of its own."""
        return [self.fresh() for _ in getattr(aval, "shape", ())]

    def number(self, dim: int) -> int:
        """The number that stands for all that are the same as `dim`."""
        while self._parent[dim] != dim:
            self._parent[dim] = self._parent[self._parent[dim]]
            dim = self._parent[dim]
        return dim

    def same(self, a: int, b: int) -> None:
        """Dimensions `a` and `b` are cut alike."""
        self._parent[self.number(a)] = self.number(b)

    def run(self, jaxpr: jex.Jaxpr, inputs: Sequence[list[int]]) -> list[list[int]]:
        """The numbers of a jaxpr's outputs."""
        env: dict[Any, list[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> list[int]:
            if isinstance(atom, jex.Literal):
                return self.new(atom.aval)
            if atom not in env:
                env[atom] = self.new(atom.aval)
            return env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inner = called_by(eqn)
            if inner is not None and len(inner.invars) == len(operands):
                results = self.run(inner, operands)
            else:
                results = [self.new(var.aval) for var in eqn.outvars]
                self.apply(eqn, operands, results)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
        """What one operation says."""
        _RULES.get(eqn.primitive.name, _by_size)(self, eqn, operands, results)


def alike_in(eqn: Any) -> Alike:
    """Which dimensions of one operation's operands and results are cut alike."""
    dims = _Dims()
    operands, results = [dims.new(atom.aval) for atom in eqn.invars], [dims.new(var.aval) for var in eqn.outvars]
    dims.apply(eqn, operands, results)
    number = dims.number
    return Alike(tuple(tuple(map(number, a)) for a in operands), tuple(tuple(map(number, r)) for r in results))


def called_by(eqn: Any) -> jex.Jaxpr | None:
    """The jaxpr that an equation calls once, with its operands."""
    if eqn.primitive.name in ("while", "scan", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = eqn.params.get(name)
        if found is not None:
            return getattr(found, "jaxpr", found)
    return None


def _shapes(atoms: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def _by_size(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Most operations: dimensions of one place and one size."""
    shapes = _shapes(eqn.invars)
    for shape, result in zip(_shapes(eqn.outvars), results, strict=True):
        for theirs, operand in zip(shapes, operands, strict=True):
            if len(theirs) == len(shape):
                for place, size in enumerate(shape):
                    if theirs[place] == size:
                        dims.same(operand[place], result[place])


def _by_place(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Parts and joins of arrays: dimensions of one place, whatever their size. So XLA's partitioner has it, and where
    it is another one than here, what crosses a cut is sent once more."""
    for operand in operands:
        for place, dim in enumerate(operand):
            dims.same(dim, results[0][place])


def _broadcast_in_dim(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    shape = _shapes(eqn.invars)[0]
    for place, to in enumerate(eqn.params["broadcast_dimensions"]):
        if shape[place] == eqn.params["shape"][to]:
            dims.same(operands[0][place], results[0][to])


def _transpose(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    for place, before in enumerate(eqn.params["permutation"]):
        dims.same(operands[0][before], results[0][place])


def _reduce(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    left = [place for place in range(len(operands[0])) if place not in eqn.params["axes"]]
    for result in results:
        for operand in operands:
            if len(operand) == len(operands[0]):
                for place, to in zip(left, result, strict=True):
                    dims.same(operand[place], to)


def _squeeze(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    left = [place for place in range(len(operands[0])) if place not in eqn.params["dimensions"]]
    for place, to in zip(left, results[0], strict=True):
        dims.same(operands[0][place], to)


def _reshape(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Of dimensions that are merged, or that one is split into, the first one: a part of it is a part of them all."""
    (before,), (after,) = _shapes(eqn.invars), _shapes(eqn.outvars)
    old = [place for place, size in enumerate(before) if size != 1]
    new = [place for place, size in enumerate(after) if size != 1]
    if 0 in before:
        return
    while old and new:
        dims.same(operands[0][old[0]], results[0][new[0]])
        a, b = before[old.pop(0)], after[new.pop(0)]
        while a != b:
            if a < b:
                a *= before[old.pop(0)]
            else:
                b *= after[new.pop(0)]


def _dot_general(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    (contracted, theirs), (batch, batch_too) = eqn.params["dimension_numbers"]
    left, right = operands
    for a, b in (*zip(contracted, theirs, strict=True), *zip(batch, batch_too, strict=True)):
        dims.same(left[a], right[b])
    made = [left[place] for place in batch]
    made += [dim for place, dim in enumerate(left) if place not in (*contracted, *batch)]
    made += [dim for place, dim in enumerate(right) if place not in (*theirs, *batch_too)]
    for dim, to in zip(made, results[0], strict=True):
        dims.same(dim, to)


def _gather(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    _indexed(
        dims,
        operands[0],
        _shapes(eqn.invars)[0],
        sizes,
        operands[1],
        results[0],
        numbers.offset_dims,
        (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims),
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True),
    )


def _scatter(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    numbers = eqn.params["dimension_numbers"]
    base, indices, updates = operands
    shape, _, of_updates = _shapes(eqn.invars)
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [place for place in range(len(base)) if place not in dropped]
    sizes = [1] * len(base)
    for place, window in zip(kept, numbers.update_window_dims, strict=True):
        sizes[place] = of_updates[window]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    _indexed(dims, base, shape, sizes, indices, updates, numbers.update_window_dims, dropped, pairs)
    for a, b in zip(base, results[0], strict=True):
        dims.same(a, b)


def _indexed(
    dims: _Dims,
    base: list[int],
    shape: Sequence[int],
    sizes: Sequence[int],
    indices: list[int],
    slices: list[int],
    windows: Sequence[int],
    dropped: Sequence[int],
    batching: Iterable[tuple[int, int]],
) -> None:
    """Slices of `sizes` of `base` at `indices`: their `windows` are dimensions of `base`, the others of the indices."""
    kept = [place for place in range(len(base)) if place not in dropped]
    for place, window in zip(kept, windows, strict=True):
        if sizes[place] == shape[place]:
            dims.same(base[place], slices[window])
    others = [dim for place, dim in enumerate(slices) if place not in windows]
    for dim, index in zip(others, indices[:-1], strict=True):  # the last one holds the coordinates
        dims.same(index, dim)
    for place, index in batching:
        dims.same(base[place], indices[index])


def _conv_general_dilated(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    numbers = eqn.params["dimension_numbers"]
    data, kernel = operands
    dims.same(data[numbers.lhs_spec[0]], results[0][numbers.out_spec[0]])  # the batch
    if eqn.params["batch_group_count"] == 1:
        dims.same(kernel[numbers.rhs_spec[0]], results[0][numbers.out_spec[1]])  # the output's channels
    if eqn.params["feature_group_count"] == 1:
        dims.same(data[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[1]])  # the input's


def _one_by_one(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Each result is the operand of its place."""
    for operand, result in zip(operands, results, strict=True):
        for a, b in zip(operand, result, strict=True):
            dims.same(a, b)


def _none(dims: _Dims, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Nothing is known."""


_RULES = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "gather": _gather,
    "conv_general_dilated": _conv_general_dilated,
    "iota": _none,
    "optimization_barrier": _one_by_one,
    **dict.fromkeys(("slice", "pad", "concatenate"), _by_place),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), _reduce
    ),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul"), _scatter),
}
