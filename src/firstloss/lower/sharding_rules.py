"""Sharding rules: which dimensions of an operation's operands and results are sharded alike, from its jaxpr.

Dimensions that are sharded alike share a factor, a number, as in Shardy's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from .jaxprs import interpret

Factors = tuple[int, ...]  # for each dimension its factor


class ShardingRule(NamedTuple):
    """The factors of an operation's operands and results."""

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]


def rule_of(jaxpr: jex.Jaxpr) -> ShardingRule:
    """The factors of a jaxpr's inputs and outputs."""
    factors = _Factors()
    inputs = [factors.new(var.aval) for var in jaxpr.invars]
    outputs = interpret(jaxpr, inputs, factors.new, factors.results)
    return factors.rule(inputs, outputs)


def rule_of_equation(eqn: Any) -> ShardingRule:
    """The factors of one equation's operands and results."""
    factors = _Factors()
    operands = [factors.new(atom.aval) for atom in eqn.invars]
    return factors.rule(operands, factors.results(eqn, operands))


class _Factors:
    """A union-find structure of factors."""

    def __init__(self) -> None:
        self._parent: list[int] = []

    def new(self, aval: Any) -> list[int]:
        """New factors for an array."""
        first = len(self._parent)
        self._parent.extend(range(first, first + len(getattr(aval, "shape", ()))))
        return list(range(first, len(self._parent)))

    def results(self, eqn: Any, operands: list[list[int]]) -> list[list[int]]:
        """The factors of an equation's results, given those of its operands."""
        results = [self.new(var.aval) for var in eqn.outvars]
        _RULES.get(eqn.primitive.name, _by_size)(self, eqn, operands, results)
        return results

    def same(self, a: int, b: int) -> None:
        """Unify the factors `a` and `b`."""
        self._parent[self._root(a)] = self._root(b)

    def rule(self, operands: Iterable[list[int]], results: Iterable[list[int]]) -> ShardingRule:
        """The rule, with one number for each unified factor."""
        root = self._root
        return ShardingRule(
            tuple(tuple(map(root, operand)) for operand in operands), tuple(tuple(map(root, r)) for r in results)
        )

    def _root(self, factor: int) -> int:
        while self._parent[factor] != factor:
            self._parent[factor] = self._parent[self._parent[factor]]
            factor = self._parent[factor]
        return factor


