"""Evaluate sketches in JAX: a shard of a weight, given the stream positions of its draws and the shard's offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ...lower.dtypes import broadcast_to, cast, to_jax
from ...lower.mt19937_fills import kernel
from ...lower.program import function_of, read_view, write_view
from ...lower.rules import RULES
from ...lower.unfused import unfused
from .counter import part_of_draw
from .fill import ShardGeometry, WordSource, flat_indices, part_of_fill
from .sketch import Apply, Constant, Data, Masked, RandomFill, Sketch, Truncated, WholeSketch

Draws = Sequence[tuple[Any, Any]]  # for each draw a WordSource, or under the counter policy a seed, and its position


def part(sketch: Sketch, local: tuple[int, ...], draws: Draws, starts: Sequence[Any]) -> Any:
    """A shard of the weight described by `sketch`.

    Args:
        local: the shard's shape, in the order of the weight's dimensions.
        draws: for each of `sketch.origins`.
        starts: int64, the shard's offset in each dimension.
    """
    order = sketch.order
    box = ShardGeometry(sketch.shape, tuple(local[d] for d in order))
    begin = [starts[d] for d in order]
    evaluator = _Evaluator(draws, sketch.data)
    if type(sketch.tree) is WholeSketch:
        out = _cut(evaluator.whole(sketch.tree), box, begin)
    else:
        out = evaluator.tree(sketch.tree, box, begin)
        out = out if out.shape == box.local else broadcast_to(out, box.local)
    back = [order.index(d) for d in range(len(order))]
    return out if back == list(range(len(back))) else lax.transpose(out, back)


def _cut(array: Any, box: ShardGeometry, starts: Sequence[Any]) -> Any:
    if not box.cut:
        return array
    return lax.dynamic_slice(array, [starts[d] if d in box.cut else np.int64(0) for d in range(array.ndim)], box.local)


class _Evaluator:
    def __init__(self, draws: Draws, data: Mapping[str, np.ndarray]) -> None:
        self.draws = draws
        self.data = data

    def tree(self, tree: Any, box: ShardGeometry, starts: Sequence[Any]) -> Any:
        """A box of the result of a tree; a leaf of one element is not expanded."""
        kind = type(tree)
        if kind is Constant:
            return lax.full(box.local, cast(tree.value, to_jax(tree.dtype)))
        if kind is Data:
            array = self.data[tree.digest]
            if array.size == 1 != box.numel:
                return jnp.asarray(array if array.ndim == 0 else array.reshape((1,) * len(box.shape)))
            return _cut(jnp.asarray(array.reshape(box.shape)), box, starts)
        if kind is RandomFill:
            return self.fill(tree, box, starts)
        if kind is Truncated:
            return self._truncated(tree, box, starts)
        if kind is Masked:
            index = flat_indices(box, starts)
            inside = (index >= np.int64(tree.begin)) & (index < np.int64(tree.end))
            new, old = (self.tree(t, box, starts) for t in (tree.new, tree.old))
            return jnp.where(inside, broadcast_to(new, box.local), broadcast_to(old, box.local))
        assert kind is Apply
        return self._apply(tree, box, starts)

    def fill(self, fill: RandomFill, box: ShardGeometry, starts: Sequence[Any], rounds_before: Any = None) -> Any:
        """A box of a draw, after a number of earlier rounds of it."""
        source, position = self.draws[fill.draw]
        if not fill.words:
            first, second = (float(value) for _, value in fill.arguments)
            return part_of_draw(fill.name, first, second, fill.dtype, box, source, position, starts)
        assert isinstance(source, WordSource)
        if rounds_before is not None:
            position = position + rounds_before * np.int64(fill.words)
        fill_kernel = kernel(fill.name, fill.dtype, dict(fill.arguments))
        assert fill_kernel is not None
        return part_of_fill(fill_kernel, box, fill.words, source, position, starts)

    def _truncated(self, tree: Truncated, box: ShardGeometry, starts: Sequence[Any]) -> Any:
        low, high = (cast(bound, to_jax(tree.fill.dtype)) for bound in (tree.low, tree.high))

        def outside(x: Any) -> Any:
            return (x < low) | (x > high)

        def redraw(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            number, x = carry
            return number + np.int64(1), jnp.where(outside(x), self.fill(tree.fill, box, starts, number), x)

        first = (np.int64(1), self.fill(tree.fill, box, starts))
        return lax.while_loop(lambda carry: jnp.any(outside(carry[1])), redraw, first)[1]

    def _apply(self, tree: Apply, box: ShardGeometry, starts: Sequence[Any]) -> Any:
        def fill(arg: Any) -> Any:
            if type(arg) in (Constant, Data, RandomFill, Truncated, Masked, Apply):
                return self.tree(arg, box, starts)
            if type(arg) is tuple and len(arg) == 2 and arg[0] in (int, float, bool):
                return arg[1]
            return arg

        out = RULES[tree.op](*[fill(a) for a in tree.args], **{k: fill(v) for k, v in tree.kwargs})
        return unfused(cast(out, to_jax(tree.dtype)))

    def whole(self, tree: WholeSketch) -> Any:
        """The whole result of a recipe that cannot be computed by shard."""
        arrays: list[Any] = []
        for given in tree.inputs:
            if type(given) is Data:
                arrays.append(jnp.asarray(self.data[given.digest]))
            else:
                arrays.append(lax.full(given[0], cast(0, to_jax(given[1]))))
        for step in tree.steps:
            operands = [arrays[i] for i in step.inputs]
            if step.fill is None:
                arrays.extend(function_of(step.template, portable=True)(*operands))
                continue
            box = ShardGeometry(step.size, step.size)
            content = self.tree(step.fill, box, [np.int64(0)] * len(step.size))
            arrays.append(content if step.view is None else write_view(operands[0], content, step.view))
        result = arrays[tree.result]
        return result if tree.view is None else read_view(result, tree.view)


def name_of(sketch: Sketch, local: tuple[int, ...]) -> str:
    """A name for the function, from its operations and the shape of its result."""
    return "_".join([_verb(sketch.tree), "x".join(map(str, local)) or "scalar"])


def _verb(tree: Any) -> str:
    if type(tree) is RandomFill:
        return f"{tree.name}_{_short(tree.dtype)}"
    if type(tree) is Truncated:
        return f"trunc_normal_{_short(tree.fill.dtype)}"
    if type(tree) is Constant:
        return f"full_{_short(tree.dtype)}"
    if type(tree) is Data:
        return f"known_{_short(tree.dtype)}"
    if type(tree) is Masked:
        return f"{_verb(tree.old)}_edited"
    if type(tree) is Apply:
        first = next((a for a in tree.args if type(a) in (RandomFill, Truncated, Masked, Apply)), None)
        own = str(tree.op).removeprefix("aten.").split(".")[0]
        return own if first is None else f"{_verb(first)}_{own}"
    return str(tree.steps[-1].template.op).removeprefix("aten.").split(".")[0] if tree.steps else "known"


def _short(dtype: Any) -> str:
    return str(jnp.dtype(to_jax(dtype)))
