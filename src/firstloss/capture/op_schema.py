"""Properties of an ATen overload that capture needs, read from its schema once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..compat.torch_names import OpOverload, schema_of
from ..program.node_kinds import replaces_target

aten = torch.ops.aten

# These share memory with their argument although their schema does not say so.
_UNANNOTATED_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)

# Views to the schema, but what they return differs from its storage by a lazy conjugation or negation, which a
# geometry cannot say: they are recorded as the operations that compute it.
_LAZY_BITS = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


# Whose operations are known to draw only what their schema says.
_OURS = frozenset({"aten", "prims", "prim", "firstloss", "quantized", "torchvision"})


class Traits(NamedTuple):
    """`writes`: positions (int) or keywords (str) of the arguments written to; `returns`: for each return value the
    entry of `writes` that it is, or None for a new tensor."""

    view: bool
    writes: tuple[int | str, ...]
    returns: tuple[int | str | None, ...]
    fill: bool
    out: bool  # it writes its results into arguments that are resized to fit
    random: str | None  # the operation's name in the table of words drawn, or None
    generator: int | None  # position of the `generator` argument where it is positional
    replacement: OpOverload | None
    opaque: bool  # a user's own operation: it may draw, and its meta kernel may be missing


@functools.cache
def traits(op: OpOverload) -> Traits:
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
    # Some that draw have no tag, as binomial; what they draw from tells.
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
        op.namespace not in _OURS,
    )
