"""The table of lowering rules: one short function an ATen overload.

A rule takes what the ATen operation takes, in the schema's order and under the schema's keyword names, with every
tensor replaced by a JAX array and every `torch.dtype` left as it is; it returns a JAX array, or a tuple of them where
the operation returns several tensors.

PyTorch's result dtypes are known from capture, so a rule does not work them out: the driver (`program.py`) casts
each result to the dtype that capture recorded, and checks its shape. What a rule does own is the dtype that the
arithmetic is done in; `promoted` in `dtypes.py` gives the one PyTorch uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RULES: dict[torch._ops.OpOverload, Callable] = {}


def rule(*overloads: torch._ops.OpOverload) -> Callable[[Callable], Callable]:
    """Enter the decorated function as the lowering of `overloads`; an overload is entered once."""

    def enter(function: Callable) -> Callable:
        for overload in overloads:
            if overload in RULES:
                raise ValueError(f"{overload} already has a lowering: {RULES[overload].__qualname__}")
            RULES[overload] = function
        return function

    return enter
