"""A cut function on one device: its logical shards in one loop, and their sums in one tree over devices and shards.

What one logical shard computes must be compiled alike on any mesh, though what surrounds it is not: see `_Run._apart`
and `_Run._rounded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from .logical_shards import CutFunction, Operation
from .piecewise import EXACT, PRODUCTS, Along
from .sharding import Spec


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
        self._kept: dict[int, tuple[Spec, Any]] = {}  # of values that are sharded, how, and this device's shards
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
                if name not in EXACT or name in PRODUCTS:
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
        if math.prod(self._sizes[name] for name in axes) == 1:
            return array
        whole = lax.all_gather(self._in_turn(array), axes, axis=dim, tiled=True)
        self._wait_for(whole)
        return whole

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
        return self._in_turn(array)

    def _in_turn(self, array: Any) -> Any:
        """`array`, available after all that has been waited for."""
        return lax.cond(self._more == 0, lambda array: array, jnp.zeros_like, array)

    def _wait_for(self, array: Any) -> None:
        """Let what is kept apart from here on wait for `array`, which devices have exchanged.

        A device must not be in two exchanges at once: each takes a thread, of which XLA has as many as devices. And in
        an order of XLA's, gradients would be added last, and they, or what they are computed from, be kept until then.
        """

        def never(more: Any, array: Any) -> Any:
            return jnp.any(array != 0).astype(more.dtype)

        self._more = lax.cond(self._more == 0, lambda more, array: more, never, self._more, array)

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
            # With a single piece, XLA would see that its index is 0, and compile the pass otherwise.
            return jnp.zeros((max(2, self._own), *shape), aval.dtype)

        specs = [function.reduced.get(value, ()) for value, _ in terms]

        def zeros(value: int, spec: Spec) -> Any:
            aval = function.shapes[value]
            return jnp.zeros(self._shard_shape(aval.shape, spec), aval.dtype)

        stacks = [pieces_of(value) for value in kept]
        sums = [[zeros(value, spec) for (value, _), spec in zip(terms, specs, strict=True)] for _ in range(levels)]

        def body(i: Any, carry: Any) -> Any:
            self._more, stacks, sums = carry
            computed = self._shard(operations, i)
            stacks = [
                lax.dynamic_update_index_in_dim(stack, computed[value], i, 0)
                for stack, value in zip(stacks, kept, strict=True)
            ]
            return self._more, stacks, _added(sums, [computed[value] for value, _ in terms], adds, i, self._own)

        begin = self._more, stacks, sums
        self._more, stacks, sums = lax.fori_loop(0, self._own + self._more, body, begin)
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
        """Compute `operations` for this device's logical shard `i`, and their sums over this shard of each device."""
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
            if operation.add is None:
                continue
            for value in operation.results:
                spec = function.reduced.get(value, ())
                env[value] = self._over_devices(env[value], operation.add, spec)
        return env

    def _over_devices(self, total: Any, add: Callable[[Any, Any], Any], spec: Spec) -> Any:
        """Add the devices' sums in a binary tree of which each device's is a branch; of one that is sharded, each
        device exchanges only the half with its shard."""
        shape = total.shape
        total = self._in_turn(total).reshape(self._halved(shape, spec))
        distance = 1
        for axis in reversed(self._axes):
            for bit in range(self._sizes[axis].bit_length() - 1):
                own = (lax.axis_index(axis) >> bit) & 1
                pairs = [(i, i ^ distance) for i in range(self._devices)]
                kept = sent = total
                if (place := self._place_of(axis, bit, spec, shape)) is not None:
                    kept, sent = (lax.dynamic_slice_in_dim(kept, k, 1, place) for k in (own, 1 - own))
                # In all bits, a + b is b + a.
                total = lax.optimization_barrier(add(kept, lax.ppermute(sent, self._axes, pairs)))
                distance *= 2
        self._wait_for(total)
        return total.reshape(self._shard_shape(shape, spec))

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
