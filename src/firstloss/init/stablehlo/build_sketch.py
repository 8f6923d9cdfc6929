"""Build the sketch of a recipe (`sketch.py`)."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch.ops import aten

from ...lower.dtypes import constant
from ...lower.mt19937_fills import kernel
from ...lower.program import View, template_of, view_of
from ...lower.registry import functional
from ...lower.rules import RULES
from ...program.graph import Node, Ref, Value, dense_count, dtype_name, is_contiguous, slice_for
from ...program.node_kinds import Copy, Fill, Opaque, Pointwise, is_unwritten, kind_of
from ...rng import words_drawn
from ...rng.counter_stream import CounterStream, number_and_word
from .sketch import Apply, Constant, Data, DrawOrigin, Masked, RandomFill, Sketch, SketchStep, Truncated, WholeSketch

_MAX_DEPTH = 64


class Unsketchable(Exception):
    """A node that cannot be computed on a device."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(f"{node.op} at {node.source} {why}")
        self.node = node


class _NotElementwise(Exception):
    """The recipe is not elementwise."""


def sketch(ref: Ref) -> Sketch:
    """The sketch of the recipe of `ref`.

    Raises:
        Unsketchable: if a device cannot compute it.
    """
    order = tuple(sorted(range(len(ref.size)), key=lambda d: (-ref.stride[d], d)))
    if ref.covers and 0 not in ref.size:
        shape = tuple(ref.size[d] for d in order)
        builder = _Builder(shape)
        try:
            tree = builder.value(ref.value, _MAX_DEPTH)
            return Sketch(tree, shape, order, builder.origins, builder.data)
        except _NotElementwise:
            pass
    builder = _Builder(ref.size)
    return Sketch(builder.whole(ref), ref.size, tuple(range(len(ref.size))), builder.origins, builder.data)