def _shapes(atoms: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def _by_size(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Most operations: dimensions with the same position and size."""
    shapes = _shapes(eqn.invars)
    for shape, result in zip(_shapes(eqn.outvars), results, strict=True):
        for operand_shape, operand in zip(shapes, operands, strict=True):
            if len(operand_shape) == len(shape):
                for position, size in enumerate(shape):
                    if operand_shape[position] == size:
                        factors.same(operand[position], result[position])


def _by_place(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Slices and concatenations: dimensions with the same position, whatever their size. XLA's partitioner does the
    same; if it differs, arrays that cross a cut are resharded."""
    for operand in operands:
        for position, dim in enumerate(operand):
            factors.same(dim, results[0][position])


def _broadcast_in_dim(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    shape = _shapes(eqn.invars)[0]
    for position, to in enumerate(eqn.params["broadcast_dimensions"]):
        if shape[position] == eqn.params["shape"][to]:
            factors.same(operands[0][position], results[0][to])


def _transpose(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    for position, before in enumerate(eqn.params["permutation"]):
        factors.same(operands[0][before], results[0][position])


def _reduce(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    remaining = [position for position in range(len(operands[0])) if position not in eqn.params["axes"]]
    for result in results:
        for operand in operands:
            if len(operand) == len(operands[0]):
                for position, to in zip(remaining, result, strict=True):
                    factors.same(operand[position], to)


def _squeeze(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    remaining = [position for position in range(len(operands[0])) if position not in eqn.params["dimensions"]]
    for position, to in zip(remaining, results[0], strict=True):
        factors.same(operands[0][position], to)


def _reshape(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Of merged or split dimensions, the first one: a shard of it is a shard of all of them together."""
    (before,), (after,) = _shapes(eqn.invars), _shapes(eqn.outvars)
    old = [position for position in eqn.params["dimensions"] or range(len(before)) if before[position] != 1]
    new = [position for position, size in enumerate(after) if size != 1]
    if 0 in before:
        return
    while old and new:
        factors.same(operands[0][old[0]], results[0][new[0]])
        a, b = before[old.pop(0)], after[new.pop(0)]
        while a != b:
            if a < b:
                a *= before[old.pop(0)]
            else:
                b *= after[new.pop(0)]


def _dot_general(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    (contracted, right_contracted), (batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = operands
    for a, b in (*zip(contracted, right_contracted, strict=True), *zip(batch, right_batch, strict=True)):
        factors.same(left[a], right[b])
    result_dims = [left[position] for position in batch]
    result_dims += [dim for position, dim in enumerate(left) if position not in (*contracted, *batch)]
    result_dims += [dim for position, dim in enumerate(right) if position not in (*right_contracted, *right_batch)]
    for dim, to in zip(result_dims, results[0], strict=True):
        factors.same(dim, to)


def _gather(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    _indexed(
        factors,
        operands[0],
        _shapes(eqn.invars)[0],
        sizes,
        operands[1],
        results[0],
        numbers.offset_dims,
        (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims),
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True),
    )


def _scatter(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    numbers = eqn.params["dimension_numbers"]
    base, indices, updates = operands
    shape, _, of_updates = _shapes(eqn.invars)
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window_dims = [position for position in range(len(base)) if position not in dropped]
    sizes = [1] * len(base)
    for position, window in zip(window_dims, numbers.update_window_dims, strict=True):
        sizes[position] = of_updates[window]
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    _indexed(factors, base, shape, sizes, indices, updates, numbers.update_window_dims, dropped, pairs)
    for a, b in zip(base, results[0], strict=True):
        factors.same(a, b)


def _indexed(
    factors: _Factors,
    base: list[int],
    shape: Sequence[int],
    sizes: Sequence[int],
    indices: list[int],
    slices: list[int],
    windows: Sequence[int],
    dropped: Sequence[int],
    batching: Iterable[tuple[int, int]],
) -> None:
    """Slices of `sizes` from `base` at `indices`: `windows` are the slices' dimensions from `base`, the others from
    `indices`."""
    remaining = [position for position in range(len(base)) if position not in dropped]
    for position, window in zip(remaining, windows, strict=True):
        if sizes[position] == shape[position]:
            factors.same(base[position], slices[window])
    others = [dim for position, dim in enumerate(slices) if position not in windows]
    for dim, index in zip(others, indices[:-1], strict=True):  # the last dimension holds the coordinates
        factors.same(index, dim)
    for position, index in batching:
        factors.same(base[position], indices[index])


def _conv_general_dilated(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    numbers = eqn.params["dimension_numbers"]
    data, kernel = operands
    factors.same(data[numbers.lhs_spec[0]], results[0][numbers.out_spec[0]])  # the batch
    if eqn.params["batch_group_count"] == 1:
        factors.same(kernel[numbers.rhs_spec[0]], results[0][numbers.out_spec[1]])  # the output channels
    if eqn.params["feature_group_count"] == 1:
        factors.same(data[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[1]])  # the input channels


def _stack(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """All dimensions but the new one."""
    axis = eqn.params["axis"]
    for operand in operands:
        for dim, to in zip(operand, [*results[0][:axis], *results[0][axis + 1 :]], strict=True):
            factors.same(dim, to)


def _unstack(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """All dimensions but the one that is taken apart."""
    axis = eqn.params["axis"]
    for result in results:
        for dim, to in zip([*operands[0][:axis], *operands[0][axis + 1 :]], result, strict=True):
            factors.same(dim, to)


def _one_by_one(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """Each result corresponds to the operand at the same position."""
    for operand, result in zip(operands, results, strict=True):
        for a, b in zip(operand, result, strict=True):
            factors.same(a, b)


def _none(factors: _Factors, eqn: Any, operands: list[list[int]], results: list[list[int]]) -> None:
    """No factors are shared."""


_RULES = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
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
