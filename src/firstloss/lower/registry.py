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

from ..compat.torch_names import OpOverload

RULES: dict[OpOverload, Callable] = {}
# Those whose rules are a user's (`register.py`), which may be other functions at the next start.
OF_USERS: set[OpOverload] = set()
# Operations that hold Programs: their rules take `lower`, too, which lowers one.
OF_PROGRAMS: set[OpOverload] = set()
# Operations on matrices whose rules take `by_columns`, too: of each matrix, whether it lies in memory by columns.
OF_ORDERS: set[OpOverload] = set()


def rule(*overloads: OpOverload | str) -> Callable[[Callable], Callable]:
    """Enter the decorated function as the lowering of `overloads`; an overload is entered once.

    One that not every version of PyTorch has is given by name, "cholesky.default", and left out where it is missing.
    """

    def enter(function: Callable) -> Callable:
        for overload in filter(None, map(_present, overloads)):
            if overload in RULES:
                raise ValueError(f"{overload} already has a lowering: {RULES[overload].__qualname__}")
            RULES[overload] = function
        return function

    return enter


def _present(overload: OpOverload | str) -> OpOverload | None:
    if isinstance(overload, OpOverload):
        return overload
    name, _, variant = overload.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), variant, None)