class _Builder:
    """Builds the sketch of a weight of `shape`, row-major."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.numel = math.prod(shape)
        self.origins: list[DrawOrigin] = []
        self.data: dict[str, np.ndarray] = {}

    # -- elementwise -------------------------------------------------------------------------------------------------

    def value(self, value: Value, depth: int) -> Any:
        """The tree of a Value with as many elements as the weight."""
        if value.numel != self.numel or dense_count(value.shape, value.stride) != self.numel or depth == 0:
            raise _NotElementwise
        if value.real is not None:
            return self._known(value)
        node = value.node
        if is_unwritten(node):
            return Constant(float, 0.0, value.dtype)  # uninitialized memory
        assert node is not None
        does = kind_of(node)
        if isinstance(does, Opaque):
            raise _NotElementwise
        target = does.target
        if node.writes and target.dtype != value.dtype:
            raise _NotElementwise
        if target.covers:
            if isinstance(does, Copy):
                return self._copy(node, does, depth, value.dtype)
            if isinstance(does, Pointwise):
                return self._apply(node, value.dtype, node.args, depth, target)
            if does.name == "constant":
                return _number(does.value, value.dtype)
            if node.draw is None or (node.writes and not node.overwrites):
                raise _NotElementwise
            return self.fill(node, target)
        return self._in_part(node, does, depth, value.dtype)

    def _known(self, value: Value) -> Data:
        if not is_contiguous(value.shape, value.stride):
            raise _NotElementwise
        return self._values_of(value)

    def _values_of(self, value: Value) -> Data:
        return self.data_of(constant(value.content()), value.dtype)

    def data_of(self, array: np.ndarray, dtype: torch.dtype) -> Data:
        """A leaf with known values."""
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        self.data[digest] = array
        return Data(digest, array.shape, dtype)

    def _copy(self, node: Node, copy: Copy, depth: int, dtype: torch.dtype) -> Any:
        if copy.dim is not None:
            raise _NotElementwise
        if node.writes:
            return self._argument(copy.sources[0], copy.target, depth, cast=dtype)
        return self._apply(node, dtype, node.args, depth, copy.target)

    def _in_part(self, node: Node, does: Fill | Copy | Pointwise, depth: int, dtype: torch.dtype) -> Masked:
        """The tree of an operation that writes a part of the weight."""
        target = does.target
        if node.draw is not None or not is_contiguous(target.size, target.stride):
            raise _NotElementwise
        begin, end = target.offset, target.offset + math.prod(target.size)
        if isinstance(does, Fill):
            new: Any = _number(does.value, dtype)
        elif all(type(a) in (int, float, bool) for a in (*node.args[1:], *node.kwargs.values())):
            everything = Ref.of(target.value)
            new = self._apply(node, dtype, (everything, *node.args[1:]), depth, everything)
        else:
            raise _NotElementwise
        return Masked(begin, end, new, self.value(target.value, depth - 1))

    def _apply(self, node: Node, dtype: torch.dtype, args: tuple[Any, ...], depth: int, like: Ref) -> Apply:
        op = functional(node.op)
        if RULES.get(op) is None and RULES.get(node.op) is None:
            raise Unsketchable(node, "has no lowering")
        out = tuple(self._argument(a, like, depth) for a in args)
        kwargs = tuple((k, self._argument(v, like, depth)) for k, v in node.kwargs.items() if k != "generator")
        return Apply(op if op in RULES else node.op, out, kwargs, dtype)

    def _argument(self, arg: Any, like: Ref, depth: int, cast: torch.dtype | None = None) -> Any:
        if type(arg) in (list, tuple):
            raise _NotElementwise
        if type(arg) is not Ref:
            return (type(arg), arg) if type(arg) in (int, float, bool) else arg
        if math.prod(arg.size) == 1 != self.numel:
            if arg.value.real is None or arg.value.numel != 1:
                raise _NotElementwise
            return self._values_of(arg.value)
        if arg.size != like.size or arg.stride != like.stride or not arg.covers:
            raise _NotElementwise
        tree = self.value(arg.value, depth - 1)
        return tree if cast is None or cast == arg.dtype else Apply(aten.clone.default, (tree,), (), cast)

    # -- draws -------------------------------------------------------------------------------------------------------

    def fill(self, node: Node, target: Ref) -> RandomFill | Truncated:
        """The fill that `node` makes of `target`."""
        does = kind_of(node)
        assert node.draw is not None
        count = math.prod(target.size)
        contiguous = is_contiguous(target.size, target.stride)
        if not isinstance(does, Fill) or not contiguous or target.value.device.type != "cpu":
            raise Unsketchable(node, "draws by an algorithm that only PyTorch's kernel implements")
        name, arguments = does.name, does.numbers
        stream, position = node.draw.stream.absolute(node.draw.position)
        dtype = target.dtype
        if isinstance(stream, CounterStream):
            if name not in ("uniform", "normal") or dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise Unsketchable(node, "draws with a generator of its own under the counter policy")
            self.origins.append(DrawOrigin(stream, number_and_word(position)[0]))
            return RandomFill(len(self.origins) - 1, name, arguments, dtype, 0)
        if kernel(name, dtype, dict(arguments)) is None or (name == "normal" and count < words_drawn.MIN_PIECE):
            raise Unsketchable(node, f"has no {dtype_name(dtype)} kernel for {count} elements")
        words = node.draw.after.words - node.draw.position.words
        self.origins.append(DrawOrigin(stream, position.words))
        fill = RandomFill(len(self.origins) - 1, name, arguments, dtype, words)
        rejection = node.draw.rejection
        return fill if rejection is None else Truncated(fill, rejection.low, rejection.high)

    # -- whole -------------------------------------------------------------------------------------------------------

    def whole(self, ref: Ref) -> WholeSketch:
        """The recipe of `ref`, node by node."""
        numbers: dict[Value, int] = {}
        inputs: list[Any] = []
        nodes = slice_for([ref.value])
        computed = {value for node in nodes for value in node.outputs}
        for value in [v for node in nodes for v in (*node.reads(), *(r.value for r in node.writes))] + [ref.value]:
            if value not in computed and value not in numbers:
                numbers[value] = len(inputs)
                if value.real is None:
                    inputs.append((value.shape, value.dtype))
                else:
                    inputs.append(self._values_of(value))
        steps = []
        for node in nodes:
            slots: list[Value] = []
            template = template_of(node, slots)._replace(keyed=False)
            fill: Any = None
            size: tuple[int, ...] = ()
            view: View | None = None
            if node.draw is not None:
                target = node.writes[0] if node.writes else None
                out = node.outputs[0]
                filled = target or Ref.of(out)
                fill, size = self.fill(node, filled), filled.size
                view = None if target is None else view_of(target)
                template = template._replace(args=(), kwargs=())
                slots = [target.value] if target is not None else []
            elif functional(node.op) not in RULES and node.op not in RULES:
                raise Unsketchable(node, "has no lowering")
            steps.append(SketchStep(template, tuple(numbers[v] for v in slots), fill, size, view))
            for value in node.outputs:
                numbers[value] = len(numbers)
        return WholeSketch(tuple(inputs), tuple(steps), numbers[ref.value], view_of(ref), ref.dtype)


def known(array: np.ndarray, dtype: torch.dtype) -> Sketch:
    """The sketch of a weight with known values."""
    builder = _Builder(array.shape)
    return Sketch(builder.data_of(array, dtype), array.shape, tuple(range(array.ndim)), [], builder.data)


def _number(value: Any, dtype: torch.dtype) -> Constant:
    return Constant(type(value), value, dtype)
