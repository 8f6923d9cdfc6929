"""The kind of a node, `Fill`, `Copy`, `Pointwise` or `Opaque`; only this file classifies nodes.

`Fill`: overwrites its target and reads nothing. `Copy`: copies elements of other Values, perhaps with a conversion.
`Pointwise`: each element of the result depends on the same element of the operands. `Opaque`: everything else, run by
PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ..compat.torch_names import schema_of
from .graph import Node, Ref
from .operations import trunc_normal_

aten: Any = torch.ops.aten

# oneDNN's LSTM layer: its kernel depends on PyTorch's grad mode, and on some processors rounds differently with
# gradients on. The node has the grad mode at capture as its last argument, `train`, which the kernel ignores.
DEPENDS_ON_GRAD_MODE = aten.mkldnn_rnn_layer.default


class Fill(NamedTuple):
    """Overwrites `target`.

    Attributes:
        name: "uniform", "normal", "bernoulli" or "random", which draw; "constant"; or "unwritten".
        numbers: the parameters by name, in the same order: low and high; mean and std; p; low and high (None: the
            dtype's limit); value; none.
    """

    target: Ref
    name: str
    numbers: tuple[tuple[str, Any], ...]

    @property
    def value(self) -> Any:
        """The value of a constant."""
        return self.numbers[0][1]

    @property
    def pair(self) -> tuple[float, float]:
        """The two parameters of a uniform or normal."""
        (_, first), (_, second) = self.numbers
        return float(first), float(second)


class Copy(NamedTuple):
    """Copies `sources` to `target`: one of them, or several concatenated along `dim`."""

    target: Ref
    sources: tuple[Ref, ...]
    dim: int | None


class Pointwise(NamedTuple):
    """An elementwise operation.

    Attributes:
        args: the operation's arguments, `target` first if it is in place.
        exact: whether the bits of an element do not depend on its position in memory.
    """

    target: Ref
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: bool
    in_place: bool


class Opaque:
    """Anything else."""


Kind = Fill | Copy | Pointwise | Opaque
_OPAQUE = Opaque()

_UNIFORM = (("low", "from", 0.0), ("high", "to", 1.0))
_NORMAL = (("mean", "mean", 0.0), ("std", "std", 1.0))
_STANDARD_UNIFORM = (("low", None, 0.0), ("high", None, 1.0))
_STANDARD_NORMAL = (("mean", None, 0.0), ("std", None, 1.0))
# The fill's name, and for each of its parameters the name of the operation's argument and its default.
_FILLS: dict[Any, tuple[str, tuple[tuple[str, str | None, Any], ...]]] = {
    aten.uniform_.default: ("uniform", _UNIFORM),
    aten.normal_.default: ("normal", _NORMAL),
    aten.normal.float_float: ("normal", _NORMAL),
    trunc_normal_: ("normal", _NORMAL),  # the draw has the bounds
    aten.rand.default: ("uniform", _STANDARD_UNIFORM),
    aten.rand.generator: ("uniform", _STANDARD_UNIFORM),
    aten.randn.default: ("normal", _STANDARD_NORMAL),
    aten.randn.generator: ("normal", _STANDARD_NORMAL),
    aten.bernoulli_.float: ("bernoulli", (("p", "p", 0.5),)),
    aten.random_.default: ("random", (("low", None, None), ("high", None, None))),
    aten.random_.to: ("random", (("low", None, 0), ("high", "to", None))),
    getattr(aten.random_, "from"): ("random", (("low", "from", None), ("high", "to", None))),
    aten.randint.default: ("random", (("low", None, 0), ("high", "high", None))),
    aten.randint.low: ("random", (("low", "low", None), ("high", "high", None))),
    aten.zero_.default: ("constant", (("value", None, 0.0),)),
    aten.zeros.default: ("constant", (("value", None, 0.0),)),
    aten.ones.default: ("constant", (("value", None, 1.0),)),
    aten.fill_.Scalar: ("constant", (("value", "value", None),)),
    aten.full.default: ("constant", (("value", "fill_value", None),)),
    aten.empty.memory_format: ("unwritten", ()),
    aten.empty_strided.default: ("unwritten", ()),
}
_COPIES = {aten.copy_, aten.clone, aten._to_copy}
# Correctly rounded according to IEEE 754, so that vectorized and scalar code give the same bits, and a tensor may be
# split anywhere. exp, sin and others are not: their vectorized versions may differ in the last bit. erfinv_ is not
# correctly rounded, but PyTorch computes vectors and their tails in the same way (`tests/engine/test_epilogue.py`).
EXACT = {
    getattr(aten, name)
    for name in (
        "add add_ sub sub_ mul mul_ div div_ neg neg_ abs abs_ clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ "
        "sqrt sqrt_ where masked_fill masked_fill_ erfinv_"
    ).split()
}
# In-place operations whose result does not depend on the target's old content.
_OVERWRITING = {
    *(f"aten::{name}_" for name in "zero fill copy uniform normal bernoulli exponential random cauchy".split()),
    *("aten::log_normal_", "aten::geometric_", "aten::_foreach_zero_", "aten::_foreach_copy_"),
    schema_of(trunc_normal_).name,
}


def replaces_target(op: Any) -> bool:
    """Whether an in-place operation's result does not depend on its target's old content."""
    return schema_of(op).name in _OVERWRITING


def has_counter_rule(op: Any) -> bool:
    """Whether the counter policy has its own, device-independent algorithm for this operation."""
    return op in _FILLS and _FILLS[op][0] in ("uniform", "normal") and op is not trunc_normal_


def fill_pair(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[float, float]] | None:
    """For an operation with a counter rule: "uniform" or "normal", and its two parameters."""
    numbers = _numbers(op, _by_name(op, args, kwargs)) if has_counter_rule(op) else None
    return None if numbers is None else (_FILLS[op][0], (float(numbers[0][1]), float(numbers[1][1])))


def kind_of(node: Node) -> Kind:
    """The kind of `node`; computed once."""
    if node.kind is None:
        node.kind = _classify(node)
    return node.kind


def is_unwritten(node: Node | None) -> bool:
    """Whether the node's result is uninitialized memory."""
    return node is None or node.op in _FILLS and _FILLS[node.op][0] == "unwritten"


def arguments_of(node: Node) -> dict[str, Any]:
    """A node's arguments by the names of its schema; without defaults."""
    return _by_name(node.op, node.args, node.kwargs)


def _by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in schema_of(op).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _classify(node: Node) -> Kind:
    if len(node.outputs) != 1 or len(node.writes) > 1:
        return _OPAQUE
    in_place = bool(node.writes)
    if in_place and (not node.args or node.args[0] is not node.writes[0]):
        return _OPAQUE
    target = node.writes[0] if in_place else Ref.of(node.outputs[0])
    op: Any = node.op
    if op in _FILLS:
        return _fill(node, target)
    if op in (aten.cat.default, aten.stack.default):
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % max(len(target.size), 1)
        sources = node.args[0] if op is aten.cat.default else [_unsqueezed(ref, dim) for ref in node.args[0]]
        return Copy(target, tuple(sources), dim)
    if op.overloadpacket in _COPIES:
        source = node.args[1] if op.overloadpacket is aten.copy_ else node.args[0]
        return Copy(target, (source,), None) if type(source) is Ref else _OPAQUE
    exact = op.overloadpacket in EXACT
    if exact or torch.Tag.pointwise in op.tags:
        exact = exact and node.kwargs.get("alpha", 1) == 1
        return Pointwise(target, op, node.args, node.kwargs, exact, in_place)
    return _OPAQUE


def _unsqueezed(ref: Ref, dim: int) -> Ref:
    """`ref` with a dimension of size 1 before `dim`."""
    stride = ref.size[dim] * ref.stride[dim] if dim < len(ref.size) else 1
    size, strides = ((*old[:dim], new, *old[dim:]) for old, new in ((ref.size, 1), (ref.stride, stride)))
    return ref._replace(size=size, stride=strides)


def _fill(node: Node, target: Ref) -> Kind:
    numbers = _numbers(node.op, arguments_of(node))
    return _OPAQUE if numbers is None else Fill(target, _FILLS[node.op][0], numbers)


def _numbers(op: Any, given: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """The parameters of a fill, by name; None if one of them is a tensor."""
    numbers = []
    for name, argument, default in _FILLS[op][1]:
        number = given.get(argument, default) if argument is not None else default
        if number is not None and type(number) not in (int, float, bool, complex):
            return None
        numbers.append((name, number))
    return tuple(numbers)


def _arguments(op: Any) -> dict[str, str]:
    """The types of an operation's arguments, by name."""
    return {argument.name: str(argument.type) for argument in schema_of(op).arguments}


@functools.cache
def with_generator(op: Any) -> Any:
    """The overload of a random operation that takes a generator, as `randint.low_generator` for `randint.low`.

    Without a generator it would draw from the global one, which the user's threads use.

    Returns:
        `op` itself if it takes a generator; None if there is no such overload with the same arguments.
    """
    expected = _arguments(op)
    if "generator" in expected:
        return op
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = _arguments(overload)
        if arguments.pop("generator", None) is not None and arguments == expected:
            return overload
    return None
