"""The traits of an ATen overload, derived from its schema and cached."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..compat.torch_names import OpOverload, schema_of
from ..program.node_kinds import replaces_target

aten = torch.ops.aten

# Views that are not annotated as such in their schema.
_UNANNOTATED_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)

# Views according to the schema, whose result has a lazy conjugate or negative bit, which a geometry cannot express:
# recorded as the operations that compute it.
_LAZY_BITS = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}

# Namespaces whose operations draw random numbers only if their schema says so.
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", "firstloss", "quantized", "torchvision"})


class Traits(NamedTuple):
    """Properties of an ATen overload.

    Attributes:
        writes: positions (int) or keywords (str) of the arguments that it writes to.
        returns: for each return value the entry of `writes` that it aliases, or None for a new tensor.
        fill: whether it overwrites its only target without reading it.
    """

    view: bool
    writes: tuple[int | str, ...]
    returns: tuple[int | str | None, ...]
    fill: bool
    out: bool  # an out= overload, which resizes its targets
    random: str | None  # the name for `words_drawn.draw`, if it is random
    generator: int | None  # the position of a positional `generator` argument
    replacement: OpOverload | None  # records a lazy conjugation or negation
    opaque: bool  # a custom operation, which may draw and may lack a meta kernel


@functools.cache
def traits_of(op: OpOverload) -> Traits:
    """The traits of `op`."""
    schema = schema_of(op)
    writes: list[int | str] = []
    by_alias: dict[str, int | str] = {}
    generator = None
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            where: int | str = arg.name if arg.kwarg_only else i
            writes.append(where)
            for name in arg.alias_info.before_set:
                by_alias[name] = where
        if arg.name == "generator" and not arg.kwarg_only:
            generator = i
    returns: list[int | str | None] = []
    view = op in _UNANNOTATED_VIEWS
    for ret in schema.returns:
        info = ret.alias_info
        if info is None:
            returns.append(None)
        elif info.is_write:
            returns.append(next(by_alias[name] for name in info.before_set))
        else:
            returns.append(None)
            view = True
    replacement = _LAZY_BITS.get(op)
    base = schema.name.split("::")[1]
    # Some random operations, such as binomial, are not tagged.
    draws = torch.Tag.nondeterministic_seeded in op.tags or any(arg.name == "generator" for arg in schema.arguments)
    random = base.rstrip("_") if draws else None
    fill = replaces_target(op) and len(writes) == 1
    return Traits(
        view and not writes and replacement is None,
        tuple(writes),
        tuple(returns),
        fill,
        bool(writes) and all(isinstance(where, str) for where in writes),
        random,
        generator,
        replacement,
        op.namespace not in _KNOWN_NAMESPACES,
    )
