"""The table of lowering rules: a short function for each ATen overload.

A rule takes the ATen operation's arguments, in the schema's order and under its keyword names, with tensors replaced by
JAX arrays and every `torch.dtype` unchanged; it returns a JAX array, or a tuple of them if the operation returns
several tensors.

PyTorch's result dtypes are known from capture, so rules do not compute them: the driver (`program.py`) casts each
result to the dtype that capture recorded, and checks its shape. A rule chooses only the dtype of its arithmetic;
`promoted` in `dtypes.py` returns PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..compat.torch_names import OpOverload

RULES: dict[OpOverload, Callable] = {}
# Overloads with rules registered by users (`custom_ops.py`), which may differ in the next process.
OF_USERS: set[OpOverload] = set()
# Operations that hold Programs: their rules also take `lower`, which lowers one.
OF_PROGRAMS: set[OpOverload] = set()
# Matrix operations whose rules also take `by_columns`: for each matrix, whether it is stored by columns.
OF_ORDERS: set[OpOverload] = set()


def rule(*overloads: OpOverload | str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the lowering of `overloads`; each overload has one.

    An overload that some versions of PyTorch lack is given by name, "cholesky.default", and skipped if it is missing.
    """

    def enter(function: Callable) -> Callable:
        for overload in filter(None, map(_present, overloads)):
            if overload in RULES:
                raise ValueError(f"{overload} already has a lowering: {RULES[overload].__qualname__}")
            RULES[overload] = function
        return function

    return enter


def register(overload: OpOverload, function: Callable) -> None:
    """Register a function from a table of rules, named after its overload."""
    function.__name__ = function.__qualname__ = str(overload)
    rule(overload)(function)


def _present(overload: OpOverload | str) -> OpOverload | None:
    if isinstance(overload, OpOverload):
        return overload
    name, _, variant = overload.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), variant, None)
