"""An in-place overload and its functional counterpart take the same arguments in the same order."""

import torch

from firstloss.lower.registry import functional
from firstloss.lower.rules import RULES


def overloads():
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name[6:].partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def positional(op):
    return [a.name for a in op._schema.arguments if not a.kwarg_only]


def test_arguments_are_in_the_same_order():
    different = {}
    for op in overloads():
        twin = functional(op)
        if not op._schema.is_mutable or twin is op or twin not in RULES:
            continue
        actual, expected = positional(op), positional(twin)
        if actual != expected[: len(actual)] and sorted(actual) == sorted(expected):
            different[str(op)] = (actual, expected)
    assert not different
