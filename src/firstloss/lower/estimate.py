"""Estimates of what a device of a mesh computes, sends and holds while it runs a segment, without compiling it.

The segment's operations are visited one by one, as XLA's partitioner does. Each has an iteration space (for a matrix
product: rows, columns and the contracted dimension), whose dimensions are sharded like the operands'. If two operands
use one mesh axis for different dimensions, the one that depends on the batch wins, and the other is gathered along the
axis. Contracting a sharded dimension leaves partial sums on the devices, which are reduced, or reduce-scattered if the
result is to be sharded along the same axis.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..program.graph import Value
from .jaxprs import interpret, jaxpr_of
from .program import LoweredCall
from .scratch_memory import RESHAPING, Memory
from .segments import Segment
from .sharding import ArraySharding, Axes, Spec, within
from .sharding_rules import ShardingRule, rule_of_equation
from .work import Sent, Work

# Primitives whose elements cost no operations.
_FREE = RESHAPING | frozenset(
    "broadcast_in_dim iota slice pad concatenate select_n rev gather scatter optimization_barrier stop_gradient".split()
)
_SUMS = frozenset({"dot_general", "reduce_sum", "scatter-add", "scatter_add", "conv_general_dilated"})
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
# They need all of a dimension, which is named in their parameters.
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    "sort": "dimension",
}


Jaxprs = dict[Hashable, Any]


def work_of(
    segment: Segment,
    boundary: Mapping[Value, ArraySharding],
    axes: Axes,
    *,
    reused: Container[Value] = (),
    scatters: bool = True,
    jaxprs: Jaxprs | None = None,
) -> Work:
    """The work of one device for `segment`.

    Args:
        boundary: the shardings of its inputs and outputs.
        reused: outputs that are written to the memory of inputs.
        scatters: whether XLA has reduce-scatters; on a CPU it uses all-reduces, of which each device keeps a shard.
        jaxprs: a cache for equal calls, shared by segments.
    """
    return _Device(segment, boundary, axes, scatters, {} if jaxprs is None else jaxprs).work(reused)


def local_bytes(shape: Sequence[int], itemsize: int, spec: Spec, axes: Axes) -> int:
    """The bytes of an array on one device."""
    return math.prod(size // _ways(cut, axes) for size, cut in zip(shape, spec, strict=True)) * itemsize


def _ways(cut: Iterable[str], axes: Axes) -> int:
    return math.prod(axes[axis] for axis in cut)


class _Array(NamedTuple):
    """An array inside a segment.

    Attributes:
        sharding: how it is sharded.
        parts: the axes along which devices hold partial sums, to be added up.
        itemsize: of the sum, as it was computed.
        node: its number among the computed values.
        root: the value whose content it has in any layout, to recognize repeated gathers.
        base: for a broadcast, the array that it repeats, which is gathered instead.
        along: for each dimension of `base`, its own dimension of that size.
    """

    sharding: ArraySharding
    node: int
    root: Hashable
    parts: tuple[str, ...] = ()
    itemsize: int = 0
    base: _Array | None = None
    along: tuple[int | None, ...] = ()


class _Device:
    """One device and a segment."""

    def __init__(
        self, segment: Segment, boundary: Mapping[Value, ArraySharding], axes: Axes, scatters: bool, jaxprs: Jaxprs
    ) -> None:
        self._segment = segment
        self._scatters = scatters
        self._jaxprs = jaxprs
        self._boundary = boundary
        self._axes = axes
        self._placed = within(segment, boundary, axes)
        self._work = Work()
        self._memory = Memory()
        self._gathered: dict[Hashable, int] = {}
        self._call: LoweredCall | None = None

    def work(self, reused: Container[Value]) -> Work:
        """Visit the segment's calls, and add up the work."""
        arrays: dict[Any, _Array] = {}
        for value in self._segment.inputs:
            if isinstance(value, Value):
                arrays[value] = self._input(value)
        for call in self._segment.calls:
            self._call = call
            operands = [arrays[value] if value in arrays else self._constant(value) for value in call.inputs]
            kind = call.kind, *((value.shape, value.dtype) for value in call.inputs)
            jaxpr = self._jaxprs.get(kind)
            if jaxpr is None:
                jaxpr = self._jaxprs[kind] = jaxpr_of(call)
            if call.draw is not None:
                operands.append(self._array((), 4, ArraySharding(()), "iota", ()))
            for value, array in zip(call.outputs, interpret(jaxpr, operands, self._literal, self._apply), strict=True):
                arrays[value] = self._settled(value, array)
        outputs = {arrays[value].node for value in self._segment.outputs if value not in reused}
        self._memory.preallocated |= {arrays[value].node for value in self._segment.outputs if value in reused}
        self._work.scratch = self._memory.peak(outputs)
        self._work.kernels = self._memory.kernels(outputs)
        return self._work

    # -- arrays --

    def _array(
        self,
        shape: Sequence[int],
        itemsize: int,
        sharding: ArraySharding,
        primitive: str,
        reads: tuple[int, ...],
        root: Any = None,
    ) -> _Array:
        node = self._memory.add(primitive, local_bytes(shape, itemsize, sharding.spec, self._axes), reads)
        return _Array(sharding, node, node if root is None else root)

    def _input(self, value: Value) -> _Array:
        array = self._array(value.shape, value.dtype.itemsize, self._boundary[value], "input", (), value)
        self._memory.preallocated.add(array.node)
        return array

    def _constant(self, value: Value) -> _Array:
        return self._array(value.shape, value.dtype.itemsize, ArraySharding(((),) * len(value.shape)), "iota", ())

    def _literal(self, aval: Any) -> _Array:
        shape = tuple(getattr(aval, "shape", ()))
        return self._array(shape, _itemsize(aval), ArraySharding(((),) * len(shape)), "iota", ())

    # -- operations --

    def _apply(self, eqn: Any, operands: list[_Array]) -> list[_Array]:
        name = eqn.primitive.name
        shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
        result_shapes = [tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars]
        if (
            name in RESHAPING
            and operands[0].parts
            and self._keeps_sharding(eqn, operands[0], shapes[0], result_shapes[0])
        ):
            operand = operands[0]
            result = self._apply(eqn, [operand._replace(parts=())])[0]
            return [result._replace(parts=operand.parts, itemsize=operand.itemsize)]
        operands = [self._summed(operand, atom.aval) for operand, atom in zip(operands, eqn.invars, strict=True)]
        if name == "optimization_barrier":
            return operands
        rule = rule_of_equation(eqn)
        cuts = self._cuts(eqn, rule, operands, shapes, result_shapes)
        parts: tuple[str, ...] = ()
        if name == "gather":
            operands, parts = self._lookup(eqn, operands, shapes, rule, cuts)
        if name in ("slice", "dynamic_slice"):
            operands = [self._sliced(eqn, operands[0], rule, cuts), *operands[1:]]
        if name == "slice":
            self._exchange(eqn, operands[0], rule, cuts)
        operands = [
            self._moved(operand, atom.aval, tuple(cuts.get(number, ()) for number in dims))
            for operand, atom, dims in zip(operands, eqn.invars, rule.operands, strict=True)
        ]
        if name == "concatenate":
            self._join(eqn, operands, rule, cuts)
        of_results = {number for dims in rule.results for number in dims}
        contracted = tuple(dict.fromkeys(a for number, cut in cuts.items() if number not in of_results for a in cut))
        of_batch = any(operand.sharding.of_batch for operand in operands)
        results = []
        for var, dims in zip(eqn.outvars, rule.results, strict=True):
            sharding = ArraySharding(tuple(cuts.get(number, ()) for number in dims), of_batch)
            shape, itemsize = tuple(getattr(var.aval, "shape", ())), _itemsize(var.aval)
            root = operands[0].root if name in RESHAPING else None
            reads = tuple(operand.node for operand in operands)
            result = self._array(shape, itemsize, sharding, name, reads, root)
            if contracted or parts:
                result = result._replace(parts=(*parts, *contracted), itemsize=itemsize)
                if name not in _SUMS and name != "gather":
                    result = self._summed(result, var.aval)
            if name == "broadcast_in_dim":
                along = tuple(
                    to if shapes[0][dim] == shape[to] else None
                    for dim, to in enumerate(eqn.params["broadcast_dimensions"])
                )
                result = result._replace(base=operands[0], along=along)
            results.append(result)
        if results:
            self._memory.flops[results[0].node] = self._count(eqn, shapes, result_shapes, rule, cuts)
        return results

    def _cuts(
        self,
        eqn: Any,
        rule: ShardingRule,
        operands: Sequence[_Array],
        shapes: Sequence[tuple[int, ...]],
        result_shapes: Sequence[tuple[int, ...]],
    ) -> dict[int, tuple[str, ...]]:
        """The sharding of the operation's iteration space: axes by factor numbers."""
        name = eqn.primitive.name
        sizes: dict[int, list[int]] = {}
        for shape, dims in (*zip(shapes, rule.operands, strict=True), *zip(result_shapes, rule.results, strict=True)):
            for size, number in zip(shape, dims, strict=True):
                sizes.setdefault(number, []).append(size)
        whole: set[int] = set()
        if name in _ALONG and shapes[0]:
            whole.add(rule.operands[0][eqn.params[_ALONG[name]]])
        in_results = {number for dims in rule.results for number in dims}
        if name not in _SUMS and name not in _REDUCTIONS and name != "gather":
            whole |= {number for dims in rule.operands for number in dims if number not in in_results}
        order = sorted(range(len(operands)), key=lambda i: (not operands[i].sharding.of_batch, -math.prod(shapes[i])))
        if name == "gather":  # indices may refer to any row
            whole |= {n for n in rule.operands[0] if n not in in_results and n not in rule.operands[1]}
            order = [1, 0]
        cuts: dict[int, tuple[str, ...]] = {}
        used: set[str] = set()
        for i in order:
            for number, cut in zip(rule.operands[i], operands[i].sharding.spec, strict=True):
                if not cut or number in cuts or number in whole:
                    continue
                chosen: tuple[str, ...] = ()
                for axis in cut:
                    ways = _ways((*chosen, axis), self._axes)
                    if axis not in used and all(size % ways == 0 for size in sizes[number]):
                        chosen += (axis,)
                if chosen:
                    cuts[number] = chosen
                    used.update(chosen)
        if name in ("scatter-add", "scatter_add") and self._call is not None:
            # Each device adds what concerns its own rows.
            for value in self._call.outputs:
                if tuple(value.shape) == result_shapes[0]:
                    for number, cut in zip(rule.results[0], self._placed[value].spec, strict=True):
                        if cut and number not in cuts and not used & set(cut) and number not in rule.operands[2]:
                            cuts[number] = cut
                            used.update(cut)
        return cuts

    def _keeps_sharding(self, eqn: Any, operand: _Array, shape: tuple[int, ...], result_shape: tuple[int, ...]) -> bool:
        cuts = self._cuts(eqn, rule_of_equation(eqn), [operand], [shape], [result_shape])
        return sorted(cuts.values()) == sorted(cut for cut in operand.sharding.spec if cut)

    def _lookup(
        self, eqn: Any, operands: list[_Array], shapes: list[tuple[int, ...]], rule: ShardingRule, cuts: dict[int, Any]
    ) -> tuple[list[_Array], tuple[str, ...]]:
        """Rows of a table whose rows are sharded: each device looks up those that it has, and the results are summed,
        or the table is gathered, if less is sent that way."""
        table = operands[0]
        free = {*rule.results[0], *cuts}
        split = [(d, cut) for d, cut in enumerate(table.sharding.spec) if cut and rule.operands[0][d] not in free]
        axes = tuple(axis for _, cut in split for axis in cut)
        used = {axis for cut in cuts.values() for axis in cut}
        if not axes or used & set(axes):
            return operands, ()
        spec = tuple(cuts.get(number, ()) for number in rule.operands[0])
        whole = local_bytes(shapes[0], _itemsize(eqn.invars[0].aval), spec, self._axes)
        result = tuple(cuts.get(number, ()) for number in rule.results[0])
        looked_up = local_bytes(eqn.outvars[0].aval.shape, _itemsize(eqn.outvars[0].aval), result, self._axes)
        if whole <= 2 * looked_up:
            return operands, ()
        cuts_by_dim = enumerate(zip(table.sharding.spec, spec, strict=True))
        masked = tuple(cut if (d, cut) in split else new for d, (cut, new) in cuts_by_dim)
        local = self._moved(table, eqn.invars[0].aval, masked)
        return [local._replace(sharding=ArraySharding(spec, table.sharding.of_batch)), *operands[1:]], axes

    def _count(
        self,
        eqn: Any,
        shapes: Sequence[tuple[int, ...]],
        result_shapes: Sequence[tuple[int, ...]],
        rule: ShardingRule,
        cuts: Mapping[int, tuple[str, ...]],
    ) -> float:
        """The floating-point operations of an operation, added to the segment's."""
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            steps = math.prod(shapes[0][sharding] for sharding in contracted)
            dims = {*rule.operands[0], *rule.operands[1]}
            flops = 2.0 * math.prod(result_shapes[0]) * steps / self._share(dims, cuts)
        elif name == "conv_general_dilated":
            kernel = math.prod(shapes[1]) // max(shapes[1][eqn.params["dimension_numbers"].rhs_spec[0]], 1)
            dims = {*rule.operands[0], *rule.operands[1], *rule.results[0]}
            flops = 2.0 * math.prod(result_shapes[0]) * kernel / self._share(dims, cuts)
        else:
            counted_shapes, dims_of = (shapes, rule.operands) if name in _REDUCTIONS else (result_shapes, rule.results)
            flops = 0.0
            if counted_shapes and name not in _FREE:
                flops = math.prod(counted_shapes[0]) / self._share(set(dims_of[0]), cuts)
            self._work.other_flops += flops
            return flops
        self._work.matmul_flops += flops
        return flops

    def _share(self, dims: set[int], cuts: Mapping[int, tuple[str, ...]]) -> int:
        return math.prod(_ways(cuts.get(number, ()), self._axes) for number in dims)

    # -- communication --

    def _send(self, kind: str, axes: tuple[str, ...], nbytes: int, root: Any) -> None:
        axes = tuple(axis for axis in axes if self._axes[axis] > 1)
        if axes and nbytes:
            node = None if self._call is None else self._call.node
            self._work.sent.append(
                Sent(
                    kind,
                    axes,
                    nbytes,
                    root if isinstance(root, Value) else None,
                    "" if node is None else str(node.source),
                )
            )

    def _summed(self, array: _Array, aval: Any) -> _Array:
        """`array`, after its partial sums have been reduced."""
        if not array.parts:
            return array
        nbytes = local_bytes(tuple(aval.shape), array.itemsize, array.sharding.spec, self._axes)
        self._send("all-reduce", array.parts, nbytes, array.root)
        return array._replace(parts=())

    def _moved(self, array: _Array, aval: Any, spec: Spec) -> _Array:
        """`array`, resharded to `spec`; sharding it further sends nothing."""
        before = array.sharding.spec
        if spec == before:
            return array
        if array.base is not None:
            base = array.base
            base_spec = tuple(() if to is None else spec[to] for to in array.along)
            shape = tuple(1 if to is None else aval.shape[to] for to in array.along)
            moved = self._moved(base, _Shape(shape, aval.dtype), base_spec)
            broadcast_again = self._array(
                aval.shape, _itemsize(aval), ArraySharding(spec, array.sharding.of_batch), "iota", (moved.node,)
            )
            return broadcast_again._replace(base=moved, along=array.along)
        gathered_axes = [a for cut, new in zip(before, spec, strict=True) for a in cut if a not in new]
        elsewhere = tuple(a for a in gathered_axes if any(a in new for new in spec))
        axes = tuple(a for a in gathered_axes if a not in elsewhere)
        shape, itemsize = tuple(aval.shape), _itemsize(aval)
        moved = array._replace(sharding=ArraySharding(spec, array.sharding.of_batch))
        if not gathered_axes:
            return moved
        nbytes = local_bytes(shape, itemsize, spec, self._axes)
        key = array.root, shape, itemsize, before, spec  # XLA merges equal gathers, but not transposed ones
        node = self._gathered.get(key)
        if node is None:
            if elsewhere:
                self._send("all-to-all", elsewhere, nbytes, array.root)
            self._send("all-gather", axes, nbytes, array.root)
            node = self._gathered[key] = self._memory.add("sent", nbytes, (array.node,))
        return moved._replace(node=node)

    def _sliced(self, eqn: Any, array: _Array, rule: ShardingRule, cuts: Mapping[int, tuple[str, ...]]) -> _Array:
        """The operand of a slice: if it cannot stay sharded as it is, no more than the slice is sent."""
        spec = tuple(cuts.get(number, ()) for number in rule.operands[0])
        gathered_axes = tuple(
            a for cut, new in zip(array.sharding.spec, spec, strict=True) for a in cut if a not in new
        )
        if gathered_axes and array.base is None:
            aval = eqn.outvars[0].aval
            of_result = tuple(cuts.get(number, ()) for number in rule.results[0])
            nbytes = local_bytes(aval.shape, _itemsize(aval), of_result, self._axes)
            self._send("collective-permute", gathered_axes, nbytes, array.root)
            return array._replace(sharding=ArraySharding(spec, array.sharding.of_batch))
        return array

    def _exchange(self, eqn: Any, array: _Array, rule: ShardingRule, cuts: Mapping[int, tuple[str, ...]]) -> None:
        """A slice along a dimension that stays sharded, such as a matrix of queries, keys and values that is sharded
        across all three: each device receives the missing parts of its shard from its neighbours."""
        shape = list(eqn.invars[0].aval.shape)
        spec = tuple(cuts.get(number, ()) for number in rule.operands[0])
        starts, strides = eqn.params["start_indices"], eqn.params["strides"] or (1,) * len(shape)
        for dim, cut in enumerate(spec):
            size, length = shape[dim], eqn.outvars[0].aval.shape[dim]
            if not cut or size == length:
                continue
            ways = _ways(cut, self._axes)
            left = right = 0
            for i in range(ways):
                first = starts[dim] + i * (length // ways) * strides[dim]
                last = starts[dim] + ((i + 1) * (length // ways) - 1) * strides[dim]
                left = max(left, i * (size // ways) - first)
                right = max(right, last + 1 - (i + 1) * (size // ways))
            for halo in (left, right):
                if halo > 0:
                    received = (*shape[:dim], halo * ways, *shape[dim + 1 :])
                    nbytes = local_bytes(received, _itemsize(eqn.invars[0].aval), spec, self._axes)
                    self._send("collective-permute", cut, nbytes, array.root)

    def _join(
        self, eqn: Any, operands: Sequence[_Array], rule: ShardingRule, cuts: Mapping[int, tuple[str, ...]]
    ) -> None:
        """A concatenation along a sharded dimension: if possible, another dimension is sharded instead."""
        dim = eqn.params["dimension"]
        spec = tuple(cuts.get(number, ()) for number in rule.results[0])
        result, cut = eqn.outvars[0].aval, spec[dim]
        if not cut:
            return
        ways = _ways(cut, self._axes)
        others = [(size, axes) for d, (size, axes) in enumerate(zip(result.shape, spec, strict=True)) if d != dim]
        reshardable = any(size % (_ways(axes, self._axes) * ways) == 0 for size, axes in others)
        for atom, operand in zip(eqn.invars, operands, strict=True):
            nbytes = local_bytes(atom.aval.shape, _itemsize(atom.aval), spec, self._axes)
            if reshardable:
                self._send("all-to-all", cut, nbytes, operand.root)
            else:
                self._send("all-gather", cut, nbytes * ways, operand.root)
        if reshardable:
            self._send("all-to-all", cut, local_bytes(result.shape, _itemsize(result), spec, self._axes), None)

    def _settled(self, value: Value, array: _Array) -> _Array:
        """The result `value` of a call: reduced and, if it leaves the segment, resharded as required."""
        target = self._placed[value]
        shape, itemsize = value.shape, value.dtype.itemsize
        if array.parts:
            cut = {axis for entry in array.sharding.spec for axis in entry}
            to = {axis for entry in target.spec for axis in entry}
            scattered = tuple(axis for axis in array.parts if axis in to and axis not in cut)
            left = tuple(axis for axis in array.parts if axis not in scattered)
            nbytes = local_bytes(shape, array.itemsize, array.sharding.spec, self._axes)
            if self._scatters:
                self._send("reduce-scatter", scattered, nbytes, array.root)
                self._send("all-reduce", left, nbytes // _ways(scattered, self._axes), array.root)
            else:
                self._send("all-reduce", array.parts, nbytes, array.root)
            spec = target.spec if scattered and cut <= to else array.sharding.spec
            nbytes = local_bytes(shape, itemsize, spec, self._axes)
            in_parts = scattered and not self._scatters  # an all-reduce, of which each device keeps a shard
            received = nbytes * _ways(scattered, self._axes) if in_parts else nbytes
            node = self._memory.add("sent", received, (array.node,), (*scattered, *left))
            if in_parts:
                node = self._memory.add("dynamic_slice", nbytes, (node,))
            array = array._replace(parts=(), sharding=ArraySharding(spec, array.sharding.of_batch), node=node)
        if value in self._boundary:
            aval = jax_shape(shape, itemsize)
            array = self._moved(array, aval, self._boundary[value].spec)
        return array._replace(sharding=array.sharding._replace(of_batch=target.of_batch or array.sharding.of_batch))


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def jax_shape(shape: Sequence[int], itemsize: int) -> _Shape:
    """In place of an aval of this shape."""
    return _Shape(tuple(shape), np.dtype(f"V{itemsize}"))


def _itemsize(aval: Any) -> int:
    return int(getattr(getattr(aval, "dtype", None), "itemsize", 4))
